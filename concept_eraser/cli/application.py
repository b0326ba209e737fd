"""The typer application: its commands, and the handling of Ctrl-C inside them.

`main` runs the application and shows its errors.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand

from concept_eraser.cli import (
    attack,
    batch,
    card,
    demo,
    detect,
    distance,
    doctor,
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
from concept_eraser.utils.errors import Interrupted, UserError

app = typer.Typer(
    name="concept-eraser",
    help="Make diffusion models forget a concept, and measure the result.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _interruptible(verb: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command with the handling of Ctrl-C and of a closed output.

    click handles Ctrl-C with "Aborted!" and exit code 1. Here the message states that no file is
    half-written, and the exit code is 130. click handles a closed output with exit code 1. Here it
    is no error: a reader such as `head` has read all that it needs.
    """

    @functools.wraps(verb)
    def run(*args: Any, **kwargs: Any) -> None:
        stop = signal.getsignal(signal.SIGINT)
        _set_working(stop, True)
        try:
            verb(*args, **kwargs)
        except KeyboardInterrupt:
            raise Interrupted("stopped; nothing half-written is left") from None
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        finally:
            _set_working(stop, False)

    return run


def _set_working(stop: Any, value: bool) -> None:
    """Tell the handler of Ctrl-C whether a command is running, if the handler is `main`'s own."""
    if hasattr(stop, "working"):
        stop.working = value


class _Command(TyperCommand):
    """A command that refuses an empty text, which is often an unset variable of a script.

    `Path("")` would be the working folder. Only a prompt may be empty.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given, _, _ = self.make_parser(ctx).parse_args(args=list(args))
        for name, value in given.items():
            values = value if isinstance(value, list | tuple) else [value]
            if "" in values and name != "prompt" and not ctx.resilient_parsing:
                parameter = next(one for one in self.params if one.name == name)
                # the help shows no name of an argument
                is_option = parameter.param_type_name == "option"
                subject = parameter.opts[0] if is_option else "an argument"
                raise UserError(
                    f"{subject} is an empty text, perhaps of a variable that is not set; give a "
                    "value, or leave it out"
                )
        return super().parse_args(ctx, args)


for verb in (
    quickstart.quickstart,
    erase.erase,
    batch.batch,
    generate.generate,
    evaluate.evaluate,
    attack.attack,
    detect.detect,
    demo.demo,
    distance.distance,
    evaluate.compare,
    report.report,
    export.export,
    merge.merge,
    card.card,
    push.push,
    verify.verify,
    doctor.doctor,
    info.list_,
    info.show,
    info.check,
    info.copy,
):
    options: dict[str, Any] = (
        {"no_args_is_help": True} if verb.__name__ in ("show", "check", "copy") else {}
    )
    app.command(name=verb.__name__.rstrip("_"), cls=_Command, **options)(_interruptible(verb))


@app.callback(invoke_without_command=True)
def _root(
    version: bool = typer.Option(False, "--version", help="Print the version and stop."),
) -> None:
    if version:
        from concept_eraser.utils.provenance import version as installed

        typer.echo(f"concept-eraser {installed()}")
        raise typer.Exit
