"""Block formats against the definition in the `gguf` package, and the weights built on them."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mvllm.core.load.gguf_model import interleaved_row_order
from mvllm.core.load.quantized import QUANT_FORMATS, QuantFormat, dequantize, unpack
from mvllm.core.load.weights import DenseWeight, QuantizedWeight
from tests.model_files import random_blocks
from tests.tiny_models import interleave_rows

FORMATS = list(QUANT_FORMATS.values())
every_format = pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)


def random_bytes(format: QuantFormat, rows: int, blocks: int, seed: int) -> NDArray[np.uint8]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (rows, blocks * format.block_bytes), dtype=np.uint8)


def reference(format: QuantFormat, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    with np.errstate(all="ignore"):
        values: NDArray[np.float32] = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[format.name])
    return values


def assert_same_bits(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> None:
    """Equal to the last bit, signed zeros included; NaN anywhere NaN is."""
    assert ours.dtype == theirs.dtype == np.float32
    assert ours.shape == theirs.shape
    nan = np.isnan(theirs)
    assert np.array_equal(np.isnan(ours), nan)
    assert np.array_equal(ours.view(np.uint32)[~nan], theirs.view(np.uint32)[~nan])


@every_format
@given(rows=st.integers(1, 5), blocks=st.integers(1, 4), seed=st.integers(0, 2**32 - 1))
def test_dequantized_random_bytes_equal_the_reference_to_the_last_bit(
    format: QuantFormat, rows: int, blocks: int, seed: int
) -> None:
    raw = random_bytes(format, rows, blocks, seed)
    assert_same_bits(dequantize(unpack(format, raw)), reference(format, raw))


@every_format
def test_sizes_are_those_of_the_gguf_package(format: QuantFormat) -> None:
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[format.name]]
    assert (format.block_size, format.block_bytes) == (block_size, block_bytes)


@every_format
def test_groups_have_the_stated_shapes_and_ranges(format: QuantFormat) -> None:
    groups = unpack(format, random_bytes(format, 3, 2, seed=1))
    inputs = 2 * format.block_size
    assert groups.q.shape == (3, inputs)
    assert int(groups.q.max()) < 2**format.bits
    assert groups.super_scale.shape == (3, 2)
    for factor in (groups.sub_scale, groups.sub_bias):
        assert factor is None or (
            factor.dtype == np.int8 and factor.shape == (3, inputs // format.group_size)
        )
    assert (groups.super_bias is None) == (format.zero != 0)


@every_format
def test_the_written_formula_gives_the_same_weights(format: QuantFormat) -> None:
    groups = unpack(format, random_blocks(format, (2, 2 * format.block_size), np.random.default_rng(2)))
    expected = np.empty((2, 2 * format.block_size), np.float32)
    for n, k in np.ndindex(expected.shape):
        g, s = k // format.group_size, k // format.block_size
        scale = groups.super_scale[n, s] * np.float32(
            1 if groups.sub_scale is None else groups.sub_scale[n, g]
        )
        value = scale * np.float32(int(groups.q[n, k]) - format.zero)
        if groups.super_bias is not None:
            sub_bias = np.float32(1 if groups.sub_bias is None else groups.sub_bias[n, g])
            value += groups.super_bias[n, s] * sub_bias
        expected[n, k] = value
    assert_same_bits(dequantize(groups), expected)


@every_format
def test_infinite_and_nan_scales_give_no_warning_and_no_error(format: QuantFormat) -> None:
    raw = np.full((1, format.block_bytes), 0xFF, np.uint8)
    assert np.isnan(dequantize(unpack(format, raw))).any()
    infinity = np.frombuffer(np.array([np.inf], "<f2").tobytes(), np.uint8)
    for offset in (0, format.block_bytes - 2):
        raw = np.zeros((1, format.block_bytes), np.uint8)
        raw[0, offset : offset + 2] = infinity
        dequantize(unpack(format, raw))


@every_format
def test_a_weight_gives_rows_and_packed_bytes_as_stored(format: QuantFormat) -> None:
    raw = random_blocks(format, (2100, format.block_size), np.random.default_rng(3))
    weight = QuantizedWeight("w", format, raw)
    assert weight.shape == (2100, format.block_size)
    assert weight.nbytes == raw.nbytes
    assert weight.format_name == format.name
    assert np.shares_memory(weight.stored_rows(0, 2100), raw)
    assert_same_bits(weight.to_float32(), reference(format, raw))
    assert_same_bits(weight.rows(7, 9), weight.to_float32()[7:9])


@pytest.mark.parametrize("num_heads,head_dim", [(1, 2), (4, 16), (3, 24), (2, 64)])
def test_row_order_undoes_the_interleaving_of_llama_files(num_heads: int, head_dim: int) -> None:
    rows = np.arange(num_heads * head_dim)
    stored = interleave_rows(rows, head_dim)
    assert np.array_equal(stored[interleaved_row_order(num_heads, head_dim)], rows)


def test_reordered_rows_are_the_same_through_every_accessor() -> None:
    format = QUANT_FORMATS["Q4_K"]
    raw = random_blocks(format, (32, 256), np.random.default_rng(4))
    order = interleaved_row_order(2, 16)
    weight = QuantizedWeight("w", format, raw, order)
    expected = reference(format, raw)[order]
    assert_same_bits(weight.to_float32(), expected)
    assert_same_bits(weight.rows(3, 20), expected[3:20])
    assert_same_bits(dequantize(weight.unpack(3, 20)), expected[3:20])
    assert np.array_equal(weight.stored_rows(3, 20), raw[order][3:20])
    dense = DenseWeight("w", "F32", reference(format, raw), order)
    assert_same_bits(dense.to_float32(), expected)
    assert_same_bits(dense.rows(3, 20), expected[3:20])
    assert_same_bits(dense.stored_rows(3, 20), expected[3:20])


def test_bfloat16_is_widened_by_its_bits() -> None:
    bits = np.array([0x0000, 0x8000, 0x3F80, 0x0001, 0x8001, 0x7F80, 0xFF80, 0x7FC0, 0x7F7F], np.uint16)
    values = DenseWeight("w", "BF16", bits).to_float32()
    assert np.array_equal(values.view(np.uint32), bits.astype(np.uint32) << 16)
    assert values[2] == 1.0
    assert np.isnan(values[7])


def test_float16_is_widened_exactly_and_the_result_is_a_copy() -> None:
    halves = np.array([1.5, -0.0, 6e-8, np.inf], np.float16)
    values = DenseWeight("w", "F16", halves).to_float32()
    assert np.array_equal(values, halves.astype(np.float32))
    floats = np.ones(3, np.float32)
    assert not np.shares_memory(DenseWeight("w", "F32", floats).to_float32(), floats)
