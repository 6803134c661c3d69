"""Bytes of a file as one read-only array, mapped or read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mvllm.core.errors import ModelFileError


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
            raise ModelFileError(f"{path}: the file is empty")
        if mmap:
            return np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
        data = np.fromfile(path, dtype=np.uint8)
    except OSError as error:
        raise ModelFileError(f"{path}: can't be read: {error.strerror or error}") from error
    data.flags.writeable = False
    return data
