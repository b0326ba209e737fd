"""`concept-eraser`: the application and how its errors are shown."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import typer

from concept_eraser import ranks
from concept_eraser.cli import (
    attack,
    card,
    demo,
    detect,
    distance,
    erase,
    evaluate,
    export,
    generate,
    info,
    merge,
    push,
    quickstart,
    report,
    verify,
)
from concept_eraser.errors import Interrupted, Told, UserError

app = typer.Typer(
    name="concept-eraser",
    help="Make diffusion models forget a concept, and measure what is left.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _interruptible(verb: Callable[..., None]) -> Callable[..., None]:
    """click answers Ctrl-C itself, with "Aborted!" and exit code 1; this says what became of the work, and leaves with 130."""

    @functools.wraps(verb)
    def run(*given: Any, **named: Any) -> None:
        try:
            verb(*given, **named)
        except KeyboardInterrupt:
            raise Interrupted("stopped; nothing half-written is left") from None

    return run


for verb in (quickstart.quickstart, erase.erase, generate.generate, evaluate.evaluate, attack.attack, detect.detect, demo.demo, distance.distance, evaluate.compare, report.report, export.export, merge.merge, card.card, push.push, verify.verify, info.list_, info.show, info.check, info.copy):  # fmt: skip
    options: dict[str, Any] = {"no_args_is_help": True} if verb.__name__ in ("show", "check", "copy") else {}
    app.command(name=verb.__name__.rstrip("_"), **options)(_interruptible(verb))


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Print the version and stop.")) -> None:
    if version:
        from concept_eraser.environment import version as installed

        typer.echo(f"concept-eraser {installed()}")
        raise typer.Exit


def main() -> None:
    """The console script. Bad input: one message, exit code 2; Ctrl-C: 130; no traceback for either."""
    # The bundled and local models need no hub; a machine without network should not wait for one.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        app()
    except Told:  # of several processes the first says it
        sys.exit(2)
    except UserError as error:
        _fail(str(error), 2)
    except Interrupted as stop:
        _fail(str(stop) if ranks.is_first() else "", 130)
    except BrokenPipeError:
        sys.exit(1)
    except OSError as error:  # a place that cannot be read or written
        _fail(f"{error.filename or 'the disk'}: {error.strerror or error}", 2)


def _fail(message: str, code: int) -> None:
    if message:
        typer.echo(f"error: {message}" if code == 2 else message, err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
