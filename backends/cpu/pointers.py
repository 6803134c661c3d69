"""Typed views of raw addresses, for code that Numba compiles.

Tables and matrices reach the kernels as int64 addresses, so that every kernel has one signature. Nothing here
checks bounds: whoever puts an address into a table has validated the shapes and keeps the owner alive.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir

from mvllm.backends.cpu.deferred import Deferred, number_type
from mvllm.backends.cpu.vector import F32, I64, VOID, Emitter, Value, emitted


def _pointer_to(element: str) -> Any:
    """A function `view(address)` for Numba code, whose result is indexed like an array of `element`."""
    return Deferred(lambda: _view(_pointer_type(element)))


def record_at(dtype: np.dtype[Any]) -> Any:
    """A function `view(address)` for Numba code, whose result is a record with the fields of `dtype`."""
    return Deferred(lambda: _view(_record_type(dtype)))


def _pointer_type(element: str) -> Any:
    from numba import types

    return types.CPointer(number_type(element))


def _record_type(dtype: np.dtype[Any]) -> Any:
    import numba

    return numba.from_dtype(dtype)


def _view(result: Any) -> Any:
    """An intrinsic that turns an address into a value of the Numba type `result`."""
    from numba.extending import intrinsic

    def view(typing: Any, address: Any) -> Any:
        def emit(context: Any, builder: Value, signature: Any, arguments: Any) -> Value:
            return builder.inttoptr(arguments[0], context.get_value_type(result))

        return result(number_type("int64")), emit

    return intrinsic(view)


f32_at = _pointer_to("float32")
f64_at = _pointer_to("float64")
i32_at = _pointer_to("int32")
i64_at = _pointer_to("int64")
i16_at = _pointer_to("int16")


def _emit_square_root(emitter: Emitter, value: Value) -> Value:
    return emitter.call("llvm.sqrt.f32", F32, value)


square_root = emitted(_emit_square_root, ["float32"], returns="float32")
"""The correctly rounded root of a float32."""


def emit_call(emitter: Emitter, function: Value, *arguments: Value) -> None:
    """Call the compiled function of int64 arguments and no result at the address `function`."""
    signature = ir.FunctionType(VOID, [I64] * len(arguments))
    emitter.builder.call(emitter.builder.inttoptr(function, signature.as_pointer()), arguments)


call_operation = emitted(emit_call, 3)
"""(function, first, second): call the compiled `void(int64, int64)` at the address `function`."""
