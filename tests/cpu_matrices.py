"""Random weights in every format, and products with them, for tests of the CPU backend's kernels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mvllm.backends.cpu import linear
from mvllm.backends.cpu.isa import Isa
from mvllm.backends.cpu.layout import (
    ACTIVATION_CODES_OFFSET,
    DENSE,
    GROUP,
    HALF_SUMS_OFFSET,
    LAYOUT_NUMBERS,
    MINUS_SUM_OFFSET,
    NARROW,
    SCALE_OFFSET,
    SCALED_SUM_OFFSET,
    SECOND_CODE_BITS,
    SPLIT,
    WIDE,
    ActivationLayout,
)
from mvllm.backends.cpu.pack import Arena, PackedMatrix, pack_matrix
from mvllm.core.load.mlx_format import MLX_FORMATS
from mvllm.core.load.quantized import QUANT_FORMATS
from mvllm.core.load.weights import AffineWeight, DenseWeight, HostWeight, QuantizedWeight
from tests.model_files import to_dense_type

MLX_EXAMPLES = ("MLX3_G128_F32", "MLX6_G32_F16", "MLX8_G64_BF16")
"""Together they have every size of group, every type of scale, and codes of 2 or 3 bits kept in 4."""

FORMATS = (*QUANT_FORMATS, *MLX_EXAMPLES, *DENSE)


_CODES = {NARROW: "32i1", WIDE: "32i2", SPLIT: "(2,32)i1"}


def _record(layout: ActivationLayout) -> np.dtype:
    fields = {
        "scale": ("f4", SCALE_OFFSET),
        "scaled_sum": ("f4", SCALED_SUM_OFFSET),
        "minus_sum": ("i4", MINUS_SUM_OFFSET),
        "minus_half_sums": ("i4" if layout.is_wide else "2i2", HALF_SUMS_OFFSET),
        "codes": (_CODES[layout], ACTIVATION_CODES_OFFSET),
    }
    formats, offsets = zip(*fields.values(), strict=True)
    names = list(fields)
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": layout.record_bytes})


RECORDS = {layout: _record(layout) for layout in LAYOUT_NUMBERS}
"""One activation record of each layout."""


def codes_of(records: NDArray[np.void]) -> NDArray[np.int64]:
    """The codes of records, in the order of the inputs."""
    codes = records["codes"].astype(np.int64)
    if codes.shape[records.ndim :] == (2, GROUP):
        return (codes[..., 0, :] << SECOND_CODE_BITS) + codes[..., 1, :]
    if records["codes"].dtype == np.int16:
        quads = codes.reshape(*codes.shape[:-1], -1, 4)
        codes = quads[..., [0, 2, 1, 3]].reshape(codes.shape)
    return codes


_HALF_OFFSETS = {"Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2)}
"""Where a file block holds float16 factors, if not only at its start."""


def random_weight(format_name: str, rows: int, inputs: int, rng: np.random.Generator) -> HostWeight:
    """A weight with random contents; `inputs` a multiple of the format's block."""
    if format_name in DENSE:
        values = rng.standard_normal((rows, inputs), np.float32)
        if format_name == "F16":
            return DenseWeight(format_name, format_name, values.astype(np.float16))
        if format_name == "BF16":
            return DenseWeight(format_name, format_name, (values.view(np.uint32) >> 16).astype(np.uint16))
        return DenseWeight(format_name, format_name, values)
    if format_name in MLX_FORMATS:
        return _random_affine(format_name, rows, inputs, rng)
    format = QUANT_FORMATS[format_name]
    shape = (rows, inputs // format.block_size)
    blocks = rng.integers(0, 256, (*shape, format.block_bytes), dtype=np.uint8)
    for offset in _HALF_OFFSETS.get(format_name, (0,)):
        factors = rng.uniform(-0.02, 0.02, (*shape, 1)).astype(np.float16)
        blocks[..., offset : offset + 2] = factors.view(np.uint8)
    return QuantizedWeight(format_name, format, blocks.reshape(rows, -1))


def _random_affine(format_name: str, rows: int, inputs: int, rng: np.random.Generator) -> AffineWeight:
    """Any codes and factors, not only those that a quantizer would choose."""
    format, scale_type = MLX_FORMATS[format_name], format_name.rpartition("_")[-1]
    codes = rng.integers(0, 2**32, (rows, inputs * format.bits // 32), dtype=np.uint32)
    scales, biases = (
        to_dense_type(
            rng.uniform(-0.02, 0.02, (rows, inputs // format.group_size)).astype(np.float32), scale_type
        )
        for _ in range(2)
    )
    return AffineWeight(format_name, format, codes, scales, biases)


def extreme_weight(format_name: str, rows: int, inputs: int, rng: np.random.Generator) -> HostWeight:
    """Codes and integer factors at the ends of their ranges, float factors of 1 or -1, biases among them.

    In the first four rows all codes are alike, as are all factors; GGUF and MLX formats only.
    """
    ends = (0, 255)
    if format_name in MLX_FORMATS:
        affine = _random_affine(format_name, rows, inputs, rng)
        codes = rng.choice(ends, (rows, 4 * affine.stored.shape[1])).astype(np.uint8)
        codes[:4] = np.resize(ends, (4, 1))
        scale_type = format_name.rpartition("_")[-1]
        scales, biases = (
            to_dense_type(rng.choice((-1.0, 1.0), affine.scales.shape).astype(np.float32), scale_type)
            for _ in range(2)
        )
        return replace(affine, stored=codes.view(np.uint32), scales=scales, biases=biases)
    format = QUANT_FORMATS[format_name]
    shape = (rows, inputs // format.block_size)
    blocks = rng.choice(ends, (*shape, format.block_bytes)).astype(np.uint8)
    blocks[:4] = np.resize(ends, (4, 1, 1))
    if format_name == "Q6_K":
        factors = rng.choice((-128, 127), (*shape, 16)).astype(np.int8)
        factors[:4] = np.reshape((-128, -128, 127, 127), (4, 1, 1))
        blocks[..., 192:208] = factors.view(np.uint8)
    for offset in _HALF_OFFSETS.get(format_name, (0,)):
        ones = rng.choice((-1.0, 1.0), (*shape, 1)).astype(np.float16)
        blocks[..., offset : offset + 2] = ones.view(np.uint8)
    return QuantizedWeight(format_name, format, blocks.reshape(rows, -1))


def without_biases(weight: HostWeight) -> HostWeight:
    """The same codes and scales."""
    if isinstance(weight, AffineWeight):
        return replace(weight, biases=np.zeros_like(weight.biases))
    offsets = _HALF_OFFSETS.get(weight.format_name, (0,))
    if not isinstance(weight, QuantizedWeight) or len(offsets) == 1:
        return weight
    blocks = weight.stored.copy().reshape(-1, weight.format.block_bytes)
    blocks[:, offsets[1] : offsets[1] + 2] = 0
    return replace(weight, stored=blocks.reshape(weight.stored.shape))


def packed(weight: HostWeight, isa: Isa) -> PackedMatrix:
    return pack_matrix([weight], Arena(), isa=isa)


def activations(
    x: NDArray[np.float32], matrix: PackedMatrix, layout: ActivationLayout = NARROW
) -> NDArray[np.uint8]:
    """float32[M, K] -> uint8[M, bytes] as `matmul` takes them for this matrix."""
    if not matrix.is_quantized:
        return np.ascontiguousarray(x).view(np.uint8)
    tokens, inputs = x.shape
    records = np.zeros((tokens, layout.row_bytes(inputs)), np.uint8)
    for row, record in zip(np.ascontiguousarray(x), records, strict=True):
        linear.quantize_row(row.ctypes.data, record.ctypes.data, inputs, LAYOUT_NUMBERS[layout])
    return records


def activation_values(
    acts: NDArray[np.uint8], matrix: PackedMatrix, layout: ActivationLayout = NARROW
) -> NDArray[np.float64]:
    """The values that activations stand for, [M, K]."""
    if not matrix.is_quantized:
        return acts.view(np.float32).astype(np.float64)
    records = acts.view(RECORDS[layout])  # [M, groups]
    values = codes_of(records).astype(np.float64) * records["scale"][..., None]
    return values.reshape(len(acts), records.shape[1] * GROUP)


def product(
    matrix: PackedMatrix,
    acts: NDArray[np.uint8],
    first_block: int = 0,
    last_block: int | None = None,
    layout: ActivationLayout = NARROW,
    panels_from: int | None = None,
) -> NDArray[np.float32]:
    """float32[M, padded rows]; NaN where the product writes nothing."""
    out = np.full((len(acts), matrix.padded_rows), np.nan, np.float32)
    last = matrix.num_blocks if last_block is None else last_block
    linear.matmul(
        matrix.product_descriptor(layout, panels_from),
        acts.ctypes.data,
        acts.strides[0],
        out.ctypes.data,
        out.strides[0],
        len(acts),
        first_block,
        last,
    )
    return out
