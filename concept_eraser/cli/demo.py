"""concept-eraser demo"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from concept_eraser.utils.errors import UserError


def demo(
    runs_and_parts: Annotated[
        Optional[list[str]],
        typer.Argument(
            metavar="[RUN]...",
            help=(
                "more run folders to compare, beside those in --runs; with --before also a LoRA, "
                "denoiser or pipeline of another eraser"
            ),
        ),
    ] = None,
    port: Annotated[
        Optional[int],
        typer.Option(min=1, max=65535, help="port (default: the first free one from 7860)"),
    ] = None,
    host: Annotated[
        str,
        typer.Option(help="address to listen on; 0.0.0.0 admits the network and needs --auth"),
    ] = "127.0.0.1",
    auth: Annotated[
        Optional[str],
        typer.Option(help="user:password of the page", envvar="CONCEPT_ERASER_DEMO_AUTH"),
    ] = None,
    allow_host: Annotated[
        Optional[list[str]],
        typer.Option(
            "--allow-host",
            metavar="NAME",
            help=(
                "also answer under this name (NAME or NAME:PORT), e.g. the name of this machine "
                "in the network, or of a proxy; may be given several times"
            ),
        ),
    ] = None,
    runs: Annotated[
        Path, typer.Option("--runs", help="folder of runs; erasures in the page are written there")
    ] = Path("runs"),
    before: Annotated[
        Optional[str], typer.Option(help="the original model of a RUN from another eraser")
    ] = None,
    control: Annotated[
        Optional[list[str]],
        typer.Option(
            help=(
                "a model that never learned the concept; Compare shows its images, and an attack "
                "on a run is made on it too, which shows how much more the attack recovers from "
                "the run; may be given several times, e.g. for several training seeds"
            )
        ),
    ] = None,
    no_browser: Annotated[
        bool, typer.Option("--no-browser", help="only print the address")
    ] = False,
) -> None:
    """Open a web page that erases concepts, compares images before and after, attacks a model and
    shows results. It needs no network.

    [bold]Examples[/bold]

      concept-eraser demo

      concept-eraser demo runs/tiny_star_munba --port 7000 --no-browser

      concept-eraser demo --control tiny-sd-without-star

      concept-eraser demo --host 0.0.0.0 --auth me:long-secret     (or CONCEPT_ERASER_DEMO_AUTH)

      concept-eraser demo --host 0.0.0.0 --auth me:long-secret --allow-host lab.example.org
    """
    user, colon, password = (auth or "").partition(":")
    if auth and not (user and colon and password):
        raise UserError("--auth is user:password, and neither part may be empty")
    if runs.exists() and not runs.is_dir():
        raise UserError(f"{runs} is a file; give a folder with --runs")
    from concept_eraser.demo import guard, safety

    account = (user, password) if auth else None
    safety.require_account(host, account)
    for name in allow_host or []:
        if not guard.split_host(name)[0]:
            raise UserError(
                "--allow-host is a name or an address, with or without a port, e.g. "
                f"lab.example.org or lab.example.org:8080; found {name!r}"
            )
    with _exit_at_once() as restore_handlers:
        from concept_eraser.demo import page

        def ready(address: str) -> None:
            restore_handlers()
            typer.echo(f"the page is at {address}    (Ctrl-C stops it; jobs can be resumed)")

        page.serve(
            runs_and_parts or [],
            runs=runs,
            before=before,
            host=host,
            port=port,
            auth=account,
            browser=not no_browser,
            ready=ready,
            names=allow_host or [],
            controls=control or [],
        )


@contextmanager
def _exit_at_once() -> Iterator[Any]:
    """End the process with one message on Ctrl-C, until the yielded function is called.

    Imports turn Ctrl-C into other errors or tracebacks. Nothing needs an orderly end at this stage.
    """

    def leave(*_: Any) -> None:
        os.write(2, b"stopped before the page was open; nothing was changed\n")
        scratch = Path(os.environ.get("GRADIO_TEMP_DIR", ""))
        is_own_folder = (
            scratch.name.startswith("concept-eraser-demo-")
            and str(scratch.parent) == tempfile.gettempdir()
        )
        if is_own_folder:  # this server's, see page.serve
            shutil.rmtree(scratch, ignore_errors=True)
        sys.stdout.flush()
        os._exit(130)

    before = {number: signal.signal(number, leave) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)
        before.clear()

    try:
        yield restore
    finally:
        restore()
