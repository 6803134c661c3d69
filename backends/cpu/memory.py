"""Zeroed memory on cache-line borders, which takes none of the machine's until it is written."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mvllm.core.errors import CapacityError
from mvllm.core.types import ceil_div

LINE_BYTES = 64

_NOTHING = ctypes.c_char * 0


def aligned_zeros(nbytes: int, purpose: str) -> NDArray[np.uint8]:
    """`nbytes` zeroed bytes that start on a cache line. Pages take no memory before they are touched.

    Raises:
        CapacityError: the system refuses; `purpose` is named.
    """
    try:
        memory = np.zeros(nbytes + LINE_BYTES, np.uint8)
    except (MemoryError, ValueError):  # ValueError: more than an address can count
        raise CapacityError(f"{purpose}, bytes", needed=nbytes, available=0) from None
    start = -memory.ctypes.data % LINE_BYTES
    return memory[start : start + nbytes]


def address_of(array: NDArray[Any]) -> int:
    """Where a contiguous array begins; for writable ones several times as quick as `array.ctypes.data`."""
    if array.flags.writeable:
        buffer: Any = array  # NumPy's stubs know it as one from Python 3.12 on
        return ctypes.addressof(_NOTHING.from_buffer(buffer))
    return int(array.ctypes.data)


def round_up(nbytes: int, multiple: int = LINE_BYTES) -> int:
    """The smallest multiple that is not below `nbytes`."""
    return ceil_div(nbytes, multiple) * multiple
