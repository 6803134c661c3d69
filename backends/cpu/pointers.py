"""Typed views of raw addresses, for code that Numba compiles.

Tables and matrices reach the kernels as int64 addresses, so that every kernel has one signature. Nothing here
checks bounds: whoever puts an address into a table has validated the shapes and keeps the owner alive.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from mvllm.backends.cpu.vector import F32, I64, VOID, Emitter, Value, emitted


def _pointer_to(element: types.Type) -> Any:
    """An intrinsic `view(address)` whose result is indexed like an array of `element`."""

    def view(typing: Any, address: types.Type) -> Any:
        def emit(context: Any, builder: Value, signature: Any, arguments: Any) -> Value:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(element)(types.int64), emit

    return intrinsic(view)


def record_at(dtype: np.dtype[Any]) -> Any:
    """An intrinsic `view(address)` whose result is a record with the fields of `dtype`, read and written."""
    record = numba.from_dtype(dtype)

    def view(typing: Any, address: types.Type) -> Any:
        def emit(context: Any, builder: Value, signature: Any, arguments: Any) -> Value:
            return builder.inttoptr(arguments[0], context.get_value_type(record))

        return record(types.int64), emit

    return intrinsic(view)


f32_at = _pointer_to(types.float32)
i32_at = _pointer_to(types.int32)
i64_at = _pointer_to(types.int64)
i16_at = _pointer_to(types.int16)


def _emit_square_root(emitter: Emitter, value: Value) -> Value:
    return emitter.call("llvm.sqrt.f32", F32, value)


square_root = emitted(_emit_square_root, [types.float32], returns=types.float32)
"""The correctly rounded root of a float32."""


def emit_call(emitter: Emitter, function: Value, *arguments: Value) -> None:
    """Call the compiled function of int64 arguments and no result at the address `function`."""
    signature = ir.FunctionType(VOID, [I64] * len(arguments))
    emitter.builder.call(emitter.builder.inttoptr(function, signature.as_pointer()), arguments)


call_operation = emitted(emit_call, 3)
"""(function, first, second): call the compiled `void(int64, int64)` at the address `function`."""
