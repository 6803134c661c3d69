"""Moving MLX-quantized weights into row blocks (see `layout`), compiled: codes, scales and biases lie apart.

The codes are those that `mvllm.core.load.mlx_format` unpacks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from mvllm.backends.cpu.isa import ISAS, Isa
from mvllm.backends.cpu.jit import NativeFunction, native_function
from mvllm.backends.cpu.layout import GROUP, QUADS, QUANTIZED, packed_format
from mvllm.backends.cpu.pack_kernels import PACKER_SIGNATURE, emit_planes
from mvllm.backends.cpu.pointers import i64_at
from mvllm.backends.cpu.vector import I8, I16, I32, Emitter, Value, constant, emitted, vector
from mvllm.core.load.mlx_format import MLX_FORMATS


@functools.cache
def affine_packer(format_name: str, isa: Isa) -> NativeFunction:
    """A compiled `pack(rows, num_blocks, target, block_stride, units)` for a format of MLX's.

    `rows` is the address of int64[num_blocks * lanes, 3], the addresses of each row's codes, scales and
    biases, 0 for a row that stays as it is; `units` is the number of groups of 32. Otherwise as
    `pack_kernels.row_packer`.
    """
    packed_name, file = packed_format(format_name), MLX_FORMATS[format_name]
    assert packed_name is not None, format_name
    layout, repeats = QUANTIZED[packed_name], file.group_size // GROUP
    function = _make_packer(
        packed_name,
        str(file.bits),
        isa.name,
        isa.lanes,
        repeats,
        layout.factor_bytes,
        layout.group_bytes(isa.lanes),
    )
    return native_function(PACKER_SIGNATURE, function)


def _make_packer(
    packed_name: str,
    bits: str,
    isa_name: str,
    lanes: int,
    repeats: int,
    factor_bytes: int,
    group_bytes: int,
) -> Callable[..., Any]:
    code_bytes = GROUP * int(bits) // 8

    def pack_affine(rows, num_blocks, target, block_stride, units):  # type: ignore[no-untyped-def]
        for block in range(num_blocks):
            for lane in range(lanes):
                row = 3 * (block * lanes + lane)
                codes, scales, biases = i64_at(rows)[row], i64_at(rows)[row + 1], i64_at(rows)[row + 2]
                if codes != 0:
                    for unit in range(units):
                        factor = unit // repeats * factor_bytes
                        _pack_group(
                            packed_name,
                            bits,
                            isa_name,
                            codes + unit * code_bytes,
                            scales + factor,
                            biases + factor,
                            target + block * block_stride + unit * group_bytes,
                            lane,
                        )

    return pack_affine


def _emit_pack_group(
    emitter: Emitter,
    packed_name: str,
    bits: str,
    isa_name: str,
    codes: Value,
    scale: Value,
    bias: Value,
    target: Value,
    lane: Value,
) -> None:
    """32 codes, `bits` bits each, and their factors -> their lane of the packed group at `target`."""
    layout, lanes = QUANTIZED[packed_name], ISAS[isa_name].lanes
    factor = {2: I16, 4: I32}[layout.factor_bytes]
    factors = emitter.offset(target, emitter.times(lane, layout.factor_bytes))
    emitter.store(emitter.load(factor, scale), factors)
    emitter.store(emitter.load(factor, bias), factors, layout.bias_offset(lanes))
    quads = emitter.builder.bitcast(_unpacked(emitter, codes, int(bits)), vector(I32, QUADS))
    words = emitter.offset(target, emitter.times(lane, 4))
    for plane, value in enumerate(emit_planes(emitter, layout, quads)):
        emitter.store(value, words, layout.codes_offset(lanes) + plane * 4 * lanes)


def _unpacked(emitter: Emitter, source: Value, bits: int) -> Value:
    """32 codes that follow each other from the lowest bit of the first byte on: uint8[32]."""
    builder, pairs = emitter.builder, vector(I16, GROUP)
    count = GROUP * bits // 8
    packed = emitter.load(vector(I8, count), source)
    places = [divmod(index * bits, 8) for index in range(GROUP)]
    low = builder.zext(emitter.shuffle(packed, [byte for byte, _ in places]), pairs)
    # The last code ends with the last byte: what stands in for the next one is masked away.
    high = builder.zext(emitter.shuffle(packed, [min(byte + 1, count - 1) for byte, _ in places]), pairs)
    both = builder.or_(low, builder.shl(high, constant(I16, GROUP, 8)))
    shifted = builder.lshr(both, pairs([shift for _, shift in places]))
    return builder.trunc(builder.and_(shifted, constant(I16, GROUP, (1 << bits) - 1)), vector(I8, GROUP))


_pack_group = emitted(_emit_pack_group, 5, num_names=3)
