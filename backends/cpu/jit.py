"""Compiling the kernels, once per process and (through the compile cache) once per machine.

Modules that use `kernel` compile when they are imported; only `CpuBackend.load` imports them, so importing
mvllm compiles nothing. `native_function` compiles on call.

Numba's own cache does not notice a change in the code that emits a kernel's body. The cache folder is
therefore named after the sources of this package; old folders are removed after a while without use.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import llvmlite
import numba

from mvllm.backends.cpu import isa

Function = TypeVar("Function", bound=Callable[..., Any])

_OPTIONS: dict[str, Any] = {"error_model": "numpy", "boundscheck": False, "fastmath": False}
_KEEP_UNUSED_S = 30 * 24 * 3600  # how long a folder of other sources survives without use

_settings: Any = numba.config
_cache_dir_lock = threading.RLock()  # the setting is process-wide


def kernel(signature: str) -> Callable[[Function], Function]:
    """Compile a function with the explicit Numba `signature` now; called from Python it releases the GIL.

    Floating point is exact as written; errors follow NumPy (a division by zero gives inf or nan).
    """

    def decorate(function: Function) -> Function:
        with _cache_dir() as cached:
            compiled: Any = numba.njit(signature, nogil=True, cache=cached, **_OPTIONS)(function)
        return cast(Function, compiled)

    return decorate


def native_function(signature: str, function: Callable[..., Any]) -> Any:
    """Compile `function` for calls through its `.address`; the caller keeps the result alive."""
    with _cache_dir() as cached:
        return numba.cfunc(signature, cache=cached, **_OPTIONS)(function)


@contextlib.contextmanager
def _cache_dir() -> Iterator[bool]:
    """Point Numba at our compile cache; yields whether there is one."""
    folder = cache_folder()
    if folder is None:
        yield False
        return
    with _cache_dir_lock:
        before = _settings.CACHE_DIR
        _settings.CACHE_DIR = str(folder)
        try:
            yield True
        finally:
            _settings.CACHE_DIR = before


@functools.cache
def cache_folder() -> Path | None:
    """The compile cache of these sources and this instruction set, made if need be.

    None, after one warning, where no folder can be written: then every process compiles anew.
    """
    try:
        parent = user_cache_folder(os.environ, sys.platform) / "mvllm" / "kernels"
        folder = parent / _version()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        os.utime(folder)
        prune(parent, keep=folder, before=time.time() - _KEEP_UNUSED_S)
    except (OSError, RuntimeError) as error:
        warnings.warn(
            f"compiled kernels can't be kept ({error}): every start compiles them anew. "
            "Set XDG_CACHE_HOME to a writable folder to avoid this.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return folder


def user_cache_folder(environment: Mapping[str, str], platform: str) -> Path:
    """Where the platform keeps a user's caches.

    Raises:
        RuntimeError: the user has no home folder.
    """
    configured = environment.get("XDG_CACHE_HOME")
    if configured and Path(configured).is_absolute():
        return Path(configured)
    if platform == "win32" and environment.get("LOCALAPPDATA"):
        return Path(environment["LOCALAPPDATA"])
    if platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path.home() / ".cache"


def prune(parent: Path, keep: Path, before: float) -> None:
    """Remove the folders in `parent`, other than `keep`, last used before the time `before` (epoch, s).

    A folder that can't be removed stays.
    """
    for folder in parent.iterdir():
        if folder != keep and folder.is_dir() and folder.stat().st_mtime < before:
            shutil.rmtree(folder, ignore_errors=True)


def _version() -> str:
    """Names everything that compiled code depends on beyond Numba's own key (which holds the CPU)."""
    versions = f"{numba.__version__} {llvmlite.__version__} {sys.version_info[:2]}"
    return f"{sources_digest(Path(__file__).parent, versions)}-{isa.selected().name}"


def sources_digest(folder: Path, salt: str = "") -> str:
    """Short hash of the Python files directly in `folder`."""
    digest = hashlib.sha256(salt.encode())
    for source in sorted(folder.glob("*.py")):
        content = source.read_bytes()
        digest.update(f"\0{source.name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]
