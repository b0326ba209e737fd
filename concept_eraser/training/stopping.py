"""Ctrl-C and SIGTERM between steps only, and in all processes after the same one.

Signals reach the main thread only; elsewhere, and where somebody ignores or handles them, nothing
is changed.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stops:
    """When a training loop ends early: KeyboardInterrupt, for Ctrl-C and for the SIGTERM of a
    scheduler or a launcher.

    anyone: of several processes, whether any of them was asked to stop; all must call it together.
    With it a signal is held back from the start of the loop, and answered at the end of a step by
    all alike: one that stopped alone would leave the others waiting. Without it (one process) a
    signal is held back inside steps only.
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
        """Whole or not at all: a saved state lies between steps, never inside one."""
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
    """Inside, `answer` is called for the signals that would stop this process."""
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
