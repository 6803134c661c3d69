"""How many threads of a team work while other processes want the same cores.

All threads meet many times in a call, so the slowest one sets the pace: a thread that has to share its core
makes the others wait, and a team of two can be slower than a single thread. What a call computes does not
depend on how many threads compute it, so the number may change from call to call.
"""

from __future__ import annotations

_WINDOW_S = 0.05
"""Time of calls over which waiting is judged: longer than the scheduler's time slices."""

_EARLY = 0.75
"""Waiting is measured from the moment that it takes too long, so a little less of it counts as enough."""

_FIRST_REST_S, _LONGEST_REST_S = 0.25, 8.0
"""Time of calls with one thread less, before the full team is tried again; doubled after each trial that
fails, so that trials cost little."""


class TeamSize:
    """Decides on the number of working threads from what calls report. Owns its observations; reads no clock.

    One thread leaves for every window with much waiting; after a rest all are back.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._rest_s = _FIRST_REST_S
        self._resting_s = 0.0  # since a thread left
        self._on_trial = False  # all threads are back, and their first window is not over
        self._window_s = self._waited_s = 0.0
        self.working = threads

    def observe(self, seconds: float, waited_s: float) -> None:
        """Take in a call that took `seconds` and in which `working` threads waited `waited_s` in all."""
        self._window_s += seconds
        self._waited_s += waited_s
        self._resting_s += seconds
        if self._window_s >= _WINDOW_S:
            self._judge()
        if self.working < self._threads and self._resting_s >= self._rest_s:
            self.working = self._threads
            self._on_trial = True
            self._window_s = self._waited_s = 0.0

    def _judge(self) -> None:
        """The end of a window."""
        if (
            self.working > 1
            and self._waited_s > _bearable_share(self.working) * self._window_s * self.working
        ):
            if self._on_trial:
                self._rest_s = min(2 * self._rest_s, _LONGEST_REST_S)
            self.working -= 1
            self._resting_s = 0.0
        elif self.working == self._threads:
            self._rest_s = _FIRST_REST_S
        self._on_trial = False
        self._window_s = self._waited_s = 0.0


def _bearable_share(threads: int) -> float:
    """Share of their time that threads may wait before one less would be as fast.

    Undisturbed, work takes u; n - 1 threads take t = u * n / (n - 1). If n threads take t because of one, the
    others wait t - u: the share (n - 1) * (t - u) / (n * t) of all time, which is (n - 1) / n**2.
    """
    return _EARLY * (threads - 1) / threads**2
