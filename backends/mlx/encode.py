"""Host weights in MLX's quantized form: packed codes with a float32 scale and bias per group. NumPy only.

MLX means ``w = scale * code + bias`` by it, for groups of 32, 64 or 128 inputs. GGUF's formats with groups of
32 are of that kind once the zero point is folded into the bias, which is exact: the factors have few enough
bits for float32. Q6_K has groups of 16, for which MLX has no kernel: two of them are joined and re-encoded
with 8 bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mvllm.core.load.mlx_format import MLX_FORMATS, MLX_GROUP_SIZES
from mvllm.core.load.quantized import QUANT_FORMATS, FactoredGroups
from mvllm.core.load.weights import AffineWeight, DenseWeight, QuantizedWeight
from mvllm.core.tensor import ModelWeights, Weight

REENCODED_BITS = 8
REENCODED_GROUP_SIZE = 32

_CODES_PER_RUN = 8  # eight codes are whole bytes whatever their width
_ROWS_AT_ONCE = 2048  # bounds the temporaries
_SAMPLED_ROWS = 512  # per matrix, for the error of re-encoding


@dataclass(frozen=True)
class MlxGroups:
    """A quantized matrix of N rows and K inputs as `mx.quantized_matmul` takes it."""

    bits: int
    group_size: int
    codes: NDArray[np.uint32]  # [N, K * bits / 32]
    scales: NDArray[np.float32]  # [N, K / group_size]
    biases: NDArray[np.float32]  # [N, K / group_size]


@dataclass(frozen=True)
class ReencodingError:
    """How far re-encoded weights of one format are from the file's."""

    format_name: str
    num_matrices: int
    relative_rms: float  # root of (sum of squared errors / sum of squared weights)
    largest: float  # absolute


def is_quantized(weight: Weight) -> bool:
    return weight.format_name in QUANT_FORMATS or weight.format_name in MLX_FORMATS


def has_exact_form(weight: Weight) -> bool:
    """Whether MLX has a quantized form with the very values of this quantized weight."""
    return weight.format_name in MLX_FORMATS or (
        QUANT_FORMATS[weight.format_name].group_size in MLX_GROUP_SIZES
    )


def encode(weight: QuantizedWeight | AffineWeight) -> MlxGroups:
    """The MLX form of a quantized matrix; exact if `has_exact_form`, else re-encoded with 8 bits.

    A damaged weight (infinite or NaN factors) gives NaN scales or biases, never an exception.
    """
    if isinstance(weight, AffineWeight):
        return _affine(weight)
    exact = has_exact_form(weight)
    starts = range(0, weight.shape[0], _ROWS_AT_ONCE)
    parts = []
    for start in starts:
        stop = min(start + _ROWS_AT_ONCE, weight.shape[0])
        parts.append(_fold_zero(weight.unpack(start, stop)) if exact else reencode(weight.rows(start, stop)))
    return MlxGroups(
        parts[0].bits,
        parts[0].group_size,
        codes=np.concatenate([part.codes for part in parts]),
        scales=np.concatenate([part.scales for part in parts]),
        biases=np.concatenate([part.biases for part in parts]),
    )


def reencode(values: NDArray[np.float32]) -> MlxGroups:
    """Round f32[N, K] to 8 bits in groups of 32 whose ends are exact; K is a multiple of 32."""
    grouped = values.reshape(len(values), -1, REENCODED_GROUP_SIZE)
    lowest = grouped.min(axis=-1)
    levels = (1 << REENCODED_BITS) - 1
    with np.errstate(invalid="ignore", over="ignore"):
        scales = (grouped.max(axis=-1) - lowest) / np.float32(levels)
        safe = np.where(scales > 0, scales, 1)
        codes = np.nan_to_num(np.rint((grouped - lowest[..., None]) / safe[..., None]))
    codes = np.clip(codes, 0, levels).astype(np.uint8).reshape(values.shape)
    return MlxGroups(
        REENCODED_BITS, REENCODED_GROUP_SIZE, pack_codes(codes, REENCODED_BITS), scales, biases=lowest
    )


def decode(groups: MlxGroups) -> NDArray[np.float32]:
    """The values f32[N, K] of an 8-bit matrix, rounded as MLX does."""
    codes = groups.codes.view(np.uint8).reshape(*groups.scales.shape, groups.group_size)
    values = groups.scales[..., None] * codes.astype(np.float32) + groups.biases[..., None]
    return values.reshape(len(codes), -1)


def pack_codes(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint32]:
    """uint8[N, K] -> uint32[N, K * bits / 32], K a multiple of 32, the first code in the lowest bits."""
    runs = codes.reshape(len(codes), -1, _CODES_PER_RUN)
    words = np.zeros(runs.shape[:2], "<u8")
    for index in range(_CODES_PER_RUN):
        words |= runs[..., index].astype("<u8") << np.uint64(index * bits)
    packed = words[..., None].view(np.uint8)[..., :bits]
    return np.ascontiguousarray(packed).reshape(len(codes), -1).view("<u4")


def reencoding_errors(weights: ModelWeights) -> list[ReencodingError]:
    """The error of every format that `encode` changes, over a sample of each matrix's rows."""
    sums: dict[str, list[tuple[float, float, float]]] = {}
    for weight in _distinct_matrices(weights):
        if isinstance(weight, QuantizedWeight) and not has_exact_form(weight):
            sums.setdefault(weight.format_name, []).append(_error_sums(weight))
    return [_join_errors(name, of_format) for name, of_format in sorted(sums.items())]


def _error_sums(weight: QuantizedWeight) -> tuple[float, float, float]:
    """(squared errors, squared weights, largest error) over evenly spread rows."""
    step = max(1, weight.shape[0] // _SAMPLED_ROWS)
    exact = np.concatenate([weight.rows(row, row + 1) for row in range(0, weight.shape[0], step)])
    error = decode(reencode(exact)) - exact
    return float(np.sum(error**2)), float(np.sum(exact**2)), float(np.abs(error).max())


def _join_errors(name: str, parts: Sequence[tuple[float, float, float]]) -> ReencodingError:
    squared = sum(part[0] for part in parts) / max(sum(part[1] for part in parts), np.finfo(np.float32).tiny)
    return ReencodingError(name, len(parts), float(np.sqrt(squared)), max(part[2] for part in parts))


def matrices(weights: ModelWeights) -> list[Weight]:
    """Every matrix of a model; a tied head comes twice."""
    of_layers = [
        weight
        for layer in weights.layers
        for weight in (layer.q, layer.k, layer.v, layer.o, layer.gate, layer.up, layer.down)
    ]
    return [weights.embedding, *of_layers, weights.head]


def _distinct_matrices(weights: ModelWeights) -> Iterable[Weight]:
    return {id(weight): weight for weight in matrices(weights)}.values()


def _fold_zero(groups: FactoredGroups) -> MlxGroups:
    """scale * (q - zero) + bias as scale * q + (bias - zero * scale)."""
    scales = _per_group(groups.super_scale, groups.sub_scale)
    biases = np.float32(-groups.format.zero) * scales
    if groups.super_bias is not None:
        biases += _per_group(groups.super_bias, groups.sub_bias)
    format = groups.format
    return MlxGroups(format.bits, format.group_size, pack_codes(groups.q, format.bits), scales, biases)


def _per_group(
    super_factor: NDArray[np.float32],  # [N, S]
    sub_factor: NDArray[np.int8] | None,  # [N, G]
) -> NDArray[np.float32]:  # [N, G]
    if sub_factor is None:
        return super_factor
    repeats = sub_factor.shape[1] // super_factor.shape[1]
    with np.errstate(invalid="ignore", over="ignore"):
        return np.repeat(super_factor, repeats, axis=1) * sub_factor.astype(np.float32)


def _affine(weight: AffineWeight) -> MlxGroups:
    codes = weight.stored if weight.row_order is None else weight.stored[weight.row_order]
    return MlxGroups(
        weight.format.bits,
        weight.format.group_size,
        codes=np.ascontiguousarray(codes),
        scales=_widened(weight, weight.scales),
        biases=_widened(weight, weight.biases),
    )


def _widened(weight: AffineWeight, factors: NDArray[Any]) -> NDArray[np.float32]:
    stored_type = weight.format_name.rpartition("_")[-1]
    return DenseWeight(weight.name, stored_type, factors, weight.row_order).to_float32()
