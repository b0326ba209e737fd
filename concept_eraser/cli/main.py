"""The entry point `concept-eraser`: it starts the application and shows its errors.

Each error is one message with exit code 2; Ctrl-C gives exit code 130. The application, and with it
every library, is imported inside `main`, so that Ctrl-C works while they load. Before `main` runs,
Python itself handles Ctrl-C with a traceback, which the package cannot change.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

from concept_eraser.utils.collector import collect_less_often
from concept_eraser.utils.errors import Interrupted, Told, UserError, first_line

_STOPPED = "stopped; nothing half-written is left"
_IMPORTING = "<frozen importlib._bootstrap"
_MEMORY = (
    "not enough memory for this; ask for less at once (-n, batch_size, --memory), or take a "
    "larger machine"
)
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory")  # RuntimeErrors of torch


def __getattr__(name: str) -> Any:
    """The application itself, loaded when it is first asked for."""
    if name == "app":
        from concept_eraser.cli.application import app

        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Stop:
    """What Ctrl-C does. Inside a verb it is a KeyboardInterrupt, which the verb answers.

    Elsewhere the process ends at once: before a verb, after it, and while a library is imported.
    Libraries that are interrupted there answer with errors of their own, or not at all. No more can
    be lost than by a kill.
    """

    gives_way = True  # training.stopping may take over

    def __init__(self) -> None:
        self.came = False
        self.working = False  # a verb has begun and not ended

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        if self.working and not _is_importing(frame):
            raise KeyboardInterrupt
        shows_cursor = "\x1b[?25h" if sys.stderr is not None and sys.stderr.isatty() else ""
        os.write(2, f"{shows_cursor}{_STOPPED}\n".encode())
        os._exit(130)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith(_IMPORTING):
            return True
        frame = frame.f_back
    return False


def main() -> None:
    """The console script. Bad input: one message, exit code 2; Ctrl-C: 130; no traceback for
    either.
    """
    stop = _Stop()
    if threading.current_thread() is threading.main_thread() and signal.getsignal(
        signal.SIGINT
    ) in (signal.default_int_handler, signal.SIG_DFL):
        signal.signal(signal.SIGINT, stop)
    collect_less_often()
    # The bundled and local models need no hub; a machine without network should not wait for one.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # names that are no text can be printed
    try:
        from concept_eraser.cli.application import app

        app()
    except Told:  # of several processes the first says it
        sys.exit(2)
    except Interrupted as interrupted:
        from concept_eraser.utils import distributed

        _fail(str(interrupted) if distributed.is_first() else "", 130)
    except KeyboardInterrupt:
        _fail(_STOPPED, 130)
    except Exception as error:
        if stop.came:  # what a library makes of Ctrl-C
            _fail(_STOPPED, 130)
        message = _sentence(error)
        if message is None:
            raise
        _fail(message, 2)


def _sentence(error: Exception) -> str | None:
    """What an error says to a user, with a next step; None for one that is a mistake of the
    program.
    """
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError):
        from concept_eraser.storage.readers import cannot

        return cannot(
            "use", error.filename if error.filename is not None else "a file or the network", error
        )
    if isinstance(error, MemoryError) or any(text in str(error) for text in _OUT_OF_MEMORY):
        return _MEMORY
    if isinstance(error, RecursionError):
        return "a file or value is nested too deep; write it flatter"
    if isinstance(error, UnicodeError):
        return (
            f"a name or a text is no valid UTF-8 ({first_line(error)}); rename the file, or "
            "save the text as UTF-8"
        )
    if isinstance(error, OverflowError):
        return f"a number is too large ({first_line(error)}); give a smaller one"
    return None


def _fail(message: str, code: int) -> None:
    if message:
        text = f"error: {message}" if code == 2 else message
        sys.stderr.write(_printable(text) + "\n")
    if code == 130:
        # CPython ends by the signal where a KeyboardInterrupt has passed the exec of a text;
        # another exec forgets it
        eval("0")
    sys.exit(code)


def _printable(text: str) -> str:
    """A text without what a terminal would act on: names of files and values of strangers stand in
    messages.
    """
    return "".join(
        c if c == "\n" or c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode()
        for c in text
    )


if __name__ == "__main__":
    main()
