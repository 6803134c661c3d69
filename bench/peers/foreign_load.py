"""How much of the machine other processes used meanwhile (Linux; elsewhere unknown)."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


class ForeignLoad:
    """Share of one core used by processes other than `pids` since construction; None where unknown."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._start = time.perf_counter()
        self._busy, self._own = _busy_seconds(), self._own_seconds()

    def measure(self) -> float | None:
        busy, own = _busy_seconds(), self._own_seconds()
        if busy is None or own is None or self._busy is None or self._own is None:
            return None
        elapsed = time.perf_counter() - self._start
        return max(0.0, ((busy - self._busy) - (own - self._own)) / elapsed)

    def _own_seconds(self) -> float | None:
        total = 0.0
        for pid in self._pids:
            try:
                fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                return None
            total += (int(fields[11]) + int(fields[12])) / _TICKS
        return total


def _busy_seconds() -> float | None:
    try:
        fields = [int(x) for x in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    except OSError:
        return None
    idle = fields[3] + fields[4]
    return (sum(fields[:8]) - idle) / _TICKS
