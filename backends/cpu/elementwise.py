"""Kernels for everything between the products: norms, rotary embedding, gates, sums.

Loops over plain addresses without a sum are vectorised by the compiler, which changes no bit, because each
element is computed on its own and nothing may be contracted or reordered. Sums have their order written down.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mvllm.backends.cpu.functions import gelu_tanh, silu, soft_cap
from mvllm.backends.cpu.isa import selected
from mvllm.backends.cpu.jit import kernel
from mvllm.backends.cpu.pointers import f32_at, square_root
from mvllm.backends.cpu.tables import Epilogue
from mvllm.backends.cpu.vector import F32, Emitter, Value, constant, emitted, vector

SUM_LANES = 16
"""Partial sums of a reduction, on every instruction set: partial sum i takes the elements i, i + 16, ..."""

_LANES = selected().lanes
_SILU, _SOFT_CAP = int(Epilogue.SILU), int(Epilogue.SOFT_CAP)


def _emit_sum_of_squares(emitter: Emitter, x: Value, vectors: Value) -> Value:
    """Sum over `vectors` runs of SUM_LANES values."""

    def add(index: Value, sums: list[Value]) -> list[Value]:
        values = emitter.load(vector(F32, SUM_LANES), x, emitter.times(index, 4 * SUM_LANES))
        return [emitter.fma(values, values, sums[0])]

    (sums,) = emitter.loop(vectors, [constant(F32, SUM_LANES, 0.0)], add)
    return emitter.reduce(emitter.builder.fadd, sums)


_sum_of_squares = emitted(_emit_sum_of_squares, 2, returns="float32")


@kernel("void(int64, int64, float32, int64, int64)")
def rms_norm(x: Any, gain: Any, eps: Any, out: Any, count: Any) -> Any:
    """out = x / sqrt(mean(x**2) + eps) * gain over `count` values; `out` may be `x`."""
    values, gains, results = f32_at(x), f32_at(gain), f32_at(out)
    total = _sum_of_squares(x, count // SUM_LANES)
    for i in range(count // SUM_LANES * SUM_LANES, count):
        total += values[i] * values[i]
    factor = np.float32(1.0) / square_root(total / np.float32(count) + eps)
    for i in range(count):
        results[i] = values[i] * factor * gains[i]


@kernel("void(int64, int64, int64, int64, int64)")
def rotate(x: Any, cos: Any, sin: Any, out: Any, half: Any) -> Any:
    """Rotate the pairs (i, i + half) of one head by the angles of its position; `out` may be `x`."""
    low, high = f32_at(x), f32_at(x + 4 * half)
    out_low, out_high = f32_at(out), f32_at(out + 4 * half)
    cosines, sines = f32_at(cos), f32_at(sin)
    for i in range(half):
        a, b = low[i], high[i]
        out_low[i] = a * cosines[i] - b * sines[i]
        out_high[i] = b * cosines[i] + a * sines[i]


@kernel("void(int64, int64, int64, int64)")
def add(x: Any, y: Any, out: Any, count: Any) -> Any:
    """out = x + y; `out` may be either."""
    left, right, results = f32_at(x), f32_at(y), f32_at(out)
    for i in range(count):
        results[i] = left[i] + right[i]


@kernel("void(int64, float32, int64, int64)")
def scale(x: Any, factor: Any, out: Any, count: Any) -> Any:
    """out = x * factor; `out` may be `x`."""
    values, results = f32_at(x), f32_at(out)
    for i in range(count):
        results[i] = values[i] * factor


@kernel("void(int64, int64, int64)")
def copy(x: Any, out: Any, count: Any) -> Any:
    """out = x."""
    values, results = f32_at(x), f32_at(out)
    for i in range(count):
        results[i] = values[i]


def _gate_with(activation: Callable[[Emitter, Value], Value]) -> Any:
    """A function (gates, ups, out, vectors) for Numba code: out = activation(gates) * ups."""

    def emit(emitter: Emitter, gates: Value, ups: Value, out: Value, vectors: Value) -> None:
        def body(index: Value, carried: list[Value]) -> list[Value]:
            offset = emitter.times(index, 4 * _LANES)
            gate, up = (emitter.load(vector(F32, _LANES), address, offset) for address in (gates, ups))
            emitter.store(emitter.builder.fmul(activation(emitter, gate), up), out, offset)
            return []

        emitter.loop(vectors, [], body)

    return emitted(emit, 4)


_gate_silu = _gate_with(silu)
_gate_gelu_tanh = _gate_with(gelu_tanh)


def _emit_soft_cap(emitter: Emitter, x: Value, cap: Value, out: Value, vectors: Value) -> None:
    caps = emitter.splat(cap, _LANES)

    def body(index: Value, carried: list[Value]) -> list[Value]:
        offset = emitter.times(index, 4 * _LANES)
        values = emitter.load(vector(F32, _LANES), x, offset)
        emitter.store(soft_cap(emitter, values, caps), out, offset)
        return []

    emitter.loop(vectors, [], body)


_soft_cap = emitted(_emit_soft_cap, ["int64", "float32", "int64", "int64"])


@kernel("void(int64, int64, int64, int64, int64)")
def gate(activation: Any, gates: Any, ups: Any, out: Any, count: Any) -> Any:
    """out = activation(gates) * ups. Works on whole vectors: rows have room for `count` rounded up to 16."""
    vectors = (count + _LANES - 1) // _LANES
    if activation == _SILU:
        _gate_silu(gates, ups, out, vectors)
    else:
        _gate_gelu_tanh(gates, ups, out, vectors)


@kernel("void(int64, float32, int64, int64)")
def cap_softly(x: Any, cap: Any, out: Any, count: Any) -> Any:
    """out = cap * tanh(x / cap). Works on whole vectors, like `gate`."""
    _soft_cap(x, cap, out, (count + _LANES - 1) // _LANES)
