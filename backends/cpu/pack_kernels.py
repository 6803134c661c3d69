"""Moving weights from a file's rows into row blocks (see `layout`), compiled.

The factors and codes of the file's blocks are those that `mvllm.core.load.quantized` unpacks; here they go
straight to their places.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from mvllm.backends.cpu.isa import ISAS, Isa
from mvllm.backends.cpu.jit import NativeFunction, native_function
from mvllm.backends.cpu.layout import CODE_PARTS, DENSE, GROUP, QUADS, QUANTIZED, QuantLayout
from mvllm.backends.cpu.pointers import i64_at
from mvllm.backends.cpu.vector import I1, I8, I16, I32, Emitter, Value, constant, emitted, vector
from mvllm.core.load.quantized import QUANT_FORMATS

PACKER_SIGNATURE = "void(int64, int64, int64, int64, int64)"
_BYTES = vector(I8, GROUP)
_SIGN_BIT = 0x8000  # of a float16


@functools.cache
def row_packer(format_name: str, isa: Isa) -> NativeFunction:
    """A compiled `pack(rows, num_blocks, target, block_stride, units)` for a dense or a GGUF format.

    `rows` is the address of int64[num_blocks * lanes], the addresses of the rows in the file, 0 for a row
    that stays as it is. `target` is the first row block, the next ones `block_stride` bytes apart. `units` is
    the length of a row: superblocks, or values if the format is dense.
    """
    if format_name in DENSE:
        function = _make_dense_packer(str(DENSE[format_name].value_bytes), isa.lanes)
    else:
        layout, file = QUANTIZED[format_name], QUANT_FORMATS[format_name]
        file_bytes = GROUP * layout.superblock // file.block_size * file.block_bytes
        function = _make_packer(
            format_name, isa.name, isa.lanes, file_bytes, layout.superblock_bytes(isa.lanes)
        )
    return native_function(PACKER_SIGNATURE, function)


def _make_packer(
    format_name: str, isa_name: str, lanes: int, file_bytes: int, superblock_bytes: int
) -> Callable[..., Any]:
    def pack(rows, num_blocks, target, block_stride, units):  # type: ignore[no-untyped-def]
        for block in range(num_blocks):
            for unit in range(units):
                place = target + block * block_stride + unit * superblock_bytes
                for lane in range(lanes):
                    row = i64_at(rows)[block * lanes + lane]
                    if row != 0:
                        _pack_superblock(format_name, isa_name, row + unit * file_bytes, place, lane)

    return pack


def _make_dense_packer(value_bytes: str, lanes: int) -> Callable[..., Any]:
    size = int(value_bytes)

    def pack_dense(rows, num_blocks, target, block_stride, units):  # type: ignore[no-untyped-def]
        for block in range(num_blocks):
            for lane in range(lanes):
                row = i64_at(rows)[block * lanes + lane]
                if row != 0:
                    place = target + block * block_stride + lane * size
                    for unit in range(units):
                        _move_value(value_bytes, row + unit * size, place + unit * lanes * size)

    return pack_dense


def _emit_move_value(emitter: Emitter, value_bytes: str, source: Value, target: Value) -> None:
    kind = {"2": I16, "4": I32}[value_bytes]
    emitter.store(emitter.load(kind, source), target)


def _emit_pack_superblock(
    emitter: Emitter, format_name: str, isa_name: str, source: Value, target: Value, lane: Value
) -> None:
    """One row's superblock of the file at `source` -> its lane of the packed superblock at `target`."""
    layout, lanes = QUANTIZED[format_name], ISAS[isa_name].lanes
    start = layout.header_bytes(lanes)
    groups = [start + group * layout.group_bytes(lanes) for group in range(layout.superblock)]
    _FACTORS[format_name](emitter, layout, lanes, source, target, lane, groups)
    words = emitter.offset(target, emitter.times(lane, 4))
    for group, place in enumerate(groups):
        quads = emitter.builder.bitcast(_CODES[format_name](emitter, source, group), vector(I32, QUADS))
        for plane, value in enumerate(emit_planes(emitter, layout, quads)):
            emitter.store(value, words, place + layout.codes_offset(lanes) + plane * 4 * lanes)


# Codes of group `group` of a superblock of the file at `source`: uint8[32].


def _nibbles(emitter: Emitter, packed: Value, upper: bool) -> Value:
    count = packed.type.count
    if upper:
        return emitter.builder.lshr(packed, constant(I8, count, 4))
    return emitter.builder.and_(packed, constant(I8, count, 15))


def _codes_of_pairs(emitter: Emitter, packed: Value) -> Value:
    """uint8[16]: low nibbles are the first 16 codes, high nibbles the others."""
    return emitter.join(_nibbles(emitter, packed, upper=False), _nibbles(emitter, packed, upper=True))


def _with_high_bits(emitter: Emitter, low: Value, high: Value) -> Value:
    return emitter.builder.or_(low, emitter.builder.shl(high, constant(I8, GROUP, 4)))


def _codes_q4(emitter: Emitter, source: Value, group: int, pairs_at: int) -> Value:
    return _codes_of_pairs(emitter, emitter.load(vector(I8, GROUP // 2), source, pairs_at))


def _codes_q5(emitter: Emitter, source: Value, group: int, pairs_at: int) -> Value:
    """Bit i of the word before the nibbles is the fifth bit of code i."""
    bits = emitter.builder.bitcast(emitter.load(I32, source, pairs_at - 4), vector(I1, GROUP))
    high = emitter.builder.zext(bits, _BYTES)
    return _with_high_bits(emitter, _codes_q4(emitter, source, group, pairs_at), high)


def _codes_q8(emitter: Emitter, source: Value, group: int) -> Value:
    return emitter.builder.xor(emitter.load(_BYTES, source, 2), constant(I8, GROUP, 128))


def _codes_q4_k(emitter: Emitter, source: Value, group: int, pairs_at: int) -> Value:
    packed = emitter.load(_BYTES, source, pairs_at + GROUP * (group // 2))
    return _nibbles(emitter, packed, upper=group % 2 == 1)


def _codes_q5_k(emitter: Emitter, source: Value, group: int, pairs_at: int) -> Value:
    builder = emitter.builder
    bits = builder.lshr(emitter.load(_BYTES, source, pairs_at - GROUP), constant(I8, GROUP, group))
    high = builder.and_(bits, constant(I8, GROUP, 1))
    return _with_high_bits(emitter, _codes_q4_k(emitter, source, group, pairs_at), high)


def _codes_q6_k(emitter: Emitter, source: Value, group: int) -> Value:
    builder = emitter.builder
    half, part = divmod(group, 4)
    packed = emitter.load(_BYTES, source, 64 * half + GROUP * (part % 2))
    pairs = emitter.load(_BYTES, source, 128 + GROUP * half)
    high = builder.and_(builder.lshr(pairs, constant(I8, GROUP, 2 * part)), constant(I8, GROUP, 3))
    return _with_high_bits(emitter, _nibbles(emitter, packed, upper=part >= 2), high)


_CODES: dict[str, Callable[[Emitter, Value, int], Value]] = {
    "Q4_0": functools.partial(_codes_q4, pairs_at=2),
    "Q4_1": functools.partial(_codes_q4, pairs_at=4),
    "Q5_0": functools.partial(_codes_q5, pairs_at=6),
    "Q5_1": functools.partial(_codes_q5, pairs_at=8),
    "Q8_0": _codes_q8,
    "Q4_K": functools.partial(_codes_q4_k, pairs_at=16),
    "Q5_K": functools.partial(_codes_q5_k, pairs_at=48),
    "Q6_K": _codes_q6_k,
}

# Factors of a superblock; `groups` are the offsets of its groups.


def _factors_simple(
    emitter: Emitter,
    layout: QuantLayout,
    lanes: int,
    source: Value,
    target: Value,
    lane: Value,
    groups: list[int],
) -> None:
    """float16 scale, then float16 bias if there is one."""
    [group] = groups
    halves = emitter.offset(target, emitter.times(lane, 2))
    emitter.store(emitter.load(I16, source), halves, group)
    if layout.has_bias:
        emitter.store(emitter.load(I16, source, 2), halves, group + layout.bias_offset(lanes))


def _factors_q45_k(
    emitter: Emitter,
    layout: QuantLayout,
    lanes: int,
    source: Value,
    target: Value,
    lane: Value,
    groups: list[int],
) -> None:
    """float16 d and dmin, then six-bit scales and mins of the groups (see `quantized`); a bias is minus a
    min."""
    builder = emitter.builder
    halves, bytes_ = emitter.offset(target, emitter.times(lane, 2)), emitter.offset(target, lane)
    emitter.store(emitter.load(I16, source), halves)
    emitter.store(builder.xor(emitter.load(I16, source, 2), I16(_SIGN_BIT)), halves, 2 * lanes)

    def byte(index: int) -> Value:
        return emitter.load(I8, source, 4 + index)

    def top_bits(index: int) -> Value:
        return builder.shl(builder.lshr(byte(index), I8(6)), I8(4))

    for group, place in enumerate(groups):
        if group < 4:
            scale, minimum = builder.and_(byte(group), I8(63)), builder.and_(byte(group + 4), I8(63))
        else:
            scale = builder.or_(builder.and_(byte(group + 4), I8(15)), top_bits(group - 4))
            minimum = builder.or_(builder.lshr(byte(group + 4), I8(4)), top_bits(group))
        emitter.store(scale, bytes_, place)
        emitter.store(minimum, bytes_, place + layout.bias_offset(lanes))


def _factors_q6_k(
    emitter: Emitter,
    layout: QuantLayout,
    lanes: int,
    source: Value,
    target: Value,
    lane: Value,
    groups: list[int],
) -> None:
    """int8 scales of groups of 16 behind the codes, then float16 d."""
    halves, bytes_ = emitter.offset(target, emitter.times(lane, 2)), emitter.offset(target, lane)
    emitter.store(emitter.load(I16, source, 208), halves)
    for group, place in enumerate(groups):
        for index in range(layout.scales):
            scale = emitter.load(I8, source, 192 + layout.scales * group + index)
            emitter.store(scale, bytes_, place + index * lanes)


_FACTORS: dict[str, Callable[[Emitter, QuantLayout, int, Value, Value, Value, list[int]], None]] = {
    **dict.fromkeys(("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"), _factors_simple),
    **dict.fromkeys(("Q4_K", "Q5_K"), _factors_q45_k),
    "Q6_K": _factors_q6_k,
}


def emit_planes(emitter: Emitter, layout: QuantLayout, quads: Value) -> list[Value]:
    """int32[8] of four codes each -> the int32 of each plane."""
    builder = emitter.builder
    planes = [I32(0)] * layout.bits
    for number, parts in enumerate(CODE_PARTS[layout.bits]):
        quad = builder.extract_element(quads, I32(number))
        for part in parts:
            # No bit leaves its byte: what is shifted was masked for the place it goes to.
            bits = builder.lshr(quad, I32(part.code_bit))
            bits = builder.and_(bits, I32(0x01010101 * ((1 << part.width) - 1)))
            planes[part.plane] = builder.or_(planes[part.plane], builder.shl(bits, I32(part.plane_bit)))
    return planes


_move_value = emitted(_emit_move_value, 2, num_names=1)
_pack_superblock = emitted(_emit_pack_superblock, 3, num_names=2)
