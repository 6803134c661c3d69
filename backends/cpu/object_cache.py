"""Compiled functions as files: machine code that LLVM's loader puts into any later process.

A file holds the key it was written for, a digest, the function's symbol and an object file. What is damaged,
or written for another key, counts as missing.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import llvmlite.binding as llvm

_DIGEST_BYTES = 32

_ERROR_HELPERS = (
    "NRT_Free",
    "numba_do_raise",
    "numba_gil_ensure",
    "numba_gil_release",
    "numba_runtime_build_excinfo_struct",
    "numba_unpickle",
)
"""Functions of Numba's that an object file refers to, for reporting exceptions."""


@dataclass(frozen=True)
class ObjectCode:
    """A relocatable object file and the symbol of the function in it that is called from outside."""

    symbol: str
    code: bytes


def read(folder: Path, key: str) -> ObjectCode | None:
    """What was written for `key`; None if there is nothing, or nothing intact."""
    try:
        content = _path(folder, key).read_bytes()
    except OSError:
        return None
    digest, body = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if hashlib.sha256(body).digest() != digest:
        return None
    written_key, symbol, code = body.split(b"\0", 2)
    return ObjectCode(symbol.decode(), code) if written_key == key.encode() else None


def write(folder: Path, key: str, function: ObjectCode) -> None:
    """Keep a function. Processes that write the same one at once, or read it meanwhile, see whole files only.

    Raises:
        OSError: the folder can't be written.
    """
    body = b"\0".join([key.encode(), function.symbol.encode(), function.code])
    descriptor, name = tempfile.mkstemp(dir=folder)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(hashlib.sha256(body).digest() + body)
        Path(name).replace(_path(folder, key))
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise


def _path(folder: Path, key: str) -> Path:
    return folder / (hashlib.sha256(key.encode()).hexdigest()[:32] + ".o")


def load(function: ObjectCode) -> tuple[int, object]:
    """The address of a function put into memory, and the owner of that memory."""
    _prepare()
    machine = llvm.Target.from_default_triple().create_target_machine()
    # An engine of its own: two object files may well use one name for different functions.
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(function.code))
    engine.finalize_object()
    return engine.get_function_address(function.symbol), engine


def _prepare() -> None:
    """Get LLVM ready to load code. Kernels raise no exceptions; without Numba, one that did would end the
    process."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    stop = ctypes.cast(ctypes.CDLL(None).abort, ctypes.c_void_p).value
    for name in _ERROR_HELPERS:
        if llvm.address_of_symbol(name) is None:
            llvm.add_symbol(name, stop)
