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

from mvllm.backends.cpu.vector import F32, Emitter, Value


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


@intrinsic
def square_root(typing: Any, value: types.Type) -> Any:
    """The correctly rounded root of a float32."""

    def emit(context: Any, builder: Value, signature: Any, arguments: Any) -> Value:
        return Emitter(builder).call("llvm.sqrt.f32", F32, arguments[0])

    return types.float32(types.float32), emit


@intrinsic
def call_operation(typing: Any, function: types.Type, first: types.Type, second: types.Type) -> Any:
    """Call the compiled `void(int64, int64)` at the address `function`."""

    def emit(context: Any, builder: Value, signature: Any, arguments: Any) -> Value:
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 2)
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), list(arguments[1:]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit
