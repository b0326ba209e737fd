"""The demo against hostile users.

The tests cover requests from other sites, uploads, logins and run folders from other people.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from concept_eraser import api
from concept_eraser.concepts.plan import make_plan
from concept_eraser.demo import (
    attack,
    compare,
    erase,
    figures,
    guard,
    jobs,
    labelled,
    polling,
    presets,
    results,
    safety,
    state,
    uploads,
)
from concept_eraser.demo.context import Desk
from concept_eraser.demo.guard import RequestGuard
from concept_eraser.demo.login import ALL, EACH, WINDOW, Account, Attempts
from concept_eraser.demo.page import middleware
from concept_eraser.demo.state import ImageSettings, Library
from concept_eraser.demo.uploads import Uploads
from concept_eraser.recipes import recipe as recipes
from concept_eraser.runs import concept_job
from concept_eraser.storage import locks
from concept_eraser.utils.errors import UserError
from tests.conftest import short
from tests.processes import DemoWorker

PAGE = "http://127.0.0.1:7860"
FOREIGN = [
    {"host": "evil.example"},
    {"host": "evil.example:7860"},
    {"host": "127.0.0.1.evil.example:7860"},
    {"host": "127.0.0.1:80"},
    {"host": ""},
    {"origin": "http://evil.example"},
    {"origin": "http://127.0.0.1:8000"},
    {"origin": "http://localhost:7860"},
    {"origin": "null"},
    {"origin": "file://127.0.0.1:7860"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
]
CODE = """
import pathlib
pathlib.Path(__file__).with_name("canary").touch()

def go():
    pathlib.Path(__file__).with_name("canary").touch()
"""


class Now:
    """A clock that a test moves."""

    def __init__(self, start: float = 1000.0) -> None:
        self.seconds = start

    def __call__(self) -> float:
        return self.seconds


# --- requests -------------------------------------------------------------------------------------


def gradio_app(
    folder: Path, *, attempts: Attempts | None = None, uploads: Uploads | None = None
) -> Any:
    """Gradio's own application with a page of one field, behind the guard, as in `page.serve`."""
    import gradio as gr
    from gradio.routes import App

    with gr.Blocks() as page:
        box = gr.Textbox()
        box.submit(lambda text: text, box, box, api_name="same")
    page.queue(max_size=10)
    page.auth = Account("me", "right-word") if attempts else None
    page.auth_message, page.max_file_size = None, 10**6
    stack = middleware("127.0.0.1", ["lab.example"], uploads or Uploads(folder), attempts)
    return App.create_app(page, app_kwargs={"middleware": stack})


@pytest.fixture
def browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client of a page without a password."""
    from starlette.testclient import TestClient

    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path))
    with TestClient(gradio_app(tmp_path), PAGE, client=("127.0.0.1", 5)) as client:
        yield client


def routes_of(router: Any) -> Iterator[tuple[str, str]]:
    """Method and path of every route, including the routers that FastAPI nests inside others."""
    for route in router.routes:
        inner = getattr(route, "original_router", None)
        if inner is not None:
            yield from routes_of(inner)
        else:
            yield from (
                (method, route.path) for method in getattr(route, "methods", None) or ["GET"]
            )


def test_every_route_refuses_foreign_hosts_and_foreign_pages(browser: Any) -> None:
    routes = list(routes_of(browser.app))
    assert len(routes) > 60
    paths = {
        "/gradio_api/upload",
        "/gradio_api/call/{api_name}",
        "/gradio_api/queue/join",
        "/gradio_api/heartbeat/{session_hash}",
        "/login",
        "/config",
        "/",
    }
    assert paths <= {path for _, path in routes}
    for method, path in routes:
        plain = path.replace("{", "").replace("}", "").replace(":path", "")
        for headers in FOREIGN:
            answer = browser.request(
                method, plain, headers=headers, content=b"{}" if method == "POST" else None
            )
            assert answer.status_code == 403, (method, plain, headers)
            if method != "HEAD":
                assert len(answer.text.splitlines()) == 1, answer.text


def test_the_page_itself_is_answered(browser: Any) -> None:
    for headers in (
        {},
        {"origin": PAGE, "sec-fetch-site": "same-origin"},
        {"sec-fetch-site": "none"},
    ):
        assert browser.get("/config", headers=headers).status_code == 200
        answer = browser.post("/gradio_api/call/same", json={"data": ["a"]}, headers=headers)
        assert answer.status_code == 200, answer.text
        assert (
            browser.post(
                "/gradio_api/upload", files={"files": ("a.png", b"1")}, headers=headers
            ).status_code
            == 200
        )


def ask(
    app: RequestGuard,
    kind: str,
    host: str,
    server: tuple[str, int],
    path: str = "/x",
    method: str = "GET",
    **headers: str,
) -> int:
    """The status of a request that is sent without a library; 403 for a refused websocket."""
    answers: list[Any] = []

    async def receive() -> Any:
        return {"type": "websocket.connect"} if kind == "websocket" else {"type": "http.request"}

    async def send(message: Any) -> None:
        answers.append(message)

    header_pairs = [
        (b"host", host.encode()),
        *((k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()),
    ]
    asyncio.run(
        app(
            {
                "type": kind,
                "method": method,
                "path": path,
                "headers": header_pairs,
                "server": server,
                "client": ("192.168.1.9", 1),
                "scheme": "http" if kind == "http" else "ws",
            },
            receive,
            send,
        )
    )
    return 403 if answers[0]["type"] == "websocket.close" else answers[0].get("status", 200)


async def welcome(scope: Any, receive: Any, send: Any) -> None:
    await send(
        {"type": "websocket.accept"}
        if scope["type"] == "websocket"
        else {"type": "http.response.start", "status": 200, "headers": []}
    )


@pytest.mark.parametrize("kind", ["http", "websocket"])
@pytest.mark.parametrize(
    ("listens", "host", "server", "status"),
    [
        ("127.0.0.1", "127.0.0.1:7860", ("127.0.0.1", 7860), 200),
        ("127.0.0.1", "localhost:7860", ("127.0.0.1", 7860), 200),
        ("127.0.0.1", "LocalHost.:7860", ("127.0.0.1", 7860), 200),
        ("::1", "[::1]:7860", ("::1", 7860), 200),
        ("::1", "[0:0::1]:7860", ("::1", 7860), 200),
        ("127.0.0.1", "localhost", ("127.0.0.1", 80), 200),
        ("127.0.0.1", "localhost", ("127.0.0.1", 7860), 403),
        ("127.0.0.1", "localhost:7861", ("127.0.0.1", 7860), 403),
        ("127.0.0.1", "localhost:x", ("127.0.0.1", 7860), 403),
        ("127.0.0.1", "me@localhost:7860", ("127.0.0.1", 7860), 403),
        ("127.0.0.1", "localhost:7860/", ("127.0.0.1", 7860), 403),
        ("0.0.0.0", "192.168.1.5:7860", ("192.168.1.5", 7860), 200),
        ("0.0.0.0", "192.168.1.6:7860", ("192.168.1.5", 7860), 403),
        ("0.0.0.0", "localhost:7860", ("192.168.1.5", 7860), 403),
        ("0.0.0.0", "localhost:7860", ("127.0.0.1", 7860), 200),
        ("0.0.0.0", "0.0.0.0:7860", ("127.0.0.1", 7860), 403),
        ("::", "192.168.1.5:7860", ("::ffff:192.168.1.5", 7860), 200),
        ("box", "box:7860", ("192.168.1.5", 7860), 200),
        ("box", "other:7860", ("192.168.1.5", 7860), 403),
        ("0.0.0.0", "lab.example:7860", ("192.168.1.5", 7860), 200),
        ("0.0.0.0", "lab.example", ("192.168.1.5", 7860), 200),  # a proxy with the usual port
        ("0.0.0.0", "lab.example:1", ("192.168.1.5", 7860), 403),
        ("0.0.0.0", "proxy.example:8443", ("192.168.1.5", 7860), 200),
        ("0.0.0.0", "proxy.example", ("192.168.1.5", 7860), 403),
        ("0.0.0.0", "evil.example:7860", ("192.168.1.5", 7860), 403),
    ],
)
def test_hosts_that_are_answered(
    tmp_path: Path, kind: str, listens: str, host: str, server: Any, status: int
) -> None:
    app = RequestGuard(welcome, listens, ["lab.example", "proxy.example:8443"], Uploads(tmp_path))
    assert ask(app, kind, host, server) == status
    assert ask(app, kind, host, server, origin=f"http://{host}") == status
    assert ask(app, kind, host, server, origin="http://evil.example") == 403


def test_a_link_from_another_site_opens_the_page_and_nothing_else(tmp_path: Path) -> None:
    app = RequestGuard(welcome, "127.0.0.1", [], Uploads(tmp_path))
    link = {
        "sec_fetch_site": "cross-site",
        "sec_fetch_mode": "navigate",
        "sec_fetch_dest": "document",
    }
    here = ("127.0.0.1:7860", ("127.0.0.1", 7860))
    assert ask(app, "http", *here, path="/", **link) == 200
    assert ask(app, "http", *here, path="/config", **link) == 403
    assert ask(app, "http", *here, path="/", method="POST", **link) == 403
    assert ask(app, "http", *here, path="/", **{**link, "sec_fetch_dest": "iframe"}) == 403
    assert ask(app, "http", *here, path="/", **link, origin="http://evil.example") == 403
    assert ask(app, "http", "evil.example", here[1], path="/", **link) == 403


def test_a_proxy_with_tls_may_stand_in_front(tmp_path: Path) -> None:
    app = RequestGuard(welcome, "127.0.0.1", ["lab.example"], Uploads(tmp_path))
    assert ask(app, "http", "lab.example", ("127.0.0.1", 7860), origin="https://lab.example") == 200


def test_what_the_page_does_not_use_is_closed(browser: Any) -> None:
    for path in (
        "/gradio_api/proxy=http://127.0.0.1",
        "/gradio_api/file=http://evil.example/",
        "/gradio_api/deep_link?session_hash=x",
        "/monitoring/x",
    ):
        assert browser.get(path).status_code == 404, path
    for path in ("component_server", "process_recording", "vibe-edit"):
        assert browser.post(f"/gradio_api/{path}", json={}).status_code == 404, path


def test_an_address_in_place_of_a_file_is_not_fetched(
    browser: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradio downloads any internet address that is given as a file, without a size limit."""
    from gradio import processing_utils

    addresses: list[str] = []

    async def fetch(address: str, **_: Any) -> str:
        addresses.append(address)
        return "/nowhere"

    monkeypatch.setattr(processing_utils, "async_ssrf_protected_download", fetch)
    for key in ("path", "\\u0070ath"):
        body = (
            '{"session_hash": "s", "fn_index": 0, "data": [{"%s": '
            '"https://example.org/large", "meta": {"_type": "gradio.FileData"}}]}'
        )
        for route in ("queue/join", "call/same", "run/same", "api/same"):
            for encoding in ("utf-8", "utf-16", "utf-32"):  # a JSON parser reads all of them
                content = (body % key).encode(encoding)
                answer = browser.post(
                    f"/gradio_api/{route}",
                    content=content,
                    headers={"content-type": "application/json"},
                )
                assert answer.status_code == 403, (route, encoding, answer.text)
    time.sleep(0.2)
    assert addresses == []


def test_a_large_request_is_refused(browser: Any) -> None:
    large = "x" * (guard.BODY + 1)
    whole_answer = browser.post("/gradio_api/call/same", json={"data": [large]})
    assert whole_answer.status_code == 413
    chunk_answer = browser.post(
        "/gradio_api/call/same", content=(part for part in [b'["', large.encode(), b'"]'])
    )
    assert chunk_answer.status_code == 413
    assert "at most 1.0 MB" in chunk_answer.text


def test_too_many_open_requests_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "OPEN_EACH", 3)
    release = asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await release.wait()
        await welcome(scope, receive, send)

    app = RequestGuard(slow, "127.0.0.1", [], Uploads(tmp_path))

    async def one(client: str) -> int:
        answers: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request"}

        async def send(message: Any) -> None:
            answers.append(message)

        await app(
            {
                "type": "http",
                "method": "GET",
                "path": "/x",
                "headers": [(b"host", b"127.0.0.1:1")],
                "server": ("127.0.0.1", 1),
                "client": (client, 1),
            },
            receive,
            send,
        )
        return answers[0]["status"]

    async def crowd() -> list[int]:
        tasks = [asyncio.create_task(one("10.0.0.1")) for _ in range(5)] + [
            asyncio.create_task(one("10.0.0.2"))
        ]
        await asyncio.sleep(0.01)
        release.set()
        return [await task for task in tasks]

    assert asyncio.run(crowd()) == [200, 200, 200, 429, 429, 200]
    assert not app.open


# --- uploads --------------------------------------------------------------------------------------


@pytest.fixture
def quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Uploads, Now]]:
    """A client of a page whose scratch folder accepts 10 kB, and 4 kB in each request."""
    from starlette.testclient import TestClient

    folder, now = tmp_path / "scratch", Now(time.time())
    folder.mkdir()
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(folder))
    uploads = Uploads(folder, request=4000, total=10_000, clock=now)
    with TestClient(gradio_app(folder, uploads=uploads), PAGE) as client:
        yield client, uploads, now


def upload(client: Any, size: int, name: str = "a.png") -> Any:
    return client.post("/gradio_api/upload", files={"files": (name, os.urandom(size))})


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_uploads_have_a_quota_and_old_ones_are_removed(quota: tuple[Any, Uploads, Now]) -> None:
    client, uploads, now = quota
    answers = [upload(client, 3000) for _ in range(6)]
    assert [answer.status_code for answer in answers] == [200] * 3 + [429] * 3
    assert "quota of uploaded images" in answers[-1].text
    assert 0 < int(answers[-1].headers["retry-after"]) <= uploads.age
    assert size_of(uploads.folder) <= uploads.total
    now.seconds = time.time() + uploads.age + 1
    assert upload(client, 3000).status_code == 200
    assert size_of(uploads.folder) == 3000
    assert (uploads.pending_bytes, uploads.requests) == (0, 0)


def test_one_upload_has_a_size(
    quota: tuple[Any, Uploads, Now], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, uploads, _ = quota
    assert upload(client, 5000).status_code == 413
    head = b'--b\r\nContent-Disposition: form-data; name="files"; filename="a.png"\r\n\r\n'
    parts = (part for part in [head, *[b"x" * 1000] * 50, b"\r\n--b--\r\n"])
    chunk_answer = client.post(
        "/gradio_api/upload",
        content=parts,
        headers={"content-type": "multipart/form-data; boundary=b"},
    )
    assert chunk_answer.status_code == 413
    assert "at most" in chunk_answer.text
    assert size_of(uploads.folder) <= uploads.request
    many = client.post(
        "/gradio_api/upload", files=[("files", (f"{i}", b"")) for i in range(guard.IMAGES + 5)]
    )
    assert many.status_code == 413
    monkeypatch.setattr(guard, "IMAGES", 5)
    for name in (b"filename=%d", b'FILENAME="%d"', b'filename ="%d"'):
        body = b"".join(
            b'--b\r\nContent-Disposition: form-data; name="files"; ' + name % i + b"\r\n\r\nx\r\n"
            for i in range(guard.IMAGES + 5)
        )
        pieces = (body[i : i + 7] for i in range(0, len(body), 7))  # of arbitrary sizes
        for content in (body, pieces):
            many = client.post(
                "/gradio_api/upload",
                content=content,
                headers={"content-type": "multipart/form-data; boundary=b"},
            )
            assert many.status_code == 413
    assert (uploads.pending_bytes, uploads.requests) == (0, 0)


def test_the_number_of_uploads_is_bounded(tmp_path: Path) -> None:
    for i in range(20):
        (tmp_path / str(i)).touch()
    uploads = Uploads(tmp_path, files=28)
    assert uploads.reserve(1) is None
    assert uploads.reserve(1) is not None  # the first request may bring eight images
    uploads.release(1)
    assert uploads.reserve(1) is None


def test_requests_that_arrive_together_share_the_quota(tmp_path: Path) -> None:
    uploads = Uploads(tmp_path, total=100)
    assert [uploads.reserve(40) is None for _ in range(3)] == [True, True, False]


# --- login ----------------------------------------------------------------------------------------


@pytest.fixture
def login_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Callable[..., Any], Now]]:
    """A function that logs in from an address at a page with a password, and the clock of its
    attempts.
    """
    from starlette.testclient import TestClient

    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path))
    now = Now()
    app = gradio_app(tmp_path, attempts=Attempts(now))

    def enter(password: str, address: str = "10.0.0.1", user: str = "me") -> Any:
        client = TestClient(app, PAGE, client=(address, 5))
        return client.post("/login", data={"username": user, "password": password})

    with TestClient(app, PAGE):
        yield enter, now


def test_wrong_passwords_block_the_login_for_a_while(
    login_page: tuple[Callable[..., Any], Now],
) -> None:
    enter, now = login_page
    assert enter("right-word").status_code == 200
    for _ in range(EACH):
        assert enter("wrong").status_code == 400
        now.seconds += 1
    for word in ("wrong", "right-word"):  # the answer does not say whether it is right
        answer = enter(word)
        assert answer.status_code == 429
        assert "try again in" in answer.text
        assert 0 < int(answer.headers["retry-after"]) <= WINDOW
    assert enter("right-word", "10.0.0.2").status_code == 200  # other addresses are not blocked
    now.seconds += WINDOW
    assert enter("right-word").status_code == 200
    assert [enter("wrong").status_code for _ in range(EACH + 1)] == [400] * EACH + [429]


def test_wrong_passwords_from_many_addresses_block_the_login(
    login_page: tuple[Callable[..., Any], Now],
) -> None:
    enter, now = login_page
    statuses = [enter("wrong", f"10.0.{i}.1").status_code for i in range(ALL + 3)]
    assert statuses == [400] * ALL + [429] * 3
    assert enter("right-word", "10.1.1.1").status_code == 429
    now.seconds += WINDOW
    assert enter("right-word", "10.1.1.1").status_code == 200


def test_a_machine_with_many_addresses_is_one() -> None:
    attempts, client = Attempts(Now()), guard.address_of
    networks = {client({"client": (f"2001:db8::{i}", 1)}) for i in range(1, 9)}
    assert networks == {"2001:db8::/64"}
    assert client({"client": ("::ffff:10.0.0.1", 1)}) == "10.0.0.1"
    assert [bool(attempts.begin("2001:db8::/64")) for _ in range(EACH + 1)] == [False] * EACH + [
        True
    ]


def test_user_and_password_are_always_both_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    account, lengths = Account("mé", "pässword"), []

    def same(a: bytes, b: bytes) -> bool:
        lengths.append((len(a), len(b)))
        return a == b

    monkeypatch.setattr(hmac, "compare_digest", same)
    answers = [
        account("mé", "pässword"),
        account(" mé ", "pässword"),
        account("no", "pässword"),
        account("mé", "p"),
        account("", "\ud800"),
    ]
    assert answers == [True, True, False, False, False]
    assert lengths == [(32, 32)] * 10  # digests have one length, whatever the input


def test_what_gradio_leaves_open_needs_the_login_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from starlette.testclient import TestClient

    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path))
    with TestClient(gradio_app(tmp_path, attempts=Attempts()), PAGE) as client:
        cancel = {"session_hash": "s", "fn_index": 0, "event_id": "e"}
        assert client.get("/gradio_api/token").status_code == 401
        assert client.post("/gradio_api/cancel", json=cancel).status_code == 401
        assert client.post("/gradio_api/upload", files={"files": ("a", b"1")}).status_code == 401
        assert (
            client.post("/login", data={"username": "me", "password": "right-word"}).status_code
            == 200
        )
        assert client.post("/gradio_api/cancel", json=cancel).status_code == 200
        client.cookies.clear()
        assert client.post("/gradio_api/cancel", json=cancel).status_code == 401
    here = ("127.0.0.1:7860", ("127.0.0.1", 7860))
    # a heartbeat never ends, so this request does not reach Gradio
    for attempts, status in ((Attempts(), 401), (None, 200)):
        app = RequestGuard(welcome, "127.0.0.1", [], Uploads(tmp_path), attempts)
        assert ask(app, "http", *here, path="/gradio_api/heartbeat/x") == status


# --- the command ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--host", "0.0.0.0"], "--auth user:password"),
        (["--host", "::"], "--auth user:password"),
        (["--host", ""], "--host is an empty text"),
        (["--host", "192.0.2.1"], "--auth user:password"),
        (["--host", "0.0.0.0", "--auth", "me:1234567"], "at least 8"),
        (["--allow-host", "a/b"], "--allow-host is a name"),
        (["--allow-host", "http://lab.example"], "--allow-host is a name"),
    ],
)
def test_the_network_is_let_in_with_a_password_only(
    tmp_path: Path, options: list[str], sentence: str
) -> None:
    command = [sys.executable, "-m", "concept_eraser.cli.main", "demo", "--no-browser", *options]
    process = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert process.returncode == 2, process
    assert sentence in process.stderr
    assert len(process.stderr.splitlines()) == 1


def test_a_password_of_eight_characters_is_enough() -> None:
    safety.require_account("0.0.0.0", ("me", "12345678"))
    safety.require_account("127.0.0.1", ("me", "1"))
    safety.require_account("127.3.2.1", None)
    safety.require_account("[::1]", None)
    with pytest.raises(UserError):
        safety.require_account("localhost.evil.example", None)


START = (
    "import sys; from concept_eraser.cli import main; sys.argv[1:] = ['demo', "
    "'--no-browser', '--runs', 'r']; print('begun', flush=True); main.main()"
)


@pytest.mark.parametrize("delay", [0.4, 1.0, 1.6, 2.2, 2.8])
def test_ctrl_c_during_the_start_is_one_sentence(tmp_path: Path, delay: float) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", START],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    if "the page is at" in out:
        pytest.skip(f"the page was open after {delay} s")
    assert process.returncode == 130, err
    assert len(err.splitlines()) == 1, err
    assert "stopped" in err
    assert not list(tmp_path.glob("concept-eraser-demo-*"))


SWALLOWS = """
import pathlib, time
pathlib.Path(__file__).with_name("begun").touch()
try:
    time.sleep(60)
except BaseException:
    raise ImportError("half imported") from None
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_import_that_swallows_ctrl_c_ends_in_one_sentence(
    tmp_path: Path, number: signal.Signals
) -> None:
    """Compiled libraries turn the interruption into an error of their own."""
    (tmp_path / "gradio.py").write_text(SWALLOWS)
    search = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, "-c", START],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": search},
    )
    until = time.monotonic() + 60
    while not (tmp_path / "begun").exists():
        assert time.monotonic() < until
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert err == "stopped before the page was open; nothing was changed\n"
    assert not list(tmp_path.glob("concept-eraser-demo-*"))


@pytest.fixture
def warm_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the processes of jobs, so that they start with the libraries."""
    monkeypatch.setattr(jobs, "_start_worker", DemoWorker)


# --- recipes that name code -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def vae_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on a VAE."""
    folder = tmp_path_factory.mktemp("vae") / "run"
    content = {**labelled.OFFERED_RUNS["star-vae"], "training": {"steps": 1, "batch_size": 2}}
    content["forget"] = {**content["forget"], "options": {"n": 40}}
    api.erase(content, output=folder)
    return folder


@pytest.fixture(scope="module")
def denoiser_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on a denoiser."""
    folder = tmp_path_factory.mktemp("drawn") / "run"
    api.erase(short(training__steps=2), output=folder)
    return folder


@pytest.fixture
def stranger(
    tmp_path: Path, vae_run: Path, denoiser_run: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Desk]:
    """A server in a folder with another person's runs, whose recipes name code as their model."""
    monkeypatch.chdir(tmp_path)
    for name, source in (("images", vae_run), ("drawn", denoiser_run)):
        folder = tmp_path / "runs" / name
        shutil.copytree(source, folder)
        content = yaml.safe_load((folder / "recipe.yaml").read_text())
        (folder / "recipe.yaml").write_text(
            yaml.safe_dump({**content, "model": "runs.stranger.payload:go"})
        )
    shutil.copytree(tmp_path / "runs" / "drawn", tmp_path / "runs" / "left")
    (tmp_path / "runs" / "left" / "done.json").unlink()
    (tmp_path / "runs" / "stranger").mkdir()
    (tmp_path / "runs" / "stranger" / "payload.py").write_text(CODE)
    desk = Desk(Library(Path("runs")))
    yield desk
    desk.jobs.close()
    assert not (tmp_path / "runs" / "stranger" / "canary").exists(), "a stranger's code ran"


def test_no_tab_runs_code_that_a_recipe_names(stranger: Desk) -> None:
    library = stranger.library
    assert library.finished_runs(labelled.TARGETS) == ["images"]
    tries: list[Callable[[], Any]] = [
        lambda: labelled.show(stranger, "images", []),
        lambda: compare.draw(
            stranger, compare.ComparisonSettings(runs=("drawn",), steps=1, seeds=1)
        ),
        lambda: library.load_change("drawn"),
        lambda: library.draw("drawn", [ImageSettings("a", 0, 1, 1.0)]),
        lambda: library.model("runs.stranger.payload:go"),
        lambda: erase.start(stranger, erase.Form(model="runs.stranger.payload:go")),
        lambda: erase.resume(stranger, "left"),
        lambda: attack.start(stranger, "drawn", "seed_search", 2, 2, 10, 0),
        lambda: results.measure(stranger, "drawn", 2),
    ]
    for call in tries:
        with pytest.raises(UserError, match=r"code|unknown model"):
            call()
    assert not stranger.jobs.all()
    assert "runs.stranger.payload:go" not in erase.models(stranger)
    polling.texts(stranger)
    polling.menu_choices(stranger)


def wait(desk: Desk, job: Any) -> None:
    until = time.monotonic() + 180
    while job.active:
        assert time.monotonic() < until, job
        time.sleep(0.05)


def test_no_worker_runs_code_that_a_recipe_names(stranger: Desk, warm_workers: None) -> None:
    """The workers check again: these jobs enter the queue without the checks of the tabs."""
    denoiser_folder, unfinished_folder, vae_folder = (
        stranger.runs / name for name in ("drawn", "left", "images")
    )
    recipe = {**labelled.OFFERED_RUNS["star-vae"], "model": "runs.stranger.payload:go"}
    suite = {"suite": "tiny_star", "n": 2}
    hunt = {"attack": "seed_search", "options": {}, "seed": 0, "rounds": 1, "seconds": 5}
    jobs = [
        stranger.jobs.add(
            "erase",
            "of a form",
            {"kind": "erase", "recipe": recipe, "folder": "runs/new"},
            Path("runs/new"),
        ),
        stranger.jobs.add(
            "erase",
            "resumed",
            {"kind": "erase", "folder": str(unfinished_folder)},
            unfinished_folder,
        ),
        stranger.jobs.add(
            "measure",
            "measured",
            {"kind": "measure", "folder": str(denoiser_folder), **suite},
            denoiser_folder,
        ),
        stranger.jobs.add(
            "measure",
            "measured",
            {"kind": "measure", "folder": str(vae_folder), **suite},
            vae_folder,
        ),
        stranger.jobs.add(
            "attack",
            "attacked",
            {
                "kind": "attack",
                "run": str(denoiser_folder),
                "base": "tiny-sd",
                "folder": str(denoiser_folder / "a"),
                **suite,
                **hunt,
            },
            denoiser_folder / "a",
        ),
        stranger.jobs.add(
            "attack",
            "attacked",
            {
                "kind": "attack",
                "run": "tiny-sd",
                "base": "runs.stranger.payload:go",
                "folder": str(denoiser_folder / "b"),
                **suite,
                **hunt,
            },
            denoiser_folder / "b",
        ),
    ]
    for job in jobs:
        wait(stranger, job)
        assert job.state == "failed"
        assert "names code" in job.error or "name code" in job.error, job


def test_files_of_the_working_folder_are_no_modules_of_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user unpacks another person's runs and starts the demo in that folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("yaml", "torch", "diffusers", "json"):
        (tmp_path / f"{name}.py").write_text(CODE)
    desk = Desk(Library(Path("runs")))
    try:
        job = desk.jobs.add(
            "erase",
            "x",
            {"kind": "erase", "recipe": {"model": "tiny-sd"}, "folder": "runs/x"},
            Path("runs/x"),
        )
        wait(desk, job)
        assert not (tmp_path / "canary").exists()
        assert "forget: required" in job.error
    finally:
        desk.jobs.close()


# --- run folders from other people ----------------------------------------------------------------


def damage(folder: Path) -> None:
    """A runs folder that holds only damaged, hostile and unusual run folders."""
    good = yaml.safe_dump(short())

    def put(name: str, **files: str | bytes) -> Path:
        place = folder / name
        place.mkdir(parents=True)
        for key, content in {
            "recipe.yaml": good,
            **{k.replace("_", "."): v for k, v in files.items()},
        }.items():
            (place / key).write_bytes(content if isinstance(content, bytes) else content.encode())
        return place

    put("empty-done", done_json="{}")
    put(
        "text-done",
        done_json='{"seconds": "<b>many</b>"}',
        evaluation_json='{"results": [1, "x", {"metric": 3}]}',
    )
    put("list-done", done_json="[]", evaluation_json='{"results": 7}', log_jsonl=os.urandom(2000))
    put(
        "words",
        done_json="{}",
        evaluation_json=json.dumps(
            {
                "results": [
                    {"metric": "concept_rate", "group": "direct", "after": {"value": "1e999"}},
                    {"metric": "accuracy", "group": "retained", "after": {"value": None}},
                ]
            }
        ),
    )
    put("huge-number", done_json='{"seconds": 1' + "0" * 400 + "}")
    put("deep", done_json="[" * 100_000, recipe_yaml="[" * 100_000)
    put("binary", recipe_yaml=os.urandom(4000), done_json=os.urandom(100))
    put("nothing", recipe_yaml="", done_json="{}")
    put("list", recipe_yaml="- tiny_star\n", done_json="{}")
    put("name", recipe_yaml="tiny_star_munba\n", done_json="{}")
    put("huge", recipe_yaml="model: " + "x" * (3 * 2**20), done_json="{}")
    put("long-model", recipe_yaml=yaml.safe_dump({**short(), "model": "x" * 5000}), done_json="{}")
    put("nul", recipe_yaml=yaml.safe_dump({**short(), "model": "a\0b"}), done_json="{}")
    lines = "".join(
        f"  a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9) if i else 'x'}]\n" for i in range(9)
    )
    put("bomb", recipe_yaml=f"model: tiny-sd\nmodel_options:\n{lines}", done_json="{}")
    put("<img src=x onerror=alert(1)>", done_json="{}")
    put("new\nline", done_json="{}")
    (folder / os.fsdecode(b"not-\xff-utf8")).mkdir()
    (folder / os.fsdecode(b"not-\xff-utf8") / "recipe.yaml").write_text(good)
    os.mkfifo(put("pipes") / "done.json")
    for name in ("evaluation.json", "log.jsonl", "weights.safetensors"):
        os.mkfifo(folder / "pipes" / name)
    (folder / "pipes" / "attacks" / "one").mkdir(parents=True)
    os.mkfifo(folder / "pipes" / "attacks" / "one" / "found.json")
    (folder / "attacked" / "attacks" / "one").mkdir(parents=True)
    (folder / "attacked" / "attacks" / "one" / "found.json").write_text(
        '{"broken": {"a": [1]}, "n": "<script>"}'
    )
    (folder / "attacked" / "recipe.yaml").write_text(good)
    (folder / "pipe").mkdir()
    os.mkfifo(folder / "pipe" / "recipe.yaml")
    os.mkfifo(folder / "prompts.txt")
    put(
        "piped-prompts",
        recipe_yaml=yaml.safe_dump(
            {**short(), "forget": {"prompts": str(folder / "prompts.txt"), "loss": "ascent"}}
        ),
        done_json="{}",
    )
    (folder / "circle").mkdir()
    (folder / "circle" / "recipe.yaml").symlink_to("recipe.yaml")


def hang(*_: Any) -> None:
    raise TimeoutError("the page hangs")


def test_a_page_of_damaged_runs_opens_without_a_traceback_or_a_hang(
    tmp_path: Path, capfd: Any
) -> None:
    import orjson

    damage(tmp_path / "runs")
    desk = Desk(Library(tmp_path / "runs"))
    before = signal.signal(signal.SIGALRM, hang)
    signal.alarm(60)
    try:
        texts, lists = polling.texts(desk), polling.menu_choices(desk)
        orjson.dumps([texts, lists])  # can be sent
        names = list(desk.library.folders())
        assert "<img src=x onerror=alert(1)>" in names
        assert not [name for name in names if not name.isprintable()]
        assert "circle" not in names
        assert "pipe" not in names
        assert "<img" not in "".join(texts.values())
        assert "<script" not in "".join(texts.values())
        assert "<b>many" not in texts["table"]
        assert "empty-done" in texts["table"]
        for name in names:
            for use in (
                lambda n: desk.library.recipe(n),
                lambda n: desk.library.load_change(n),
                lambda n: results.measure(desk, n, 2),
                lambda n: labelled.show(desk, n, []),
                lambda n: erase.resume(desk, n) if n == "<none>" else None,
                lambda n: compare.preset(desk, "forget", [n], ""),
            ):
                with suppress(UserError):
                    use(name)
        results.pareto(desk, results.LOCAL_RUNS)
        erase.models(desk)
        for name in ("list-done", "pipes"):
            job = state_of(desk, desk.runs / name)
            assert "<figure" in erase.progress_html(desk, job)
            assert "<figure" in attack.progress_html(desk, job)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        desk.jobs.close()
    assert "Traceback" not in capfd.readouterr().err


def state_of(desk: Desk, folder: Path) -> Any:
    """A job on a folder, as the page's timer reads it. The job never runs."""
    from concept_eraser.demo.jobs import DemoJob

    return DemoJob(1, "erase", "x", {}, folder, state="running")


def test_a_damaged_log_is_plotted_as_far_as_it_is_valid(tmp_path: Path) -> None:
    rows = [
        '{"step": 1, "losses": {"forget": 0.5, "retain": "x"}, "cosine": 0.1}',
        '{"step": 2, "losses": [1]}',
        "[]",
        "{",
        '{"step": "3"}',
        '{"step": 4, "losses": {"forget": NaN}, "cosine": true}',
        '{"step": 5, "losses": {"forget": 1e400}}',
    ]
    (tmp_path / "log.jsonl").write_text("\n".join(rows))
    log_rows = figures.rows(tmp_path / "log.jsonl", "step")
    assert [row["step"] for row in log_rows] == [1, 2, 4, 5]
    assert figures.points(log_rows, "step", "losses", "forget") == [(1.0, 0.5)]
    assert figures.points(log_rows, "step", "cosine") == [(1.0, 0.1)]


def test_a_link_out_of_the_runs_folder_is_not_listed_and_not_written_through(
    tmp_path: Path, denoiser_run: Path
) -> None:
    runs, outside = tmp_path / "runs", tmp_path / "outside"
    shutil.copytree(denoiser_run, runs / "own")
    shutil.copytree(denoiser_run, outside)
    (outside / "canary").write_text("secret")
    (runs / "door").symlink_to(outside)
    (runs / "inner").symlink_to(runs / "own")
    (runs / "half").mkdir()
    (runs / "half" / "recipe.yaml").symlink_to(outside / "recipe.yaml")
    shutil.copytree(denoiser_run, runs / "trap")
    (runs / "trap" / "attacks").symlink_to(outside)
    shutil.copytree(denoiser_run, runs / "left")
    (runs / "left" / "done.json").unlink()
    (runs / "left" / "log.jsonl").unlink()
    (runs / "left" / "log.jsonl").symlink_to(outside / "canary")
    desk = Desk(Library(runs))
    try:
        assert set(desk.library.folders()) == {"own", "inner", "trap", "left"}
        assert "door" not in "".join(polling.texts(desk).values())
        for call in (
            lambda: attack.start(desk, "trap", "seed_search", 2, 2, 10, 0),
            lambda: results.measure(desk, "trap", 2),
            lambda: erase.resume(desk, "left"),
        ):
            with pytest.raises(UserError, match="symbolic link that leads out"):
                call()
        with pytest.raises(UserError):
            desk.library.folder("door")
        assert not desk.jobs.all()
        assert sorted(os.listdir(outside)) == sorted([*os.listdir(denoiser_run), "canary"])
        assert (outside / "canary").read_text() == "secret"
    finally:
        desk.jobs.close()


# --- limits of a page -----------------------------------------------------------------------------


def test_memory_holds_few_models_and_few_changed_tensors(
    tmp_path: Path, denoiser_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(4):
        shutil.copytree(denoiser_run, tmp_path / "runs" / f"run{i}")
    library = Library(tmp_path / "runs")
    monkeypatch.setattr(state, "CHANGE_CACHE_BYTES", state._size(library.load_change("run0")) * 2)
    settings = [ImageSettings("a", 0, 1, 1.0)]
    for i in range(4):
        library.draw(f"run{i}", settings)
    assert library.memory_use()["runs"] == 2
    from concept_eraser.utils.resources import tiny_weights

    for i in range(state.BASES + 2):
        shutil.copytree(tiny_weights() / "tiny-sd", tmp_path / f"base{i}")
        library.draw(None, settings, base=str(tmp_path / f"base{i}"))
    assert library.memory_use()["bases"] == state.BASES
    library.draw(None, settings)
    assert library.memory_use()["bases"] <= state.BASES


def test_no_job_starts_on_a_full_disk(
    tmp_path: Path, denoiser_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(denoiser_run, tmp_path / "runs" / "left")
    (tmp_path / "runs" / "left" / "done.json").unlink()
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**12, 10**12 - 5, 5)
    )  # type: ignore[attr-defined]
    desk = Desk(Library(tmp_path / "runs"))
    try:
        for call in (
            lambda: erase.start(desk, erase.Form()),
            lambda: erase.resume(desk, "left"),
        ):
            with pytest.raises(UserError, match="free some space"):
                call()
        assert os.listdir(tmp_path / "runs") == ["left"]
    finally:
        desk.jobs.close()


def test_an_uploaded_image_is_of_a_usual_kind_and_size(tmp_path: Path) -> None:
    import torch

    like = torch.zeros(1, 3, 8, 8)
    for kind in ("png", "jpeg", "webp", "gif", "bmp", "tiff"):
        Image.new("RGB", (9, 9), "red").save(tmp_path / kind, kind)
        assert labelled.as_inputs([str(tmp_path / kind)], like).shape == like.shape
    Image.new("RGB", (9, 9)).save(tmp_path / "eps", "eps")  # Pillow starts Ghostscript for EPS
    Image.new("1", (6000, 6000)).save(tmp_path / "large.png")
    (tmp_path / "text.png").write_text("no image")
    for name, message in (
        ("eps", "cannot be read as an image"),
        ("large.png", "6000 x 6000"),
        ("text.png", "cannot be read as an image"),
    ):
        with pytest.raises(UserError, match=message) as error_info:
            labelled.as_inputs([str(tmp_path / name)], like)
        assert str(tmp_path) not in str(error_info.value)


# --- measurements ---------------------------------------------------------------------------------


@pytest.fixture
def star_desk(tmp_path: Path, denoiser_run: Path) -> Iterator[Desk]:
    """A desk with one finished run, named star."""
    shutil.copytree(denoiser_run, tmp_path / "runs" / "star")
    desk = Desk(Library(tmp_path / "runs"))
    yield desk
    desk.jobs.close()


def test_a_failed_measurement_is_shown(star_desk: Desk, warm_workers: None) -> None:
    (star_desk.runs / "star" / "weights.safetensors").write_bytes(b"damaged")
    shutil.rmtree(star_desk.runs / "star" / "pipeline", ignore_errors=True)
    job = results.measure(star_desk, "star", 2)
    wait(star_desk, job)
    assert job.state == "failed"
    html = polling.texts(star_desk)["measured"]
    assert 'role="alert"' in html
    assert job.error[:40] in html.replace("&#x27;", "'")
    assert f"#{job.number} measuring star" in html


def test_a_measurement_is_shown_while_it_runs_and_when_it_is_done(
    star_desk: Desk, warm_workers: None
) -> None:
    assert polling.texts(star_desk)["measured"] == ""
    job = results.measure(star_desk, "star", 2)
    assert "measuring star" in polling.texts(star_desk)["measured"]
    wait(star_desk, job)
    assert job.state == "done", job.error
    html = polling.texts(star_desk)["measured"]
    assert "done in" in html
    assert 'role="alert">not measured: fid: ' in html  # each group has two images
    assert "FID needs more images" in html


def test_a_run_of_own_prompts_is_evaluated(tmp_path: Path, warm_workers: None) -> None:
    """Its suite is derived from the recipe and has no file."""
    paths = {objective: tmp_path / f"{objective}.yaml" for objective in ("forget", "retain")}
    paths["forget"].write_text(presets.prompt_set("shape", ["heart"]))
    paths["retain"].write_text(presets.prompt_set("shape", ["moon", "tree"]))
    api.erase(
        short(
            training__steps=1,
            forget__prompts=str(paths["forget"]),
            retain__prompts=str(paths["retain"]),
        ),
        output=tmp_path / "runs" / "heart",
    )
    desk = Desk(Library(tmp_path / "runs"))
    try:
        job = results.measure(desk, "heart", 2)
        wait(desk, job)
        assert job.state == "done", job.error
        assert (tmp_path / "runs" / "heart" / "evaluation.json").is_file()
    finally:
        desk.jobs.close()


def test_a_run_is_measured_and_attacked_by_the_suite_in_its_folder(
    tmp_path: Path, warm_workers: None
) -> None:
    run = tmp_path / "runs" / "star"
    api.erase(
        "star",
        training={"steps": 1, "batch_size": 1},
        trainable={"select": "cross_attention", "lora": 2},
        generation={"steps": 1},
        overrides=["forget.n=2", "retain.n=2"],
        output=run,
        images=2,
    )
    suite = yaml.safe_load((run / "suite.yaml").read_text())
    desk = Desk(Library(tmp_path / "runs"))
    try:
        job = results.measure(desk, "star", 2)
        wait(desk, job)
        assert job.state == "done", job.error
        protocol = json.loads((run / "evaluation.json").read_text())["protocol"]
        assert protocol["seed"] == suite["seed"]
        assert {name: group["prompts"] for name, group in protocol["groups"].items()} == {
            name: group["prompts"] for name, group in suite["groups"].items()
        }
        job = attack.start(desk, "star", "random_tokens", 2, 1, 10, 0)
        assert job.spec["suite"] == str(run / "suite.yaml")
        wait(desk, job)
        suite["groups"]["direct"]["prompts"] = str(tmp_path / "secret.txt")
        (run / "suite.yaml").write_text(yaml.safe_dump(suite))
        with pytest.raises(UserError, match="the prompts of 'direct' are a file"):
            results.measure(desk, "star", 2)
    finally:
        desk.jobs.close()


def test_the_suite_of_a_run_may_have_a_judge_that_is_not_bundled(tmp_path: Path) -> None:
    """The prompts of such a run have no concept of the bundled data set."""
    plan = make_plan(["Van Gogh"], model="somewhere/sd15", kind="style")
    job = recipes.load({**short(), **plan.settings})
    with pytest.raises(UserError, match="no available judge"):
        presets.suite_of(job)
    (tmp_path / "recipe.yaml").write_text(recipes.dump(job, "concept-eraser erase"))
    for name, text in concept_job.suite_texts(plan, tmp_path).items():
        (tmp_path / name).write_text(text)
    assert presets.suite_of(job, tmp_path) == str(tmp_path / "suite.yaml")
    assert "clip" in (tmp_path / "suite.yaml").read_text()


def test_a_run_in_use_by_another_process_is_not_measured(
    star_desk: Desk, warm_workers: None
) -> None:
    folder = star_desk.runs / "star"
    with locks.hold_lock(folder, "erase"):
        job = results.measure(star_desk, "star", 2)
        wait(star_desk, job)
    assert job.state == "failed"
    assert "star is in use by process" in job.error
    assert not (folder / "evaluation.json").exists()


def test_metrics_that_were_refused_are_shown_with_their_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: Any
) -> None:
    """The worker reports them at its end. The page shows them as an error beside the results."""
    from concept_eraser.demo import worker

    class EvaluationStub:
        suite, results, refused = None, [object()], {"fid": "2 images; at least 64 are needed"}

        def save(self, path: Path) -> None:
            pass

        def save_outcomes(self, path: Path) -> None:
            pass

    monkeypatch.setattr("concept_eraser.api.evaluate", lambda *a, **k: EvaluationStub())
    monkeypatch.setattr("concept_eraser.api.report", lambda *a, **k: None)
    monkeypatch.setattr("concept_eraser.reporting.run_results.place_for", lambda *a: tmp_path)
    spec = {"kind": "measure", "folder": str(tmp_path), "suite": "tiny_star", "n": 2}
    worker.measure(spec)
    note = json.loads(capfd.readouterr().out.splitlines()[-1])["note"]
    assert note == "not measured: fid: 2 images; at least 64 are needed"
    EvaluationStub.results = []
    with pytest.raises(UserError, match="nothing could be measured; fid: 2 images"):
        worker.measure(spec)
    job = state_of(None, tmp_path)  # type: ignore[arg-type]
    job.kind, job.state, job.note = "measure", "done", note
    html = results.progress_html(None, job)  # type: ignore[arg-type]
    assert 'role="alert">not measured: fid: 2 images' in html


def test_the_document_states_the_limits_of_the_code() -> None:
    text = " ".join((Path(__file__).parents[2] / "docs" / "demo.md").read_text().split())
    for limit in (
        f"at least {safety.PASSWORD} characters",
        f"a request over {guard.BODY // 2**20} MB that is no upload",
        f"an upload over {uploads.REQUEST // 10**6} MB in all",
        f"or {uploads.FILE // 10**6} MB per file",
        f"uploads over {uploads.TOTAL // 10**6} MB or {uploads.FILES} files",
        f"after {uploads.AGE / 60:.0f} minutes",
        f"{EACH} wrong passwords within a minute from one address, or {ALL} from all",
        f"{guard.OPEN_EACH} open requests of one address, or {guard.OPEN} of all",
        f"at most {safety.PIXELS // 10**6} million pixels. At most {safety.WAITING} jobs wait",
        f"less than {safety.FREE // 2**30} GB left. At most {state.BASES} models",
    ):
        assert limit in text, limit
    assert WINDOW == 60
