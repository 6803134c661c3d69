"""Bytes of a file as one read-only array, mapped or read."""

from __future__ import annotations

import mmap as memory_map
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mvllm.core.errors import ModelFileError

_WINDOW = 2 << 20
"""Most bytes that Linux maps when one page is touched; such windows start at multiples of their size."""


def open_bytes(path: Path, *, mmap: bool) -> NDArray[np.uint8]:
    """The whole file as read-only uint8[size]; `mmap=False` reads it into memory instead of mapping it.

    The mapping lives as long as any array that views it. A file that is cut short while mapped makes the
    process fail on access (the operating system's rule); replacing a file by renaming is safe.

    Raises:
        ModelFileError: the file can't be opened, or is empty.
    """
    try:
        size = path.stat().st_size
        if size == 0:
            raise ModelFileError(f"{path}: the file is empty; an incomplete download?")
        if mmap:
            return np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
        data = np.fromfile(path, dtype=np.uint8)
    except OSError as error:
        raise ModelFileError(f"{path}: can't be read: {error.strerror or error}") from error
    data.flags.writeable = False
    return data


def release_pages(array: NDArray[Any]) -> None:
    """Stop counting the pages of a mapped file that `array` views as this process's memory.

    The contents stay as they are: a page comes back from the file when it is touched again. Whoever has
    copied a weight calls this, so that file and copy are not both held. Does nothing for other arrays, and
    where the system has no such call. `array` is contiguous.
    """
    mapping = _mapping_under(array)
    if mapping is None or not hasattr(mapping, "madvise"):
        return
    first = array.ctypes.data - np.frombuffer(mapping, np.uint8).ctypes.data
    start = first // _WINDOW * _WINDOW
    stop = min(first + array.nbytes + _WINDOW, len(mapping))
    mapping.madvise(memory_map.MADV_DONTNEED, start, stop - start)


def _mapping_under(array: NDArray[Any]) -> memory_map.mmap | None:
    """The file mapping whose bytes `array` views; None if there is none."""
    owner: object = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    return owner if isinstance(owner, memory_map.mmap) else None
