"""The demo in a real process and in a real Chromium, at desktop and phone width, and 30 clients.

Set CONCEPT_ERASER_SHOTS to a folder to save screenshots of every tab, in both widths and both
themes.
"""

from __future__ import annotations

import base64
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from concept_eraser import api
from tests.conftest import short
from tests.processes import Command, free_port, server_address

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser") if (path := shutil.which(name))), None
)
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
CLIENTS = 30

needs_browser = pytest.mark.skipif(
    CHROMIUM is None,
    reason=(
        "no Chromium here (Debian: apt-get install chromium), so the demo is not tried in a browser"
    ),
)


class Server:
    """`concept-eraser demo` in a process of its own. Its jobs are forked processes too."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.port, self.folder, start = free_port(), folder, time.monotonic()
        self.url = f"http://127.0.0.1:{self.port}/"
        arguments = ["demo", "--no-browser", "--port", str(self.port)]
        self.process = Command(
            *arguments,
            *("--runs", str(folder / "runs")),
            *options,
            folder=folder,
            script=Path(__file__).with_name("served.py"),
            environment={"TEST_PROCESSES": server_address()},
        )
        self.process.wait_until(lambda: "the page is at" in self.text(), 90)
        self.seconds = time.monotonic() - start

    def text(self) -> str:
        return self.process.stdout + self.process.stderr

    def memory(self) -> float:
        """Resident memory in MB."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) / 1024

    def close(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.wait(60)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("served")
    api.erase(
        short(model="tiny-sd", training__lr=1e-2, training__steps=8),
        output=folder / "runs" / "star",
    )
    new_server = Server(folder)
    yield new_server
    new_server.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        new_browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield new_browser
        new_browser.close()


@pytest.fixture(params=[WIDE, PHONE], ids=["desktop", "phone"])
def page(request: pytest.FixtureRequest, browser: Any, server: Server) -> Iterator[Any]:
    yield from _page(browser, server, request.param)


@pytest.fixture
def desktop(browser: Any, server: Server) -> Iterator[Any]:
    yield from _page(browser, server, WIDE)


def _page(browser: Any, server: Server, size: Any) -> Iterator[Any]:
    """A page that sends requests to this machine only and logs no errors to the console."""
    context = browser.new_context(viewport=size)
    page, outside, bad = context.new_page(), [], []
    page.set_default_timeout(60_000)
    page.on(
        "request",
        lambda r: (
            None if r.url.startswith((server.url, "data:", "blob:")) else outside.append(r.url)
        ),
    )
    page.on("pageerror", lambda error: bad.append(str(error)))
    page.goto(server.url + "?steps=3&seeds=2&runs=star")
    page.wait_for_selector(".ce-slider")
    yield page
    assert outside == []
    assert bad == []
    context.close()


def sources(page: Any) -> list[str]:
    """The images of the grid, row by row."""
    return page.eval_on_selector_all("#shown .ce-grid img", "all => all.map(image => image.src)")


def open_tab(page: Any, name: str) -> None:
    page.get_by_role("tab", name=name, exact=True).click()
    page.wait_for_timeout(300)


def write(page: Any, selector: str, value: str) -> None:
    """Fill a field and check that it stays filled.

    Gradio mounts the content of a closed accordion when it is opened, and sets each field to its
    first value some frames later. A value that a script writes in between is lost. On a loaded
    machine a run then began under a wrong name.
    """
    box = page.locator(selector)
    for _ in range(20):
        box.fill(value)
        page.wait_for_timeout(300)
        if box.input_value() == value:
            return
    raise AssertionError(f"{selector} does not keep {value!r}")


def set_slider(page: Any, identity: str, value: str) -> None:
    write(page, f"{identity} input[type=number]", value)
    page.locator(f"{identity} input[type=number]").press("Tab")


def quiet(page: Any) -> None:
    """Wait until no job is running."""
    page.wait_for_function("() => !document.querySelector('#jobs li')", timeout=120_000)


def keep(page: Any, name: str) -> None:
    folder = os.environ.get("CONCEPT_ERASER_SHOTS")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        page.screenshot(
            path=Path(folder) / f"{name}-{page.viewport_size['width']}.png", full_page=True
        )


@needs_browser
def test_a_prompt_gives_two_images_and_strength_0_the_original(page: Any, server: Server) -> None:
    before = sources(page)
    page.locator("#prompt textarea").fill("a blue star")
    page.locator("#draw").click()
    page.wait_for_function(
        (
            "old => { const s = [...document.querySelectorAll('#shown .ce-grid img')].map(i "
            "=> i.src); return s.length == 4 && !s.some(x => old.includes(x)) }"
        ),
        arg=before,
    )
    one = sources(page)
    assert one[0] != one[1]
    assert "blue" in page.url  # the address is the link to the settings
    slider = page.locator("#strength input[type=range]")
    slider.focus()
    slider.press("Home")  # by keyboard, to 0
    slider.evaluate("s => s.dispatchEvent(new PointerEvent('pointerup', {bubbles: true}))")
    page.wait_for_function(
        "old => document.querySelectorAll('#shown .ce-grid img')[1].src != old", arg=one[1]
    )
    zero = sources(page)
    assert pixels(page, zero[0]) == pixels(page, zero[1])
    assert pixels(page, zero[0]) == pixels(page, one[0])
    assert base64.b64decode(one[1].split(",")[1])[:8] == b"\x89PNG\r\n\x1a\n"
    keep(page, "strength")


def pixels(page: Any, source: str) -> str:
    """The pixels of an image, without its metadata."""
    return page.evaluate(
        (
            "async s => { const i = new Image(); i.src = s; await i.decode(); const c = "
            "document.createElement('canvas'); c.width = i.width; c.height = i.height; const "
            "x = c.getContext('2d'); x.drawImage(i, 0, 0); return x.getImageData(0, 0, "
            "i.width, i.height).data.join() }"
        ),
        source,
    )


@needs_browser
def test_bad_input_is_shown_as_a_sentence(page: Any, server: Server) -> None:
    page.locator("#prompt textarea").fill("star " * 100)
    page.locator("#draw").click()
    page.wait_for_selector("#compare-said [role=alert]")
    assert "at most 300" in page.locator("#compare-said").inner_text()
    open_tab(page, "Erase")
    page.get_by_text("Size, seed, name").click()
    write(page, "#run-name input, #run-name textarea", "../../outside")
    page.locator("#erase-go").click()
    page.wait_for_selector("#erase-said [role=alert]")
    assert "cannot be the name of a run" in page.locator("#erase-said").inner_text()
    assert not (server.folder.parent / "outside").exists()
    for path in (
        "gradio_api/file=/etc/passwd",
        "gradio_api/file=../../etc/passwd",
        f"gradio_api/file={server.folder}/runs/star/recipe.yaml",
        "gradio_api/file=recipe.yaml",
        "static/../../etc/passwd",
    ):
        answer = page.request.get(server.url + path)
        assert answer.status in (403, 404) or "root:" not in answer.text(), path
        assert "model: tiny-sd" not in answer.text()


@needs_browser
def test_an_erasure_survives_a_reload_and_is_cancelled(desktop: Any, server: Server) -> None:
    page = desktop
    open_tab(page, "Erase")
    page.get_by_text("Size, seed, name").click()
    write(page, "#run-name input, #run-name textarea", "cancelled")
    set_slider(page, "#train-images", "4")
    set_slider(page, "#train-steps", "500")
    page.locator("#erase-go").click()
    page.wait_for_selector("#jobs li")
    page.reload()
    page.wait_for_selector("#jobs .ce-running")
    open_tab(page, "Erase")
    # it trains, and the page shows its curves
    page.wait_for_selector("#erase-live svg", timeout=120_000)
    keep(page, "erase")
    page.locator("#cancel").click()
    quiet(page)
    page.wait_for_selector("#erase-live :text('resumed')")
    assert (server.folder / "runs" / "cancelled" / "state.ckpt").is_file()
    assert not (server.folder / "runs" / "cancelled" / "done.json").exists()


@needs_browser
def test_an_attack_of_a_few_rounds_and_the_other_tabs(desktop: Any) -> None:
    page = desktop
    open_tab(page, "Attack")
    page.wait_for_function("() => document.querySelector('#attack-run input').value == 'star'")
    set_slider(page, "#attack-rounds", "2")
    page.locator("#attack-go").click()
    page.wait_for_selector("#jobs li")
    quiet(page)
    page.wait_for_selector("#attack-live p[role]")
    text = page.locator("#attack-live").inner_text()
    assert "2 rounds" in text or "prompts succeeded" in text or "nothing to attack" in text
    keep(page, "attack")
    open_tab(page, "Results")
    page.wait_for_selector("#plot svg")
    assert "star" in page.locator("#runs-table").inner_text()
    assert "MUNBa" in page.locator("#table").inner_text()
    open_tab(page, "Images")
    page.locator("#images-go").click()
    # there is no such run: a sentence, not a traceback
    page.wait_for_selector("#images-shown [role=alert]")


CONTRAST = """() => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const rgb = c => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = c;
    canvas.fillRect(0, 0, 1, 1);
    return canvas.getImageData(0, 0, 1, 1).data;
  };
  const light = c => {
    const [r, g, b] = [...c].slice(0, 3).map(v => {
      v /= 255;
      return v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
    });
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const problems = [];
  const elements = 'p, span, label, button, h1, h2, td, th, li, a, b, figcaption, text';
  for (const e of document.querySelectorAll(elements)) {
    const text = [...e.childNodes]
      .filter(n => n.nodeType == 3).map(n => n.textContent.trim()).join('');
    if (!text || !e.getClientRects().length) continue;
    if (e.closest('.ce-veil, .ce-box, footer, [aria-hidden=true]')) continue;
    const style = getComputedStyle(e);
    if (style.visibility == 'hidden' || +style.opacity < .5) continue;
    let b = e, back;
    while (b && !(back = rgb(getComputedStyle(b).backgroundColor))[3]) b = b.parentElement;
    const two = [
      light(rgb(e.tagName == 'text' ? style.fill : style.color)),
      light(b ? back : [255, 255, 255]),
    ].sort((a, b) => b - a);
    const ratio = (two[0] + .05) / (two[1] + .05);
    if (ratio < 4.5) problems.push(`${text.slice(0, 30)}: ${ratio.toFixed(2)}`);
  }
  return problems; }"""
CONTROLS_WITHOUT_NAME = """() => [
  ...document.querySelectorAll('input, select, textarea, button, img')
].filter(e => e.getClientRects().length && !(
    e.getAttribute('aria-label') || e.getAttribute('aria-labelledby') || e.alt || e.title
    || e.innerText || (e.labels && e.labels.length) || e.closest('label')))
    .map(e => e.outerHTML.slice(0, 160))"""


@needs_browser
def test_both_themes_can_be_read_and_every_control_has_a_name(page: Any) -> None:
    for theme in ("light", "dark"):
        for name in ("Compare", "Erase", "Attack", "Results", "Images"):
            open_tab(page, name)
            assert page.evaluate(CONTRAST) == [], (theme, name)
            assert page.evaluate(CONTROLS_WITHOUT_NAME) == [], name
            wide = page.evaluate(
                "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
            )
            assert wide <= 0, f"{name} is {wide} pixels too wide"
            keep(page, f"{name.lower()}-{theme}")
        page.get_by_role("button", name="Light / dark").click()
        page.wait_for_timeout(400)


@needs_browser
def test_a_sensitive_image_is_blurred_until_it_is_clicked(browser: Any) -> None:
    import numpy as np

    from concept_eraser.demo import image_html
    from concept_eraser.demo import page as demo

    judgement = image_html.Judgement("a nude", True, None, [("breast", 0.9, (2, 2, 4, 4))])
    column = image_html.ImageColumn(
        "after", np.zeros((1, 16, 16, 3), np.uint8), [judgement], [{"seed": 0}]
    )
    page = browser.new_page()
    style = (Path(demo.__file__).parent / "style.css").read_text()
    page.set_content(f"<style>{style}</style>{image_html.comparison([column], ['0'])}")
    image = page.locator(".ce-veiled img")
    assert "blur" in image.evaluate("i => getComputedStyle(i).filter")
    page.get_by_label("show a sensitive image").focus()
    page.keyboard.press("Space")
    assert image.evaluate("i => getComputedStyle(i).filter") == "none"
    assert not page.locator(".ce-box").is_visible()
    page.get_by_label("Show boxes").check()
    assert page.locator(".ce-box").is_visible()
    page.close()


@needs_browser
def test_the_keyboard_reaches_prompt_presets_and_the_generate_button(desktop: Any) -> None:
    desktop.locator("#prompt textarea").focus()
    names = []
    for _ in range(12):
        desktop.keyboard.press("Tab")
        names.append(desktop.evaluate("() => document.activeElement.closest('[id]')?.id ?? ''"))
    assert {"preset-forget", "preset-retain", "draw"} <= set(names)


def test_a_password_is_required(tmp_path: Path) -> None:
    import httpx

    server = Server(tmp_path, "--auth", "me:secret")
    try:
        assert httpx.get(server.url + "config").status_code == 401
        assert (
            httpx.post(server.url + "login", data={"username": "me", "password": "no"}).status_code
            == 400
        )
        with httpx.Client() as client:
            client.post(
                server.url + "login", data={"username": "me", "password": "secret"}
            ).raise_for_status()
            assert client.get(server.url + "config").status_code == 200
            assert "default-src 'self'" in client.get(server.url).headers["content-security-policy"]
            # the guard answers before the login
            for foreign in ({"host": "evil.example"}, {"origin": "http://evil.example"}):
                assert client.get(server.url + "config", headers=foreign).status_code == 403
                assert (
                    client.post(
                        server.url + "gradio_api/upload",
                        files={"files": ("a.png", b"1")},
                        headers=foreign,
                    ).status_code
                    == 403
                )
        for _ in range(5):  # the successful login reset the count
            assert (
                httpx.post(
                    server.url + "login", data={"username": "me", "password": "no"}
                ).status_code
                == 400
            )
        assert (
            httpx.post(
                server.url + "login", data={"username": "me", "password": "secret"}
            ).status_code
            == 429
        )
    finally:
        server.close()
    assert server.process.returncode == 0


def test_thirty_clients_at_once(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every client gets an answer, in turn: no error and no lost job.

    The third round needs no more memory than the first.
    """
    from gradio_client import Client

    monkeypatch.setenv("GRADIO_ANALYTICS_ENABLED", "False")
    # the page has no TLS: with ssl_verify each request would read the system's certificates
    settings = {"verbose": False, "ssl_verify": False, "analytics_enabled": False}
    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = list(pool.map(lambda _: Client(server.url, **settings), range(CLIENTS)))

    def ask(number: int) -> str:
        html, message, _ = clients[number].predict(
            f"a {['red', 'blue'][number % 2]} star",
            [],
            1.0,
            2,
            5.0,
            1,
            number % 5,
            "auto",
            api_name="/draw",
        )
        return message or html

    def queue(number: int) -> str:
        return clients[number].predict("star", "seed_search", 2, 1, 5, number, api_name="/attack")

    sizes, seconds = [], []
    for _ in range(3):
        start = time.monotonic()
        with ThreadPoolExecutor(CLIENTS) as pool:
            pages = list(pool.map(ask, range(CLIENTS)))
        seconds.append(time.monotonic() - start)
        assert all("<figure" in html for html in pages), [
            html for html in pages if "<figure" not in html
        ][:1]
        sizes.append(server.memory())
    with ThreadPoolExecutor(CLIENTS) as pool:
        messages = list(pool.map(queue, range(CLIENTS)))
    numbers = [int(re.findall(r"#(\d+) was put into the queue", text)[0]) for text in messages]
    assert len(set(numbers)) == CLIENTS  # no two took the same place, none was lost
    for number in sorted(numbers, reverse=True):
        clients[0].predict(str(number), api_name="/cancel")
    assert sizes[2] < sizes[0] * 1.1 + 30, sizes
    assert "Traceback" not in server.text(), server.text()[-3000:]
    print(
        f"30 clients: {[round(s, 1) for s in seconds]} s a round, "
        f"{[round(s) for s in sizes]} MB; first page {server.seconds:.1f} s"
    )


@needs_browser
def test_a_control_has_a_column_a_slider_and_the_links_of_the_page(
    browser: Any, server: Server, tmp_path: Path
) -> None:
    shutil.copytree(server.folder / "runs" / "star", tmp_path / "runs" / "star")
    second = Server(tmp_path, "--control", "tiny-sd-without-star")
    try:
        for page in _page(browser, second, WIDE):
            heads = page.locator("#shown .ce-head")
            assert heads.all_inner_texts() == ["before", "star", "never learned star"]
            assert len(set(sources(page))) == 6
            assert page.locator(".ce-ends").inner_text().split("\n") == ["before", "star"]
            page.locator('#shown button[onclick^="cePick(this,0,2"]').first.click()
            assert "never learned star" in page.locator(".ce-ends").inner_text()
            assert "never learned star" in page.locator(".ce-summary").inner_text()
            link = page.locator("#link a").get_attribute("href")
            assert "control" not in link
            images = sources(page)
            page.goto(second.url + link)
            page.wait_for_selector(".ce-slider")
            assert sources(page) == images
            open_tab(page, "Attack")
            assert "never learned the concept" in page.locator("#tab-attack").inner_text()
    finally:
        second.close()
