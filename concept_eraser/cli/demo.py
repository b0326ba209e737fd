"""concept-eraser demo"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from concept_eraser.errors import UserError


def demo(
    given: Annotated[Optional[list[str]], typer.Argument(metavar="[RUN]...", help="run folders to compare, beside those in --runs; with --before also a LoRA, denoiser or pipeline of another eraser")] = None,
    port: Annotated[Optional[int], typer.Option(min=1, max=65535, help="default: the first free one from 7860")] = None,
    host: Annotated[str, typer.Option(help="0.0.0.0 lets others on the network in; think of --auth")] = "127.0.0.1",
    auth: Annotated[Optional[str], typer.Option(help="user:password that the page asks for", envvar="CONCEPT_ERASER_DEMO_AUTH")] = None,
    runs: Annotated[Path, typer.Option("--runs", help="folder of runs; what is erased in the page goes there")] = Path("runs"),
    before: Annotated[Optional[str], typer.Option(help="the model that somebody else's RUN was made from")] = None,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="only print the address")] = False,
) -> None:  # fmt: skip
    """Open a page that erases, compares before and after, attacks and shows results. It needs no network.

    [bold]Examples[/bold]

      concept-eraser demo

      concept-eraser demo runs/tiny_star_munba --port 7000 --no-browser

      concept-eraser demo --host 0.0.0.0 --auth me:secret     (better: the variable CONCEPT_ERASER_DEMO_AUTH)
    """
    user, colon, password = (auth or "").partition(":")
    if auth and not (user and colon and password):
        raise UserError("--auth is written user:password, both not empty")
    if runs.exists() and not runs.is_dir():
        raise UserError(f"{runs} is a file; give a folder with --runs")
    if not auth and host not in ("127.0.0.1", "localhost", "::1"):
        typer.echo(f"warning: on {host} everybody in the network can use this page, and this machine with it; think of --auth user:password", err=True)  # fmt: skip
    from concept_eraser.demo import page

    page.serve(given or [], runs=runs, before=before, host=host, port=port, auth=(user, password) if auth else None, browser=not no_browser, ready=lambda address: typer.echo(f"the page is at {address}    (Ctrl-C stops it; jobs can be resumed)"))  # fmt: skip
