"""Ends a forward pass that hangs in Python, so that the engine goes on.

A signal reaches the main thread between two bytecodes, also out of a sleep; a hang inside a kernel
it does not reach, and whoever watches from outside ends the process.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType

AGAIN_S = 0.5


class Hang(RuntimeError):
    """It took longer than it may."""


class Inside:
    """A context for code of a forward pass: it can be broken off with `Hang`. Entered at every
    call of a module, so it is no generator."""

    __slots__ = ("depth",)

    def __init__(self) -> None:
        self.depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None
    ) -> None:
        self.depth -= 1


class Alarm:
    """`within` gives the main thread a deadline. When the time is up outside of `inside`, the alarm
    waits for the next time: an engine's own code is never cut."""

    def __init__(self) -> None:
        """Takes SIGALRM, on the main thread. On another one there is no alarm."""
        self.inside = Inside()
        self._deadline_s = 0.0
        self._is_armed = threading.current_thread() is threading.main_thread()
        if self._is_armed:
            signal.signal(signal.SIGALRM, self._ring)

    @contextlib.contextmanager
    def within(self, deadline_s: float) -> Iterator[None]:
        """Not to be nested."""
        if not self._is_armed:
            yield
            return
        self._deadline_s = deadline_s
        signal.setitimer(signal.ITIMER_REAL, deadline_s, AGAIN_S)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)

    def _ring(self, number: int, frame: FrameType | None) -> None:
        leaving = frame is not None and frame.f_code is Inside.__exit__.__code__
        if self.inside.depth and not leaving:
            raise Hang(f"it did not end within {self._deadline_s:g} s")
