"""The read bandwidth of the machine's memory, as a plain loop of additions sees it."""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray


def _sum(values: Any) -> Any:
    """Sum over four streams, which keeps more reads under way than one."""
    quarter = values.size // 4
    total = 0
    for i in range(quarter):
        total += values[i] + values[quarter + i] + values[2 * quarter + i] + values[3 * quarter + i]
    return total


class ReadBandwidth:
    """Reads one large array over and over with a fixed number of threads, which sleep between measurements.

    What a cache has room for is read faster, so the array should be as large as what is compared with it.

    Owns the array and the threads; ends them with `close` or the `with` block.
    """

    def __init__(self, threads: int, array_bytes: int) -> None:
        self._kernel = numba.njit("int64(int64[::1])", nogil=True)(_sum)
        self._parts: list[NDArray[np.int64]] = np.split(
            np.ones(array_bytes // 8 // (4 * threads) * 4 * threads, np.int64), threads
        )
        self._bytes = sum(part.nbytes for part in self._parts)
        self._pool = ThreadPoolExecutor(threads)

    def measure(self, seconds: float) -> float:
        """Bytes per second: median over the passes that fit into about `seconds`, at least one."""
        rates: list[float] = []
        end = time.perf_counter() + seconds
        while not rates or time.perf_counter() < end:
            start = time.perf_counter()
            self.read()
            rates.append(self._bytes / (time.perf_counter() - start))
        return statistics.median(rates)

    def read(self) -> int:
        """One pass; returns the sum of the array's values, all of which are 1."""
        return sum(self._pool.map(self._kernel, self._parts))

    def close(self) -> None:
        self._pool.shutdown()

    def __enter__(self) -> ReadBandwidth:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
