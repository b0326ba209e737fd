"""The page: its tabs, its theme, and the server that shows it."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from concept_eraser.demo import (
    attack,
    compare,
    documentation,
    erase,
    labelled,
    polling,
    results,
    safety,
)
from concept_eraser.demo.context import Desk, alert, error_text
from concept_eraser.demo.guard import RequestGuard
from concept_eraser.demo.jobs import QUIET_THREADS
from concept_eraser.demo.login import Account, Attempts
from concept_eraser.demo.state import BUNDLED, Library
from concept_eraser.demo.uploads import AGE, FILE, Uploads

TITLE = "concept_eraser"
HEAD = """<script>
function cePick(button, before, k, i) {
  const root = button.closest('#shown'), slider = root.querySelector('.ce-slider'); \
if (!slider) return;
  const find = (k) => root.querySelector(`.ce-grid img[data-k="${k}"][data-i="${i}"]`), heads = \
root.querySelectorAll('.ce-head');
  for (const [name, n] of [['.ce-under', before], ['.ce-over', k]]) { const image = \
slider.querySelector(name); image.src = find(n).src; image.alt = find(n).alt; }
  const ends = slider.querySelectorAll('.ce-ends span'); \
ends[0].textContent = heads[before].textContent; ends[1].textContent = heads[k].textContent;
  slider.scrollIntoView({block: 'nearest', behavior: 'smooth'});
}
function ceTheme() {
  const dark = document.body.classList.toggle('dark'); \
try { localStorage.setItem('ce-theme', dark ? 'dark' : 'light'); } catch (e) {}
}
document.addEventListener('DOMContentLoaded', () => { let kept = null; \
try { kept = localStorage.getItem('ce-theme'); } catch (e) {}
  if (kept) document.body.classList.toggle('dark', kept === 'dark'); });
</script>"""
ADDRESS = (
    "() => { const a = document.querySelector('#link [data-query]'); if (a) "
    "history.replaceState(null, '', a.dataset.query); }"
)
INTRO = (
    '<div class="ce-top"><div><h1>concept_eraser</h1><p>Make a diffusion model forget a '
    "concept, compare images before and after, and attack the erased model.</p></div><div>"
    '{link} <button type="button" onclick="ceTheme()">Light / dark</button></div></div>'
)


def theme(gr: Any) -> Any:
    """Make the theme, with system fonts only and a contrast of at least 4.5 in both modes."""
    fonts = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "Liberation Sans", "sans-serif"]
    base = gr.themes.Base(
        primary_hue="teal",
        secondary_hue="slate",
        neutral_hue="slate",
        font=fonts,
        font_mono=["ui-monospace", "Consolas", "Liberation Mono", "monospace"],
    )
    return base.set(
        button_primary_background_fill="*primary_800",
        button_primary_background_fill_hover="*primary_700",
        button_primary_text_color="white",
        button_primary_background_fill_dark="*primary_700",
        button_primary_background_fill_hover_dark="*primary_800",
        button_primary_text_color_dark="white",
        body_text_color_subdued="*neutral_600",
        body_text_color_subdued_dark="*neutral_300",
        block_info_text_color="*neutral_600",
        block_info_text_color_dark="*neutral_300",
        block_label_text_color="*neutral_700",
        block_label_text_color_dark="*neutral_200",
        link_text_color="*primary_800",
        link_text_color_dark="*primary_200",
        link_text_color_visited="*primary_800",
        link_text_color_visited_dark="*primary_200",
        slider_color="*primary_700",
        slider_color_dark="*primary_400",
    )


def build(desk: Desk) -> Any:
    """Build the Gradio page. No model is loaded and no server is started."""
    import gradio as gr

    with gr.Blocks(title=TITLE, analytics_enabled=False, delete_cache=(int(AGE), int(AGE))) as page:
        gr.HTML(INTRO.format(link=documentation.link()), elem_id="head")
        jobs = gr.HTML(elem_id="jobs")
        with gr.Row(visible=False, elem_id="jobs-row") as row:
            menu = gr.Dropdown(
                [], allow_custom_value=True, label="Job to cancel", elem_id="cancel-which", scale=4
            )
            cancel = gr.Button("Cancel", variant="stop", elem_id="cancel", scale=1, min_width=90)
        message = gr.HTML(elem_id="jobs-said")
        with gr.Tabs(overflow_behavior="wrap", elem_id="tabs"):
            parts = {}
            for name, module in (
                ("Compare", compare),
                ("Erase", erase),
                ("Attack", attack),
                ("Results", results),
                ("Images", labelled),
            ):
                with gr.Tab(name, id=name.lower(), elem_id=f"tab-{name.lower()}"):
                    parts[name] = module.tab(gr, desk)
        events = _wire_jobs(
            gr, desk, part=parts["Compare"], which=menu, cancel=cancel, message=message
        )
        events += [event for part in parts.values() for event in part.get("events", [])]
        polling.add_timer(
            gr, desk, parts=parts, jobs=jobs, row=row, cancel_menu=menu, events=events
        )
        _wire_start(gr, desk, parts["Compare"], page)
    return page


def _wire_jobs(
    gr: Any, desk: Desk, part: dict[str, Any], which: Any, cancel: Any, message: Any
) -> list[Any]:
    """Connect the buttons for cancelling a job and for the first run. Returns both events."""

    def stop(number: str) -> str:
        try:
            desk.jobs.cancel(number)
            return ""
        except Exception as error:
            return alert(error_text(error))

    def first() -> tuple[str, Any]:
        try:
            erase.start(desk, erase.Form())
            return "", gr.Button(visible=False)
        except Exception as error:
            return alert(error_text(error)), gr.skip()

    return [
        cancel.click(stop, which, message, queue=False, api_name="cancel"),
        part["first"].click(
            first, None, [part["said"], part["first"]], queue=False, api_visibility="private"
        ),
    ]


def _wire_start(gr: Any, desk: Desk, part: dict[str, Any], page: Any) -> None:
    """Connect the start of the page.

    The settings of a link are filled in. Images of the bundled model are generated at once. The
    address of the page follows the settings of the images.
    """

    def read(request: gr.Request) -> list[Any]:
        run_names = desk.library.finished_runs()
        settings = compare.ComparisonSettings.read(dict(request.query_params), run_names)
        return [
            settings.prompt,
            gr.CheckboxGroup(run_names, value=list(settings.runs)),
            settings.strength,
            settings.steps,
            settings.guidance,
            settings.seeds,
            settings.first,
            settings.judge,
            gr.Button(visible=not run_names),
        ]

    def draw_bundled(*values: Any, progress: Any = gr.Progress()) -> Any:
        bases = {
            desk.library.base_of(name)
            for name in values[1] or ()
            if name in desk.library.finished_runs()
        }
        if bases - {BUNDLED}:  # a large model generates only after a click
            return gr.skip(), "", gr.skip()
        return compare.answer(gr, desk, values=values, ladder=False, progress=progress)

    def draw_without_runs(*values: Any, progress: Any = gr.Progress()) -> Any:
        return (
            (gr.skip(), "", gr.skip()) if values[1] else draw_bundled(*values, progress=progress)
        )  # with runs, the change event of `runs` generates the images

    drawing = {
        "inputs": part["fields"],
        "outputs": [part["shown"], part["said"], part["link"]],
        "concurrency_id": "draw",
        "concurrency_limit": 1,
        "api_visibility": "private",
    }
    # Gradio needs the class, but postponed annotations are strings
    read.__annotations__["request"] = gr.Request
    page.load(
        read, None, [*part["fields"], part["first"]], queue=False, api_visibility="private"
    ).then(draw_without_runs, **drawing)
    part["runs"].change(draw_bundled, **drawing)  # also after the end of a new run
    part["link"].change(None, js=ADDRESS)


class Headers:
    """The middleware that adds security headers.

    The browser then loads nothing from other servers, and no other page can frame this page.
    """

    ADDED = (
        (
            b"content-security-policy",
            b"default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; frame-ancestors 'self'",
        ),
        (b"x-content-type-options", b"nosniff"),
        (b"referrer-policy", b"no-referrer"),
    )

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def answer(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *self.ADDED]}
            await send(message)

        await self.app(scope, receive, answer if scope["type"] == "http" else send)


def middleware(
    host: str, names: Sequence[str], uploads: Uploads, attempts: Attempts | None
) -> list[Any]:
    """List the middleware in front of Gradio: headers of answers and the guard of requests."""
    from starlette.middleware import Middleware

    return [
        Middleware(Headers),
        Middleware(RequestGuard, host=host, names=names, uploads=uploads, attempts=attempts),
    ]


def warm_up(library: Library) -> None:
    """Load torch, the bundled model and its judge in advance of the first request."""
    try:
        from concept_eraser.demo import image_html

        library.model(BUNDLED)
        image_html._judge()
    except Exception as error:
        error_text(error)  # for the terminal; the page shows the error with the first images


def require_address(host: str) -> None:
    """Raise UserError if this machine has no such address.

    Without this check Gradio tries a hundred ports, which takes minutes.
    """
    from concept_eraser.utils.errors import UserError

    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError as error:
        raise UserError(
            f"the page cannot listen on {host}: {error.strerror or error}; 127.0.0.1 is "
            "for this machine alone, 0.0.0.0 for the network"
        ) from None


def serve(
    run_paths: Sequence[str],
    *,
    runs: Path,
    before: str | None,
    host: str,
    port: int | None,
    auth: tuple[str, str] | None,
    browser: bool,
    ready: Any,
    names: Sequence[str] = (),
    controls: Sequence[str] = (),
) -> None:
    """Serve the page until Ctrl-C. Jobs are stopped so that they can be resumed.

    Args:
        run_paths: more run folders to compare, beside those in `runs`.
        runs: the folder of runs.
        before: the original model of results from another eraser.
        host: the address to listen on.
        port: the port. None for the first free one.
        auth: the user and the password of the page.
        browser: whether to open a browser.
        ready: called with the page's address.
        names: further names of the page's host, as NAME or NAME:PORT.
        controls: models that never learned the concept, beside the runs.

    Raises:
        UserError: a path is not a run, a control cannot be loaded or compared with an original,
            this machine does not have the address, the port is in use, or others can reach the page
            and it has no password.
    """
    safety.require_account(host, auth)
    require_address(host)
    with tempfile.TemporaryDirectory(prefix="concept-eraser-demo-") as scratch:
        os.environ |= QUIET_THREADS | {
            "GRADIO_ANALYTICS_ENABLED": "False",
            "HF_HUB_OFFLINE": "1",
            "GRADIO_TEMP_DIR": scratch,
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
        from PIL import Image

        from concept_eraser.utils.errors import UserError

        Image.MAX_IMAGE_PIXELS = safety.PIXELS  # an uploaded image is decoded in memory
        desk = Desk(Library(runs, run_paths, before, controls=controls))
        page = build(desk).queue(max_size=100)
        import gradio as gr

        url_host = f"[{host}]" if ":" in host and not host.startswith("[") else host
        guards = middleware(host, names, Uploads(Path(scratch)), Attempts() if auth else None)
        try:
            style = Path(__file__).parent / "style.css"
            _, address, _ = page.launch(
                prevent_thread_lock=True,
                server_name=url_host,
                server_port=port,
                auth=Account(*auth) if auth else None,
                share=False,
                quiet=True,
                inbrowser=browser,
                ssr_mode=False,
                theme=theme(gr),
                css_paths=style,
                head=HEAD,
                footer_links=[],
                max_file_size=FILE,
                show_error=False,
                strict_cors=True,
                app_kwargs={"middleware": guards, "routes": documentation.routes()},
                allowed_paths=[],
                state_session_capacity=200,
            )
        except OSError as error:
            desk.jobs.close()
            raise UserError(
                f"the page cannot listen on {host}:{port or 7860}: {str(error)[:150]}; "
                "give another --port"
            ) from None
        ready(address)
        threading.Thread(target=warm_up, args=(desk.library,), daemon=True).start()
        # restore the handlers, which a shell's & or a supervisor may have changed
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            pass
        finally:
            desk.jobs.close()
            page.close(verbose=False)
