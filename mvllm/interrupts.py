"""Ctrl-C, kept from arriving in the middle of a change of state."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class HoldInterrupts:
    """Context manager that delivers an interrupt (SIGINT) at its end instead of inside.

    Python raises KeyboardInterrupt between any two instructions of the main thread; between two halves of a
    change it would leave the engine's state contradictory. Does nothing in other threads, which are never
    interrupted, or where the program left SIGINT to the system.
    """

    def __init__(self) -> None:
        self._handler: Any = None
        self._held: list[tuple[int, FrameType | None]] = []

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._handler = handler
                signal.signal(signal.SIGINT, self._hold)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        self._held.append((number, frame))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handler is None:
            return
        signal.signal(signal.SIGINT, self._handler)
        if self._held:
            self._handler(*self._held[0])
