"""Host form of weights: dense arrays and affine groups, as they lie in the file.

Every quantized format here has one meaning, ``w = scale * (q - zero) + bias`` with `scale` and `bias` per
group of consecutive inputs. K-quants factor both: ``scale = super_scale * sub_scale`` and
``bias = super_bias * sub_bias``. The factors stay apart in memory (written out as float32 per group they
would enlarge Q4_K by a third) and are multiplied where they are used.

Layouts follow the GGUF block formats (github.com/ggml-org/ggml, `ggml-common.h`); numbers are little-endian.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class QuantFormat:
    """Static facts of one block format; all sizes in weights or bytes along one row."""

    name: str  # GGUF's name: "Q4_0", "Q6_K", ...
    bits: int
    group_size: int  # weights that share a scale
    block_size: int  # weights per file block (a superblock holds several groups)
    block_bytes: int
    zero: int  # stored q of the value 0 (before `bias`); q is unsigned in [0, 2**bits)


QUANT_FORMATS: dict[str, QuantFormat] = {
    format.name: format
    for format in (
        QuantFormat("Q4_0", bits=4, group_size=32, block_size=32, block_bytes=18, zero=8),
        QuantFormat("Q4_1", bits=4, group_size=32, block_size=32, block_bytes=20, zero=0),
        QuantFormat("Q5_0", bits=5, group_size=32, block_size=32, block_bytes=22, zero=16),
        QuantFormat("Q5_1", bits=5, group_size=32, block_size=32, block_bytes=24, zero=0),
        QuantFormat("Q8_0", bits=8, group_size=32, block_size=32, block_bytes=34, zero=128),
        QuantFormat("Q4_K", bits=4, group_size=32, block_size=256, block_bytes=144, zero=0),
        QuantFormat("Q5_K", bits=5, group_size=32, block_size=256, block_bytes=176, zero=0),
        QuantFormat("Q6_K", bits=6, group_size=16, block_size=256, block_bytes=210, zero=32),
    )
}


@dataclass(frozen=True)
class FactoredGroups:
    """Unpacked affine groups of some rows: N rows, K inputs, G groups, S superblocks per row.

    ``w[n, k] = scale * (q - zero) + bias`` with, for g = k // group_size and s = k // block_size,
    ``scale = super_scale[n, s] * sub_scale[n, g]`` and ``bias = super_bias[n, s] * sub_bias[n, g]``.
    Missing factors: sub_scale and sub_bias None means 1; super_bias None means no bias at all.
    Factors are the file's own, widened; a damaged file can make them infinite or NaN.
    """

    format: QuantFormat
    q: NDArray[np.uint8]  # [N, K]
    super_scale: NDArray[np.float32]  # [N, S]
    sub_scale: NDArray[np.int8] | None  # [N, G]
    super_bias: NDArray[np.float32] | None  # [N, S] sign included
    sub_bias: NDArray[np.int8] | None  # [N, G]


def unpack(format: QuantFormat, raw: NDArray[np.uint8]) -> FactoredGroups:
    """Unpack rows of file blocks.

    Args:
        raw: uint8[N, S * block_bytes]; the last axis must be contiguous.

    Returns:
        Fresh arrays of N rows of K = S * block_size weights.
    """
    rows, row_bytes = raw.shape
    blocks = raw.reshape(rows, row_bytes // format.block_bytes, format.block_bytes)
    return _UNPACKERS[format.name](format, blocks)


def dequantize(groups: FactoredGroups) -> NDArray[np.float32]:
    """Exact weights float32[N, K], bit for bit those of GGUF's own definition.

    Every operation is rounded to float32, in this order: super_scale * sub_scale, super_bias * sub_bias,
    then scale * (q - zero), then + bias; no fused multiply-add. Infinite or NaN factors give NaN quietly.
    """
    rows, inputs = groups.q.shape
    centred = groups.q.astype(np.float32)
    if groups.format.zero:
        centred -= np.float32(groups.format.zero)
    grouped = centred.reshape(rows, inputs // groups.format.group_size, groups.format.group_size)
    with np.errstate(invalid="ignore", over="ignore"):
        grouped *= _per_group(groups.super_scale, groups.sub_scale)[..., None]
        if groups.super_bias is not None:
            grouped += _per_group(groups.super_bias, groups.sub_bias)[..., None]
    return centred


def _per_group(
    super_factor: NDArray[np.float32],  # [N, S]
    sub_factor: NDArray[np.int8] | None,  # [N, G]
) -> NDArray[np.float32]:  # [N, G]
    if sub_factor is None:
        return super_factor
    groups_per_block = sub_factor.shape[1] // super_factor.shape[1]
    return np.repeat(super_factor, groups_per_block, axis=1) * sub_factor.astype(np.float32)


def _float16(blocks: NDArray[np.uint8], offset: int) -> NDArray[np.float32]:
    """The float16 at byte `offset` of each block, widened: uint8[N, S, B] -> float32[N, S]."""
    pair = np.ascontiguousarray(blocks[..., offset : offset + 2])
    return pair.view("<f2")[..., 0].astype(np.float32)


def _join(q: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[N, S, ...] -> [N, K]: the trailing axes are already in the order of the inputs."""
    return q.reshape(q.shape[0], -1)


def _nibble_halves(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[..., n] -> [..., 2, n]: low nibbles are the first n weights, high nibbles the next n."""
    return np.stack([packed & 0x0F, packed >> 4], axis=-2)


def _fifth_bits(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[..., 4] -> [..., 32]: bit i of the little-endian word belongs to weight i; returned as 0 or 16."""
    return np.unpackbits(packed, axis=-1, bitorder="little") << np.uint8(4)


def _unpack_simple(format: QuantFormat, blocks: NDArray[np.uint8]) -> FactoredGroups:
    """Q4_0, Q4_1, Q5_0, Q5_1: scale, bias in the `_1` kinds, fifth bits in the Q5 kinds, 16 nibble pairs."""
    quants_start = format.block_bytes - 16
    nibbles = _nibble_halves(blocks[..., quants_start:])
    q = nibbles.reshape(*blocks.shape[:2], 32)
    if format.bits == 5:
        q |= _fifth_bits(blocks[..., quants_start - 4 : quants_start])
    has_bias = format.zero == 0
    bias = _float16(blocks, 2) if has_bias else None
    return FactoredGroups(format, _join(q), _float16(blocks, 0), None, bias, None)


def _unpack_q8_0(format: QuantFormat, blocks: NDArray[np.uint8]) -> FactoredGroups:
    """Scale, then 32 signed bytes; flipping the top bit adds 128."""
    return FactoredGroups(
        format, _join(blocks[..., 2:] ^ np.uint8(0x80)), _float16(blocks, 0), None, None, None
    )


def _six_bit_pairs(packed: NDArray[np.uint8]) -> tuple[NDArray[np.int8], NDArray[np.int8]]:
    """Scales and mins of eight groups from 12 bytes: [..., 12] -> two of [..., 8].

    Bytes 0-3 hold scales 0-3 and bytes 4-7 mins 0-3 in their low six bits. Bytes 8-11 hold the low nibbles
    of scales 4-7 (low half) and of mins 4-7 (high half), whose upper two bits top bytes 0-3 and 4-7.
    """
    scales, mins, rest = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scale_parts = [scales & 0x3F, (rest & 0x0F) | ((scales >> 6) << 4)]
    min_parts = [mins & 0x3F, (rest >> 4) | ((mins >> 6) << 4)]
    return (
        np.concatenate(scale_parts, axis=-1).astype(np.int8),
        np.concatenate(min_parts, axis=-1).astype(np.int8),
    )


def _unpack_q45_k(format: QuantFormat, blocks: NDArray[np.uint8]) -> FactoredGroups:
    """Q4_K, Q5_K: d, dmin, 12 bytes of scales and mins, fifth bits (Q5_K), 4 runs of 32 nibble pairs.

    Byte i of a run holds weight i of two consecutive groups; bit g of fifth-bit byte i is weight i of
    group g. The min is subtracted, so the bias is -dmin * min.
    """
    sub_scale, sub_bias = _six_bit_pairs(blocks[..., 4:16])
    runs = blocks[..., format.block_bytes - 128 :].reshape(*blocks.shape[:2], 4, 32)
    q = _nibble_halves(runs).reshape(*blocks.shape[:2], 8, 32)
    if format.bits == 5:
        group_bit = np.arange(8, dtype=np.uint8)[:, None]
        q |= ((blocks[..., None, 16:48] >> group_bit) & 1) << 4
    return FactoredGroups(
        format,
        _join(q),
        _float16(blocks, 0),
        _join_int8(sub_scale),
        -_float16(blocks, 2),
        _join_int8(sub_bias),
    )


def _unpack_q6_k(format: QuantFormat, blocks: NDArray[np.uint8]) -> FactoredGroups:
    """Two halves of 128 weights: 64 bytes of low nibbles each, then 32 bytes of upper bit pairs each, then
    16 signed scales, then d. Bit pair j of byte i belongs to weight 32 * j + i of the half."""
    shape = blocks.shape[:2]
    low = _nibble_halves(blocks[..., :128].reshape(*shape, 2, 64)).reshape(*shape, 2, 4, 32)
    pair_shift = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = (blocks[..., 128:192].reshape(*shape, 2, 1, 32) >> pair_shift) & np.uint8(3)
    sub_scale = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)
    q = low | (high << np.uint8(4))
    return FactoredGroups(format, _join(q), _float16(blocks, 208), _join_int8(sub_scale), None, None)


def _join_int8(factors: NDArray[np.int8]) -> NDArray[np.int8]:
    """[N, S, groups per block] -> [N, G]."""
    return factors.reshape(factors.shape[0], -1)


_UNPACKERS: dict[str, Callable[[QuantFormat, NDArray[np.uint8]], FactoredGroups]] = {
    "Q4_0": _unpack_simple,
    "Q4_1": _unpack_simple,
    "Q5_0": _unpack_simple,
    "Q5_1": _unpack_simple,
    "Q8_0": _unpack_q8_0,
    "Q4_K": _unpack_q45_k,
    "Q5_K": _unpack_q45_k,
    "Q6_K": _unpack_q6_k,
}
