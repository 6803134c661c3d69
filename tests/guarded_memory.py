"""Memory between pages that nothing may touch: a read or write beyond it ends the process."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

_LINE = 64
_PROT_NONE = 0


class GuardedMemory:
    """Hands out arrays that end (`at_end`) or start at a page without access. Owns the mappings, for good.

    `planted` names what is handed out `PLANTED_BYTES` too short, so that its last bytes lie on such a page.
    """

    PLANTED_BYTES = _LINE

    def __init__(self, *, at_end: bool, planted: str | None = None) -> None:
        self._at_end, self._planted = at_end, planted
        self._mappings: list[mmap.mmap] = []
        self._protect = ctypes.CDLL(None, use_errno=True).mprotect
        self._protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def zeros(self, nbytes: int, purpose: str) -> NDArray[np.uint8]:
        """`nbytes` zero bytes at a multiple of a cache line, as `memory.aligned_zeros`."""
        page = mmap.PAGESIZE
        usable = -(-max(nbytes, 1) // page) * page
        mapping = mmap.mmap(-1, usable + 2 * page)
        self._mappings.append(mapping)
        # A view keeps the mapping from being closed while somebody holds the array.
        whole = np.frombuffer(mapping, np.uint8)
        address = whole.ctypes.data
        for guard in (address, address + page + usable):
            if self._protect(guard, page, _PROT_NONE):
                raise OSError(ctypes.get_errno(), "mprotect")
        start = page
        if self._at_end:
            start = (page + usable - nbytes) // _LINE * _LINE
        if purpose == self._planted:
            start = page + usable - nbytes + self.PLANTED_BYTES
        return whole[start : start + nbytes]

    def copy(self, array: NDArray[Any], purpose: str) -> NDArray[Any]:
        """A contiguous copy that lies between guards."""
        packed = np.ascontiguousarray(array)
        guarded = self.zeros(packed.nbytes, purpose)
        # Reinterpreted by offset, since what is planted must not be touched here.
        result: NDArray[Any] = guarded.view(packed.dtype).reshape(packed.shape)
        if purpose != self._planted:
            result[...] = packed
        return result
