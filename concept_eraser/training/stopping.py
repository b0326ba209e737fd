"""Stop at Ctrl-C and SIGTERM between steps only, in all processes after the same step.

Signals reach the main thread only. Elsewhere, or if other code ignores or handles them, nothing
changes.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stops:
    """Ends a training loop early by KeyboardInterrupt, for Ctrl-C and SIGTERM.

    Schedulers and launchers send SIGTERM.

    anyone: with several processes, returns whether any of them was asked to stop; all must call it
    together. A signal is then delayed to the end of a step, where all processes stop. A process
    that stopped alone would leave the others waiting. None is for one process, which delays a
    signal inside steps only.
    """

    def __init__(self, anyone: Callable[[bool], bool] | None = None) -> None:
        self.anyone = anyone
        self._came = False

    @contextmanager
    def loop(self) -> Iterator[None]:
        with _handle_signals(self._hold if self.anyone else _raise):
            yield

    @contextmanager
    def step(self) -> Iterator[None]:
        """Delay signals during a step, so that a saved state is always between steps."""
        if self.anyone:
            yield
            if self.anyone(self._came):
                raise KeyboardInterrupt
            return
        with _handle_signals(self._hold):
            yield
        if self._came:
            raise KeyboardInterrupt

    def _hold(self, number: int, frame: Any) -> None:
        self._came = True


def _raise(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


@contextmanager
def _handle_signals(answer: Callable[[int, Any], None]) -> Iterator[None]:
    """Call `answer` inside the context for the signals that would stop this process."""
    handlers: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        replaceable = (signal.default_int_handler, signal.SIG_DFL, _raise)
        handlers = {
            number: before
            for number in SIGNALS
            if (before := signal.getsignal(number)) in replaceable
            or getattr(before, "gives_way", False)
        }
    try:
        for number in handlers:
            signal.signal(number, answer)
        yield
    finally:
        for number, before in handlers.items():
            signal.signal(number, before)
