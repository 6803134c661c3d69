"""Compiling the kernels, when they are first needed, and keeping the machine code.

Numba compiles; what it makes of a function is kept as a file in the compile cache (`object_cache`), from
where a later process loads it without importing Numba, and without the function's callees. Importing a module
of kernels compiles nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.metadata
import logging
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar, cast

import llvmlite
import llvmlite.binding

import mvllm.core
from mvllm.backends.cpu import isa
from mvllm.backends.cpu.deferred import Deferred
from mvllm.backends.cpu.object_cache import ObjectCode, load, read, write
from mvllm.core.cache_folder import cache_folder
from mvllm.core.interrupts import HoldInterrupts

Function = TypeVar("Function", bound=Callable[..., Any])

_OPTIONS: dict[str, Any] = {"error_model": "numpy", "boundscheck": False, "fastmath": False}
_PACKAGE = __name__.removesuffix("jit")
_KEEP_UNUSED_S = 30 * 24 * 3600  # how long a folder of other sources survives without use

_C_TYPES: dict[str, Any] = {
    "void": None,
    "boolean": ctypes.c_bool,
    "int32": ctypes.c_int32,
    "int64": ctypes.c_int64,
    "uint64": ctypes.c_uint64,
    "float32": ctypes.c_float,
    "float64": ctypes.c_double,
}

_log = logging.getLogger("mvllm")

before_compiling: list[Callable[[str], None]] = []
"""Called with the key of a function that is not in the compile cache, and may wait for it to get there."""


class NativeFunction:
    """Machine code of one function and everything it calls. Owns the code: it goes with this object.

    Attributes:
        address: for calls from other compiled code.
        ctypes: the function for Python; it releases the GIL and takes and returns numbers.
        was_cached: whether the code came from the compile cache.
    """

    def __init__(self, signature: str, address: int, owner: object, *, was_cached: bool) -> None:
        self.address = address
        self.was_cached = was_cached
        self._owner = owner
        result, arguments = signature.rstrip(")").split("(")
        argument_types = [_C_TYPES[name.strip()] for name in arguments.split(",")]
        self.ctypes = ctypes.CFUNCTYPE(_C_TYPES[result], *argument_types)(address)


class Kernel(Deferred):
    """A function with an explicit signature, for Numba code and, if that has numbers only, for Python.

    Floating point is exact as written; errors follow NumPy (a division by zero gives inf or nan).
    """

    def __init__(self, signature: str, function: Callable[..., Any]) -> None:
        super().__init__(functools.partial(_for_numba, signature, function))
        self._signature = signature
        self._function = function
        self.__wrapped__ = function

    @functools.cached_property
    def native(self) -> NativeFunction:
        """Compiled for calls from outside Numba code, or read from the compile cache, on first use."""
        return native_function(self._signature, self._function)

    @property
    def key(self) -> str:
        """Names it in the compile cache, on one line."""
        return _key(self._signature, self._function)

    @property
    def is_kept(self) -> bool:
        """Whether the compile cache has it."""
        folder = kernel_folder()
        return folder is not None and read(folder, self.key) is not None

    def __call__(self, *arguments: float) -> Any:
        return self.native.ctypes(*arguments)


def kernel(signature: str) -> Callable[[Function], Function]:
    """A `Kernel` with the Numba `signature`, written as a decorator."""

    def decorate(function: Function) -> Function:
        return cast(Function, Kernel(signature, function))

    return decorate


def _for_numba(signature: str, function: Callable[..., Any]) -> Any:
    """Compiled as part of what calls it; nothing of it is kept."""
    import numba

    options: dict[str, Any] = {**_OPTIONS, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return numba.njit(signature, **options)(function)


def native_function(signature: str, function: Callable[..., Any]) -> NativeFunction:
    """Compile `function` for calls through its address or from Python, or read it from the compile cache.

    The caller keeps the result alive. Kept are functions of this package's modules, and closures there over
    strings and numbers.
    """
    folder = kernel_folder() if function.__module__.startswith(_PACKAGE) else None
    key = _key(signature, function)
    code = None if folder is None else _read_or_wait(folder, key)
    if code is not None:
        address, owner = load(code)
        return NativeFunction(signature, address, owner, was_cached=True)
    # LLVM's callbacks would swallow an interrupt and leave half a library.
    with HoldInterrupts():
        import numba

        compiled: Any = numba.cfunc(signature, **_OPTIONS)(function)
    if folder is not None:
        # Numba has no public way to its object files; without this one only the cache would be lost.
        try:
            write(folder, key, ObjectCode(compiled.native_name, compiled._library._get_compiled_object()))
        except (OSError, AttributeError, RuntimeError) as error:
            _warn_once(str(error))
    return NativeFunction(signature, compiled.address, compiled, was_cached=False)


def _read_or_wait(folder: Path, key: str) -> ObjectCode | None:
    code = read(folder, key)
    if code is None and before_compiling:
        for hook in tuple(before_compiling):
            hook(key)
        code = read(folder, key)
    return code


def _key(signature: str, function: Callable[..., Any]) -> str:
    """Which function of the sources it is; the sources themselves name the folder."""
    values = [cell.cell_contents for cell in function.__closure__ or ()]
    assert all(isinstance(value, str | int) for value in values), f"{function.__qualname__} closes over more"
    return f"{signature} {function.__module__}.{function.__qualname__} {values}"


@functools.cache
def kernel_folder() -> Path | None:
    """The compile cache of these sources and this processor, made if need be.

    None, after one warning, where there is none and none can be made: then every process compiles anew.
    """
    try:
        parent = cache_folder(os.environ, sys.platform) / "kernels"
        folder = parent / _version()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:
        _warn_once(str(error))
        return None
    with contextlib.suppress(OSError):  # what can only be read is still of use
        os.utime(folder)
        prune(parent, keep=folder, before=time.time() - _KEEP_UNUSED_S)
    return folder


@functools.cache
def _warn_once(error: str) -> None:
    warnings.warn(
        f"compiled kernels can't be kept ({error}): every start compiles them anew. "
        "Set MVLLM_CACHE to a writable folder to avoid this.",
        RuntimeWarning,
        stacklevel=3,
    )


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
    """Names everything that compiled code depends on, except which function it is."""
    host = (llvmlite.binding.get_host_cpu_name(), llvmlite.binding.get_host_cpu_features().flatten())
    settings = sorted((name, value) for name, value in os.environ.items() if name.startswith("NUMBA_"))
    versions = (importlib.metadata.version("numba"), llvmlite.__version__, sys.version_info[:2])
    salt = repr((versions, host, isa.narrowed_features(), settings))
    return f"{sources_digest(kernel_sources(), salt)}-{isa.selected().name}"


def kernel_sources() -> list[Path]:
    """Every file whose code or constants end up in compiled kernels."""
    core = Path(mvllm.core.__path__[0])
    sampler = sorted((core / "sampling").glob("*.py"))
    single = [core / "request.py", core / "step.py"]
    formats = [core / "load" / "quantized.py", core / "load" / "mlx_format.py"]
    return [*sorted(Path(__file__).parent.glob("*.py")), *sampler, *single, *formats]


def sources_digest(sources: Iterable[Path], salt: str = "") -> str:
    """Short hash of the files' names and contents, in the order given."""
    digest = hashlib.sha256(salt.encode())
    for source in sources:
        content = source.read_bytes()
        digest.update(f"\0{source.name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]
