"""The entry point `concept-eraser`: it starts the application and shows its errors.

Each error is one message with exit code 2; Ctrl-C gives exit code 130. The application, and with it
every library, is imported inside `main`, so that Ctrl-C works while they load. Before `main` runs,
Python itself handles Ctrl-C with a traceback, which the package cannot change.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

from concept_eraser.utils.collector import collect_less_often
from concept_eraser.utils.errors import (
    Interrupted,
    ReportedElsewhere,
    UserError,
    first_line,
    is_out_of_memory,
)

_STOP_MESSAGE = "stopped; nothing half-written is left"
_IMPORTING = "<frozen importlib._bootstrap"
_MEMORY = (
    "not enough memory for this; ask for less at once (-n, batch_size, --memory), or take a "
    "larger machine"
)


def __getattr__(name: str) -> Any:
    """Load the application on its first use."""
    if name == "app":
        from concept_eraser.cli.application import app

        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Stop:
    """The handler of Ctrl-C. Inside a command it raises KeyboardInterrupt.

    Elsewhere the process ends at once: before a command, after it, and while a library is imported.
    A library that is interrupted during its import raises other errors, or none. The effect on
    files is at most that of a kill.
    """

    gives_way = True  # training.stopping may take over

    def __init__(self) -> None:
        self.was_pressed = False  # whether Ctrl-C was pressed
        self.working = False  # whether a command is running

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.was_pressed = True
        if self.working and not _is_importing(frame):
            raise KeyboardInterrupt
        shows_cursor = "\x1b[?25h" if sys.stderr is not None and sys.stderr.isatty() else ""
        os.write(2, f"{shows_cursor}{_STOP_MESSAGE}\n".encode())
        os._exit(130)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith(_IMPORTING):
            return True
        frame = frame.f_back
    return False


def main() -> None:
    """Run the console script.

    Bad input gives one message and exit code 2. Ctrl-C gives exit code 130. Neither prints a
    traceback.
    """
    stop = _Stop()
    if threading.current_thread() is threading.main_thread() and signal.getsignal(
        signal.SIGINT
    ) in (signal.default_int_handler, signal.SIG_DFL):
        signal.signal(signal.SIGINT, stop)
        # the command has ended then; the interpreter would end by the signal, not by its exit code
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    collect_less_often()
    # telemetry of the hub would make a machine without network wait
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # A waiting thread of GNU OpenMP spins 300,000 times. Where another process needs the cores, the
    # threads then wait for each other, five to ten times as long. Set before torch is imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # print file names that are not UTF-8
    try:
        from concept_eraser.cli.application import app

        app()
    except ReportedElsewhere:  # the first of several processes prints the error
        sys.exit(2)
    except Interrupted as interrupted:
        from concept_eraser.utils import distributed

        _fail(str(interrupted) if distributed.is_first() else "", 130)
    except KeyboardInterrupt:
        _fail(_STOP_MESSAGE, 130)
    except Exception as error:
        if stop.was_pressed:  # a library turned Ctrl-C into this error
            _fail(_STOP_MESSAGE, 130)
        message = _error_message(error)
        if message is None:
            raise
        _fail(message, 2)


def _error_message(error: Exception) -> str | None:
    """Return the message of an error for the user, with a next step. None for a bug."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError):
        from concept_eraser.storage.readers import cannot

        return cannot(
            "use", error.filename if error.filename is not None else "a file or the network", error
        )
    if is_out_of_memory(error):
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
        # after a KeyboardInterrupt in code run by exec, CPython ends by the signal instead of the
        # exit code; another eval clears that state
        eval("0")
    sys.exit(code)


def _printable(text: str) -> str:
    """Escape the control characters of a message. It may quote file names and values of others."""
    return "".join(
        c if c == "\n" or c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode()
        for c in text
    )


if __name__ == "__main__":
    main()
