"""Compiling the kernels, once per process and (through the compile cache) once per machine.

Modules that use `kernel` compile when they are imported; only `CpuBackend.load` imports them, so importing
mvllm compiles nothing. `native_function` compiles on call.

Numba's own cache does not notice a change in the code that emits a kernel's body, nor in a constant from
another module. The cache folder is therefore named after all these sources; old folders are removed after a
while without use.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import shutil
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import llvmlite
import numba

import mvllm.core
from mvllm.backends.cpu import isa
from mvllm.core.cache_folder import cache_folder
from mvllm.core.interrupts import HoldInterrupts

Function = TypeVar("Function", bound=Callable[..., Any])

_OPTIONS: dict[str, Any] = {"error_model": "numpy", "boundscheck": False, "fastmath": False}
_KEEP_UNUSED_S = 30 * 24 * 3600  # how long a folder of other sources survives without use

_log = logging.getLogger("mvllm")
_settings: Any = numba.config
_cache_dir_lock = threading.RLock()  # the setting is process-wide


def kernel(signature: str) -> Callable[[Function], Function]:
    """Compile a function with the explicit Numba `signature` now; called from Python it releases the GIL.

    Floating point is exact as written; errors follow NumPy (a division by zero gives inf or nan).
    """

    def decorate(function: Function) -> Function:
        # LLVM's callbacks would swallow an interrupt and leave half a library.
        with HoldInterrupts(), _cache_dir() as cached:
            compiled: Any = numba.njit(signature, nogil=True, cache=cached, **_OPTIONS)(function)
        return cast(Function, compiled)

    return decorate


def native_function(signature: str, function: Callable[..., Any]) -> Any:
    """Compile `function` for calls through its `.address`; the caller keeps the result alive."""
    with HoldInterrupts(), _cache_dir() as cached:
        return numba.cfunc(signature, cache=cached, **_OPTIONS)(function)


@contextlib.contextmanager
def _cache_dir() -> Iterator[bool]:
    """Point Numba at our compile cache; yields whether there is one."""
    folder = kernel_folder()
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
def kernel_folder() -> Path | None:
    """The compile cache of these sources and this instruction set, made if need be.

    None, after one warning, where no folder can be written: then every process compiles anew.
    """
    try:
        parent = cache_folder(os.environ, sys.platform) / "kernels"
        folder = parent / _version()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        os.utime(folder)
        prune(parent, keep=folder, before=time.time() - _KEEP_UNUSED_S)
    except (OSError, RuntimeError) as error:
        warnings.warn(
            f"compiled kernels can't be kept ({error}): every start compiles them anew. "
            "Set MVLLM_CACHE to a writable folder to avoid this.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return folder


@functools.cache
def announce_first_compilation() -> None:
    """Log, once per process, that compiling is about to take a while, if the compile cache is empty.

    Silent where there is no cache: the warning of `kernel_folder` has said so.
    """
    folder = kernel_folder()
    if folder is not None and not any(folder.iterdir()):
        name = isa.selected().name
        _log.info("compiling CPU kernels for %s: first start on this machine, about 20 s", name)


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
    return f"{sources_digest(kernel_sources(), versions)}-{isa.selected().name}"


def kernel_sources() -> list[Path]:
    """Every file whose code or constants end up in compiled kernels."""
    core = Path(mvllm.core.__path__[0])
    sampler = sorted((core / "sampling").glob("*.py"))
    return [*sorted(Path(__file__).parent.glob("*.py")), *sampler, core / "request.py", core / "step.py"]


def sources_digest(sources: Iterable[Path], salt: str = "") -> str:
    """Short hash of the files' names and contents, in the order given."""
    digest = hashlib.sha256(salt.encode())
    for source in sources:
        content = source.read_bytes()
        digest.update(f"\0{source.name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]
