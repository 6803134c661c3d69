"""How many bytes per second the threads of a team can read together, to hold kernels' speed against."""

from __future__ import annotations

import functools
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mvllm.backends.cpu.jit import native_function
from mvllm.backends.cpu.memory import aligned_zeros
from mvllm.backends.cpu.pointers import i64_at, record_at
from mvllm.backends.cpu.team import Team, worker_at

_TABLE = np.dtype([("address", np.int64), ("words", np.int64), ("sums", np.int64)])
_LINE_WORDS = 8

_table_at = record_at(_TABLE)


def _read(table_address: Any, worker_address: Any) -> None:
    table, worker = _table_at(table_address), worker_at(worker_address)
    first = table.words * worker.thread // worker.threads
    last = table.words * (worker.thread + 1) // worker.threads
    words, total = i64_at(table.address + 8 * first), 0
    for i in range(last - first):
        total += words[i]
    i64_at(table.sums)[worker.thread * _LINE_WORDS] = total


@functools.cache
def _reader() -> Any:
    return native_function("void(int64, int64)", _read)


class ReadBandwidth:
    """Reads memory beyond the caches with all threads. Owns the memory and the threads."""

    def __init__(self, threads: int, nbytes: int = 256 << 20) -> None:
        self._memory: NDArray[np.uint8] = aligned_zeros(nbytes, "bandwidth test")
        self._memory.fill(1)
        self._sums = np.zeros(threads * _LINE_WORDS, np.int64)
        self._table = np.zeros(1, _TABLE)
        self._table[0] = (self._memory.ctypes.data, nbytes // 8, self._sums.ctypes.data)
        self._team = Team(threads, int(_reader().address))

    def measure(self) -> float:
        """Bytes per second of one pass over the memory."""
        start = time.perf_counter()
        self._team.run(self._table.ctypes.data)
        return self._memory.nbytes / (time.perf_counter() - start)

    def close(self) -> None:
        self._team.close()
