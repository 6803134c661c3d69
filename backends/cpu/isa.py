"""Instruction sets behind one emission interface, and the choice among them.

The kernels interleave the rows of a weight matrix: lane r of every vector belongs to row r of a block of
`lanes` rows. All that differs between instruction sets is the number of lanes and how the products
of a 32-bit word of codes are added up per lane.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import llvmlite.binding
from llvmlite import ir

from mvllm.backends.cpu.layout import GROUP, SECOND_CODE_BITS, SPLIT, WIDE, ActivationLayout
from mvllm.backends.cpu.vector import F32, I8, I16, I32, I64, Emitter, Value, constant, vector
from mvllm.core.errors import ConfigError

OVERRIDE = "MVLLM_CPU_ISA"
"""Environment variable that names an instruction set, for tests and for narrowing down a fault."""

_MAX_ACTIVATION = 127  # activations are int8 in [-127, 127]
_MOST_CODES_HELD = 6  # AVX2 registers of codes
_MOST_SPLIT_OUTPUTS = 4  # whose two sums are formed at once; measured on Zen 4
_FALSE = ir.IntType(1)(0)


@dataclass(frozen=True)
class HalfFactors:
    """Integer factors of the two halves of a group: int32[lanes], pairs of int16, by row block."""

    factor: Callable[[int, int], Value]  # (block, half): the factor of that half, twice
    zeros: Callable[[int], Value]  # zero times the factor of each half


@dataclass(frozen=True)
class Operands:
    """Codes of some row blocks and tokens over consecutive inputs of one group, for `Isa.dot`.

    Inputs come in words of 32 bits per row and token: four codes of 8 bits, or pairs of 16 bits (`records`).
    `words` are the numbers of those to take, in the order in which that is best done. `load(block, word)` is
    a vector of unsigned codes below 2**bits, or, in pairs, of signed ones, with row r in its bytes 4r to
    4r+3, its place in the schedule fixed, as `pin` does. `activations` holds each token's address of signed
    codes, and if split, GROUP bytes further, of their second bytes; `minus_sum(token)` is int32[lanes], minus
    the sum of these codes in every lane, `half_sums(token)` the same of the two halves, int16 pairs, or if
    wide of the first half alone.
    """

    load: Callable[[int, int], Value]
    blocks: int
    words: Sequence[int]
    activations: Sequence[Value]
    minus_sum: Callable[[int], Value]
    half_sums: Callable[[int], Value]
    bits: int
    zero: int  # 0 or a power of two
    halves: HalfFactors | None
    records: ActivationLayout
    pin: Callable[[Value], Value]


Dots = list[list[Value]]
"""int32[lanes] for each token and row block: `dots[token][block]`."""

Dot = Callable[[Emitter, Operands], Dots]

MoveBits = Callable[[Emitter, Value, int, int, int], Value]


@dataclass(frozen=True)
class Isa:
    """One instruction set.

    `dot(emitter, operands)` emits, for every token and row, the exact sum of (code - zero) * activation, each
    times the factor of its half where there are factors. `move_bits(emitter, bytes, source, target, width)`
    emits, for every byte of a vector, its `width` bits from `source` on, moved to `target`, and zeros in all
    others; None if there is nothing better than shift and mask. `wide` is how codes of more than 8 bits are
    best kept.
    """

    name: str
    lanes: int
    max_tokens: int  # tokens of the largest tile, panels apart
    panel_tokens: int  # tokens of a tile over a panel of quantized weights
    register: str | None  # inline-assembly constraint of a vector register, None: don't pin
    features: frozenset[str]  # LLVM feature names that the emitted code needs
    native_half: bool  # the hardware converts float16 vectors
    dot: Dot
    wide: ActivationLayout = WIDE
    move_bits: MoveBits | None = None


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


_Step = Callable[[Value, Value, Value], Value]  # (sum or None, codes, activations' word in every lane) -> sum


def _add_words(
    emitter: Emitter, operands: Operands, words: Sequence[int], sums: Sequence[Sequence[Value]], step: _Step
) -> Dots:
    """`sums` with the products of `words` added by `step`, word after word."""
    results = [list(row) for row in sums]
    for word in words:
        codes = [operands.load(block, word) for block in range(operands.blocks)]
        for row, address in zip(results, operands.activations, strict=True):
            activation = emitter.load_splat(I32, codes[0].type.count // 4, address, 4 * word)
            for block, code in enumerate(codes):
                row[block] = operands.pin(step(row[block], code, activation))
    return results


def _minus_zeros(emitter: Emitter, operands: Operands) -> Dots:
    """-zero * (sum of activations), for every output."""
    dots = []
    for token in range(len(operands.activations)):
        minus_sum = operands.minus_sum(token)
        lanes = minus_sum.type.count
        value = constant(I32, lanes, 0)
        if operands.zero:
            value = emitter.builder.shl(minus_sum, constant(I32, lanes, operands.zero.bit_length() - 1))
        dots.append([value] * operands.blocks)
    return dots


def _by_halves(dot: Dot) -> Dot:
    """`dot`, which knows no factors, for operands that may have them."""

    def scaled(emitter: Emitter, operands: Operands) -> Dots:
        factors = operands.halves
        if factors is None:
            return dot(emitter, operands)
        builder, sums = emitter.builder, []
        for half in (0, 1):
            pairs = [factors.factor(block, half) for block in range(operands.blocks)]
            values = [builder.ashr(pair, constant(I32, pair.type.count, 16)) for pair in pairs]
            dots = dot(emitter, _half(emitter, operands, half))
            sums.append([[builder.mul(*both) for both in zip(row, values, strict=True)] for row in dots])
        return _add_dots(emitter, *sums)

    return scaled


def _add_dots(emitter: Emitter, x: Dots, y: Dots) -> Dots:
    return [
        [emitter.builder.add(*both) for both in zip(*rows, strict=True)] for rows in zip(x, y, strict=True)
    ]


def _half(emitter: Emitter, operands: Operands, half: int) -> Operands:
    """The operands of one half of a group, without factors."""
    builder, num_words = emitter.builder, len(operands.words)

    def minus_sum(token: int) -> Value:
        sums = operands.half_sums(token)
        sixteen = constant(I32, sums.type.count, 16)
        if operands.records.is_wide:
            return sums if half == 0 else builder.sub(operands.minus_sum(token), sums)
        return builder.ashr(builder.shl(sums, sixteen) if half == 0 else sums, sixteen)

    words = [word for word in operands.words if 2 * word // num_words == half]
    return replace(operands, words=words, minus_sum=minus_sum, halves=None)


def _dot_avx512(emitter: Emitter, operands: Operands) -> Dots:
    if operands.records.is_split:
        return _dot_avx512_split(emitter, operands)

    def step(total: Value, codes: Value, activation: Value) -> Value:
        if operands.records.has_pairs:
            # LLVM makes two instructions of its intrinsic, for a shorter chain of dependences.
            weights = emitter.builder.bitcast(codes, total.type)
            return emitter.assembly("vpdpwssd $3, $2, $0", "=v,0,v,v", total, weights, activation)
        return _add_bytes_avx512(emitter, total, codes, activation)

    return _add_words(emitter, operands, operands.words, _minus_zeros(emitter, operands), step)


def _dot_avx512_split(emitter: Emitter, operands: Operands) -> Dots:
    if operands.blocks * len(operands.activations) <= _MOST_SPLIT_OUTPUTS:
        return _add_split_words(emitter, operands)
    # Token after token, so that two sums of every output need not be kept.
    codes = {
        (block, word): operands.load(block, word)
        for word in operands.words
        for block in range(operands.blocks)
    }
    held, dots = replace(operands, load=lambda block, word: codes[block, word]), []
    for token in range(len(operands.activations)):
        dots += _add_split_words(emitter, _of_token(held, token))
    return dots


def _of_token(operands: Operands, token: int) -> Operands:
    """The operands of one token."""

    def minus_sum(_: int) -> Value:
        return operands.minus_sum(token)

    return replace(operands, activations=[operands.activations[token]], minus_sum=minus_sum)


def _add_split_words(emitter: Emitter, operands: Operands) -> Dots:
    """As if a token were two, with the first and with the second bytes of its codes."""
    zeros = [constant(I32, 16, 0)] * operands.blocks
    starts = [start for minus in _minus_zeros(emitter, operands) for start in (zeros, minus)]
    addresses = [emitter.offset(token, part) for token in operands.activations for part in (0, GROUP)]
    both = replace(operands, activations=addresses)
    sums = _add_words(emitter, both, operands.words, starts, functools.partial(_add_bytes_avx512, emitter))
    bits = constant(I32, 16, SECOND_CODE_BITS)
    scaled = [[emitter.builder.shl(sum_, bits) for sum_ in row] for row in sums[0::2]]
    return _add_dots(emitter, scaled, sums[1::2])


def _add_bytes_avx512(emitter: Emitter, total: Value, codes: Value, activation: Value) -> Value:
    weights = emitter.builder.bitcast(codes, total.type)
    return emitter.call("llvm.x86.avx512.vpdpbusd.512", total.type, total, weights, activation)


def _move_bits_gfni(emitter: Emitter, codes: Value, source: int, target: int, width: int) -> Value:
    # Byte 7 - i of the matrix says which bits add up to bit i of the result.
    matrix = sum(1 << (source + i) << 8 * (7 - (target + i)) for i in range(width))
    quads = vector(I64, codes.type.count // 8)
    matrices = emitter.builder.bitcast(constant(I64, quads.count, matrix), codes.type)
    bits = 8 * codes.type.count
    return emitter.call(f"llvm.x86.vgf2p8affineqb.{bits}", codes.type, codes, matrices, I8(0))


def _dot_avx2(emitter: Emitter, operands: Operands) -> Dots:
    if operands.records.is_wide:
        return _by_halves(_dot_avx2_wide)(emitter, operands)
    if operands.bits == 8:
        return _dot_avx2_signed(emitter, operands)
    builder, halves, num_words = emitter.builder, operands.halves, len(operands.words)
    # A pair product is at most 2 * (2**bits - 1) * 127; as many as stay below 2**15 are added in 16 bits.
    addable = (2**15 - 1) // (2 * (2**operands.bits - 1) * _MAX_ACTIVATION)
    if halves is not None:
        dots = _minus_scaled_zeros_avx2(emitter, operands, halves)
    else:
        dots = _minus_zeros(emitter, operands)

    def multiply(pairs: Value, codes: Value, activation: Value) -> Value:
        activations = builder.bitcast(activation, vector(I8, 32))
        product = emitter.call("llvm.x86.avx2.pmadd.ub.sw", vector(I16, 16), codes, activations)
        return product if pairs is None else builder.add(pairs, product)

    def add(total: Value, pairs: Value, block: int, word: int) -> Value:
        if halves is None:
            return operands.pin(builder.add(total, _add_pairs_avx2(emitter, pairs)))
        factor = builder.bitcast(halves.factor(block, 2 * word // num_words), pairs.type)
        return operands.pin(builder.add(total, _multiply_pairs_avx2(emitter, pairs, factor)))

    def add_by_word(words: Sequence[int]) -> None:
        none = [[None] * operands.blocks for _ in operands.activations]
        for row, sums in zip(dots, _add_words(emitter, operands, words, none, multiply), strict=True):
            row[:] = [add(total, sums[block], block, words[0]) for block, total in enumerate(row)]

    def add_by_token(words: Sequence[int]) -> None:
        codes = [[operands.load(block, word) for word in words] for block in range(operands.blocks)]
        for row, address in zip(dots, operands.activations, strict=True):
            activations = [emitter.load_splat(I32, 8, address, 4 * word) for word in words]
            for block, total in enumerate(row):
                pairs = functools.reduce(
                    lambda pairs, both: multiply(pairs, *both),
                    zip(codes[block], activations, strict=True),
                    None,
                )
                row[block] = add(total, pairs, block, words[0])

    for first in range(0, num_words, addable):
        words = operands.words[first : first + addable]
        # With few codes to hold there are registers for the totals too.
        if len(words) * operands.blocks <= _MOST_CODES_HELD:
            add_by_token(words)
        else:
            add_by_word(words)
    return dots


def _minus_scaled_zeros_avx2(emitter: Emitter, operands: Operands, halves: HalfFactors) -> Dots:
    """-zero * (sum of factor * activation), for every output."""
    builder, pairs = emitter.builder, vector(I16, 16)
    dots = []
    for token in range(len(operands.activations)):
        sums = builder.bitcast(operands.half_sums(token), pairs)
        zeros = [builder.bitcast(halves.zeros(block), pairs) for block in range(operands.blocks)]
        dots.append([_multiply_pairs_avx2(emitter, sums, zero) for zero in zeros])
    return dots


def _dot_avx2_signed(emitter: Emitter, operands: Operands) -> Dots:
    """8-bit codes: unsigned products would overflow 16 bits, so the sign moves to the activation."""
    assert operands.zero in (0, 128) and operands.halves is None
    builder, bytes_ = emitter.builder, vector(I8, 32)

    def step(total: Value, codes: Value, activation: Value) -> Value:
        signed = builder.xor(codes, constant(I8, 32, 128))
        magnitude = emitter.call("llvm.abs.v32i8", bytes_, signed, _FALSE)
        activations = builder.bitcast(activation, bytes_)
        turned = emitter.call("llvm.x86.avx2.psign.b", bytes_, activations, signed)
        product = emitter.call("llvm.x86.avx2.pmadd.ub.sw", vector(I16, 16), magnitude, turned)
        return builder.add(total, _add_pairs_avx2(emitter, product))

    starts = []
    for token in range(len(operands.activations)):
        start = constant(I32, 8, 0)
        if operands.zero == 0:  # what the signs take away
            start = builder.sub(start, builder.shl(operands.minus_sum(token), constant(I32, 8, 7)))
        starts.append([start] * operands.blocks)
    return _add_words(emitter, operands, operands.words, starts, step)


def _dot_avx2_wide(emitter: Emitter, operands: Operands) -> Dots:
    builder, pairs = emitter.builder, vector(I16, 16)

    def step(total: Value, codes: Value, activation: Value) -> Value:
        weights, activations = builder.bitcast(codes, pairs), builder.bitcast(activation, pairs)
        return builder.add(total, _multiply_pairs_avx2(emitter, weights, activations))

    return _add_words(emitter, operands, operands.words, _minus_zeros(emitter, operands), step)


def _multiply_pairs_avx2(emitter: Emitter, x: Value, y: Value) -> Value:
    """int16[16] each -> int32[8], the sums of the products of pairs."""
    return emitter.call("llvm.x86.avx2.pmadd.wd", vector(I32, 8), x, y)


def _add_pairs_avx2(emitter: Emitter, pairs: Value) -> Value:
    return _multiply_pairs_avx2(emitter, pairs, constant(I16, 16, 1))


def _dot_portable(emitter: Emitter, operands: Operands) -> Dots:
    builder = emitter.builder
    bits = 16 if operands.records.has_pairs else 8

    def step(total: Value, codes: Value, activation: Value) -> Value:
        ints = activation.type
        packed = builder.bitcast(codes, ints)

        def part_of(words: Value, position: int) -> Value:
            """The `bits` bits from `position` on, with their sign."""
            top = builder.shl(words, constant(I32, ints.count, 32 - bits - position))
            return builder.ashr(top, constant(I32, ints.count, 32 - bits))

        for position in range(0, 32, bits):
            if operands.records.has_pairs:  # codes times a factor have a sign
                weight = part_of(packed, position)
            else:
                shifted = builder.lshr(packed, constant(I32, ints.count, position))
                weight = builder.and_(shifted, constant(I32, ints.count, (1 << bits) - 1))
            total = builder.add(total, builder.mul(weight, part_of(activation, position)))
        return total

    return _add_words(emitter, operands, operands.words, _minus_zeros(emitter, operands), step)


AVX512 = Isa(
    name="avx512",
    lanes=16,
    max_tokens=8,
    panel_tokens=4,
    register="v",
    features=frozenset({"avx512f", "avx512bw", "avx512vl", "avx512vnni"}),
    native_half=True,
    dot=_by_halves(_dot_avx512),
    wide=SPLIT,
)
AVX512_GFNI = replace(
    AVX512, name="avx512-gfni", features=AVX512.features | {"gfni"}, wide=WIDE, move_bits=_move_bits_gfni
)
AVX2 = Isa(
    name="avx2",
    lanes=8,
    max_tokens=6,
    panel_tokens=3,
    register="x",
    features=frozenset({"avx2", "fma", "f16c"}),
    native_half=True,
    dot=_dot_avx2,
)
PORTABLE = Isa(
    name="portable",
    lanes=8,
    max_tokens=4,
    panel_tokens=3,
    register=None,
    features=frozenset(),
    native_half=False,
    dot=_by_halves(_dot_portable),
)

ISAS = {isa.name: isa for isa in (AVX512_GFNI, AVX512, AVX2, PORTABLE)}
"""By name, best first on most processors."""


def available() -> list[Isa]:
    """The instruction sets that code compiled by Numba may use on this machine, best first."""
    features = _compiler_features()
    # On Zen 4 GFNI takes up the pipes that dot products need: those of 4 bits are 4 to 10 % faster without.
    order = (AVX512, AVX512_GFNI, AVX2, PORTABLE) if is_zen4() else ISAS.values()
    return [isa for isa in order if isa.features <= features]


def is_zen4() -> bool:
    processor: str = llvmlite.binding.get_host_cpu_name()
    return processor == "znver4"


def _compiler_features() -> frozenset[str]:
    """What Numba compiles for: the host's features unless its own settings narrow them."""
    configured = narrowed_features()
    if configured is not None:
        return frozenset(item[1:] for item in configured.split(",") if item.startswith("+"))
    host = llvmlite.binding.get_host_cpu_features()
    return frozenset(name for name, present in host.items() if present)


def narrowed_features() -> str | None:
    """Numba's setting of the CPU's features, None if it has none. Does not import Numba."""
    numba = sys.modules.get("numba")
    if numba is None:
        return os.environ.get("NUMBA_CPU_FEATURES")
    features: str | None = numba.config.CPU_FEATURES
    return features


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
