"""Signals, kept from raising in the middle of a change of state."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGALRM", "SIGUSR1") if hasattr(signal, name)
]
"""Those whose handlers are likely to raise: Ctrl-C, a request to end, a deadline."""

# The functions of `signal` look every handler up in an enumeration, and raise and catch an exception for each
# that is not in it. Those that they wrap do not, and steps are short.
_bare: Any = sys.modules.get("_signal", signal)


class HoldInterrupts:
    """Context manager that runs the handlers of signals at its end instead of inside.

    Python runs them between any two instructions of the main thread. An exception between two halves of a
    change, KeyboardInterrupt above all, would leave what is changed contradictory. Does nothing in other
    threads, which are never interrupted, and to signals left to the system.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._held: list[tuple[int, FrameType | None]] = []

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            handler = _bare.getsignal(number)
            if callable(handler):
                self._handlers[number] = handler
                _bare.signal(number, self._hold)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        self._held.append((number, frame))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            _bare.signal(number, handler)
        for number, frame in self._held:
            self._handlers[number](number, frame)
