"""Instruction sets behind one emission interface, and the choice among them.

The kernels interleave the rows of a weight matrix: lane r of every vector belongs to row r of a block of
`lanes` rows. All that differs between instruction sets is the number of lanes and how four 8-bit products per
lane are added up.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import llvmlite.binding
import numba
from llvmlite import ir

from mvllm.backends.cpu.vector import F32, I8, I16, I32, Emitter, Value, constant, vector
from mvllm.core.errors import ConfigError

OVERRIDE = "MVLLM_CPU_ISA"
"""Environment variable that names an instruction set, for tests and for narrowing down a fault."""

_MAX_ACTIVATION = 127  # activations are int8 in [-127, 127]
_FALSE = ir.IntType(1)(0)

# Prefetch distances, bytes, measured on x86. A tile of many tokens works long enough on its weights for
# memory to answer from further away; the hardware's own prefetching would halve its speed at worst.
_PREFETCH_FEW, _PREFETCH_MANY = 256, 2560
_FEW_TOKENS = 3


def prefetch_distance(tokens: int) -> int:
    """How far ahead of the weights in use a tile of `tokens` tokens prefetches, bytes."""
    return _PREFETCH_FEW if tokens <= _FEW_TOKENS else _PREFETCH_MANY


@dataclass(frozen=True)
class Isa:
    """One instruction set.

    `dot(emitter, codes, activation, bits, zero, minus_sum)` emits int32[lanes] holding, per row, the exact
    sum of (code - zero) * activation over 4 * len(codes) consecutive inputs. `codes[j]` is uint8[4 * lanes],
    bytes 4r to 4r+3 of it the codes of row r, below 2**bits; `activation` is the address of the int8
    activations; `minus_sum` is int32[lanes], minus the sum of these activations in every lane.
    """

    name: str
    lanes: int
    max_tokens: int  # tokens of the largest tile
    register: str | None  # inline-assembly constraint of a vector register, None: don't pin
    features: frozenset[str]  # LLVM feature names that the emitted code needs
    native_half: bool  # the hardware converts float16 vectors
    dot: Callable[[Emitter, Sequence[Value], Value, int, int, Value], Value]


def half_to_float(emitter: Emitter, isa: Isa, half: Value) -> Value:
    """float16[n] -> float32[n], exact for finite values."""
    builder, count = emitter.builder, half.type.count
    floats, ints = vector(F32, count), vector(I32, count)
    if isa.native_half:
        return builder.fpext(half, floats)
    bits = builder.zext(builder.bitcast(half, vector(I16, count)), ints)
    magnitude = builder.shl(builder.and_(bits, constant(I32, count, 0x7FFF)), constant(I32, count, 13))
    sign = builder.shl(builder.and_(bits, constant(I32, count, 0x8000)), constant(I32, count, 16))
    # Moved over, the exponent is 112 too small.
    scaled = builder.fmul(builder.bitcast(magnitude, floats), constant(F32, count, 2.0**112))
    return builder.bitcast(builder.or_(builder.bitcast(scaled, ints), sign), floats)


def _load_quad(emitter: Emitter, activation: Value, quad: int, lanes: int) -> Value:
    """int32[lanes], each holding the four activation bytes number `quad`."""
    return emitter.load_splat(I32, lanes, activation, 4 * quad)


def _minus_zeros(emitter: Emitter, zero: int, minus_sum: Value) -> Value:
    lanes = minus_sum.type.count
    if zero == 0:
        return constant(I32, lanes, 0)
    return emitter.builder.shl(minus_sum, constant(I32, lanes, zero.bit_length() - 1))


def _dot_avx512(
    emitter: Emitter, codes: Sequence[Value], activation: Value, bits: int, zero: int, minus_sum: Value
) -> Value:
    total = _minus_zeros(emitter, zero, minus_sum)
    for quad, code in enumerate(codes):
        weights = emitter.builder.bitcast(code, vector(I32, 16))
        activations = _load_quad(emitter, activation, quad, 16)
        total = emitter.call("llvm.x86.avx512.vpdpbusd.512", vector(I32, 16), total, weights, activations)
    return total


def _dot_avx2(
    emitter: Emitter, codes: Sequence[Value], activation: Value, bits: int, zero: int, minus_sum: Value
) -> Value:
    if bits == 8:
        return _dot_avx2_signed(emitter, codes, activation, zero)
    builder = emitter.builder
    # A pair product is at most 2 * (2**bits - 1) * 127; as many as stay below 2**15 are added in 16 bits.
    addable = (2**15 - 1) // (2 * (2**bits - 1) * _MAX_ACTIVATION)
    total = _minus_zeros(emitter, zero, minus_sum)
    for start in range(0, len(codes), addable):
        pairs = None
        for quad in range(start, min(start + addable, len(codes))):
            activations = builder.bitcast(_load_quad(emitter, activation, quad, 8), vector(I8, 32))
            product = emitter.call("llvm.x86.avx2.pmadd.ub.sw", vector(I16, 16), codes[quad], activations)
            pairs = product if pairs is None else builder.add(pairs, product)
        total = builder.add(total, _add_pairs_avx2(emitter, pairs))
    return total


def _dot_avx2_signed(emitter: Emitter, codes: Sequence[Value], activation: Value, zero: int) -> Value:
    """8-bit codes: unsigned products would overflow 16 bits, so the sign moves to the activation."""
    assert zero == 128
    builder, bytes_ = emitter.builder, vector(I8, 32)
    total = constant(I32, 8, 0)
    for quad, code in enumerate(codes):
        signed = builder.xor(code, constant(I8, 32, 128))
        magnitude = emitter.call("llvm.abs.v32i8", bytes_, signed, _FALSE)
        activations = builder.bitcast(_load_quad(emitter, activation, quad, 8), bytes_)
        turned = emitter.call("llvm.x86.avx2.psign.b", bytes_, activations, signed)
        product = emitter.call("llvm.x86.avx2.pmadd.ub.sw", vector(I16, 16), magnitude, turned)
        total = builder.add(total, _add_pairs_avx2(emitter, product))
    return total


def _add_pairs_avx2(emitter: Emitter, pairs: Value) -> Value:
    return emitter.call("llvm.x86.avx2.pmadd.wd", vector(I32, 8), pairs, constant(I16, 16, 1))


def _dot_portable(
    emitter: Emitter, codes: Sequence[Value], activation: Value, bits: int, zero: int, minus_sum: Value
) -> Value:
    builder = emitter.builder
    lanes = minus_sum.type.count
    ints = vector(I32, lanes)
    total = _minus_zeros(emitter, zero, minus_sum)
    for quad, code in enumerate(codes):
        packed = builder.bitcast(code, ints)
        for byte in range(4):
            shifted = builder.lshr(packed, constant(I32, lanes, 8 * byte))
            weight = builder.and_(shifted, constant(I32, lanes, 255))
            value = builder.sext(emitter.load(I8, activation, 4 * quad + byte), I32)
            total = builder.add(total, builder.mul(weight, emitter.splat(value, lanes)))
    return total


AVX512 = Isa(
    name="avx512",
    lanes=16,
    max_tokens=8,
    register="v",
    features=frozenset({"avx512f", "avx512bw", "avx512vl", "avx512vnni"}),
    native_half=True,
    dot=_dot_avx512,
)
AVX2 = Isa(
    name="avx2",
    lanes=8,
    max_tokens=8,
    register="x",
    features=frozenset({"avx2", "fma", "f16c"}),
    native_half=True,
    dot=_dot_avx2,
)
PORTABLE = Isa(
    name="portable",
    lanes=8,
    max_tokens=4,
    register=None,
    features=frozenset(),
    native_half=False,
    dot=_dot_portable,
)

ISAS = {isa.name: isa for isa in (AVX512, AVX2, PORTABLE)}
"""By name, best first."""


def available() -> list[Isa]:
    """The instruction sets that code compiled by Numba may use on this machine, best first."""
    features = _compiler_features()
    return [isa for isa in ISAS.values() if isa.features <= features]


def _compiler_features() -> frozenset[str]:
    """What Numba compiles for: the host's features unless its own settings narrow them."""
    settings: Any = numba.config
    configured = settings.CPU_FEATURES
    if configured is not None:
        return frozenset(item[1:] for item in configured.split(",") if item.startswith("+"))
    host = llvmlite.binding.get_host_cpu_features()
    return frozenset(name for name, present in host.items() if present)


@functools.cache
def selected() -> Isa:
    """The instruction set of this process: the best available one, or the one named by `MVLLM_CPU_ISA`.

    Raises:
        ConfigError: the variable names an unknown or unavailable instruction set.
    """
    usable = available()
    name = os.environ.get(OVERRIDE)
    if not name:
        return usable[0]
    for isa in usable:
        if isa.name == name:
            return isa
    names = ", ".join(isa.name for isa in usable)
    raise ConfigError(f"{OVERRIDE} is {name!r}, but this machine offers: {names}")
