"""Moving the codes of quantized weights into their packed planes (see `layout`), compiled.

In NumPy it takes three to ten times as long, and would be most of the time that loading a model takes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from mvllm.backends.cpu.jit import native_function
from mvllm.backends.cpu.layout import GROUP, QUADS, QUANTIZED, QuantLayout
from mvllm.backends.cpu.vector import I32, Emitter, Value, constant, emitted, vector

_SIGNATURE = "void(int64, int64, int64, int64, int64, int64)"


@functools.cache
def code_packer(format_name: str, lanes: int) -> Any:
    """A compiled `pack(codes, row_bytes, planes, block_stride, superblocks, num_blocks)` for a format.

    `codes` is the address of uint8[num_blocks * lanes, row_bytes], `planes` that of the first group's planes,
    in row blocks `block_stride` bytes apart. Compiled on first use; releases the GIL.
    """
    layout = QUANTIZED[format_name]
    function = _make_packer(
        format_name, lanes, layout.superblock, layout.group_bytes(lanes), layout.superblock_bytes(lanes)
    )
    return native_function(_SIGNATURE, function).ctypes


def _make_packer(
    format_name: str, lanes: int, superblock: int, group_bytes: int, superblock_bytes: int
) -> Callable[..., Any]:
    def pack(codes, row_bytes, planes, block_stride, superblocks, num_blocks):  # type: ignore[no-untyped-def]
        for row in range(num_blocks * lanes):
            block = row // lanes
            source = codes + row * row_bytes
            lane = planes + block * block_stride + 4 * (row - block * lanes)
            for index in range(superblocks):
                for group in range(superblock):
                    target = lane + index * superblock_bytes + group * group_bytes
                    pack_group(format_name, source, target, 4 * lanes)
                    source += GROUP

    return pack


def _emit_pack(emitter: Emitter, format_name: str, codes: Value, target: Value, plane_bytes: Value) -> None:
    """One row's group: uint8[32] at `codes` -> four bytes at `target` in each plane."""
    quads = emitter.load(vector(I32, QUADS), codes)
    for plane, value in enumerate(_planes(emitter, QUANTIZED[format_name], quads)):
        emitter.store(value, emitter.offset(target, emitter.times(plane_bytes, plane)))


def _planes(emitter: Emitter, layout: QuantLayout, quads: Value) -> list[Value]:
    """int32[8] of four codes each -> the int32 of each plane."""
    builder = emitter.builder
    if layout.bits == 8:
        return [builder.extract_element(quads, I32(quad)) for quad in range(QUADS)]
    half = QUADS // 2
    low = builder.and_(quads, constant(I32, QUADS, 0x0F0F0F0F))
    upper = builder.shl(emitter.shuffle(low, range(half, QUADS)), constant(I32, half, 4))
    nibbles = builder.or_(emitter.shuffle(low, range(half)), upper)
    planes = [builder.extract_element(nibbles, I32(plane)) for plane in range(half)]
    if layout.high_bits == 0:
        return planes
    bits = layout.high_bits
    mask = constant(I32, QUADS, 0x01010101 * ((1 << bits) - 1))
    high = builder.and_(builder.lshr(quads, constant(I32, QUADS, 4)), mask)
    per_plane = 8 // bits
    positions = vector(I32, QUADS)([bits * (quad % per_plane) for quad in range(QUADS)])
    placed = builder.shl(high, positions)
    for plane in range(bits):
        part = emitter.shuffle(placed, range(plane * per_plane, (plane + 1) * per_plane))
        planes.append(emitter.reduce(builder.or_, part))
    return planes


pack_group = emitted(_emit_pack, 3, num_names=1)
"""`_emit_pack` as (format name, codes, target, plane_bytes)."""
