"""Host weights in MLX's quantized form. Needs no MLX."""

from __future__ import annotations

import numpy as np
import pytest

from mvllm.backends.mlx.encode import (
    decode,
    encode,
    has_exact_form,
    pack_codes,
    reencode,
    reencoding_errors,
)
from mvllm.core.load.mlx_format import MLX_BITS, unpack_stream
from mvllm.core.load.quantized import QUANT_FORMATS
from mvllm.core.load.weights import QuantizedWeight
from mvllm.core.tensor import ModelWeights
from tests.conformance.random_models import ModelShape, random_model
from tests.model_files import random_blocks

RNG_SEED = 5


def random_weight(format_name: str, rows: int = 6, inputs: int = 512) -> QuantizedWeight:
    format = QUANT_FORMATS[format_name]
    blocks = random_blocks(format, (rows, inputs), np.random.default_rng(RNG_SEED))
    return QuantizedWeight(format_name, format, blocks)


@pytest.mark.parametrize("bits", MLX_BITS)
def test_packed_codes_come_back(bits: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 2**bits, (5, 96), dtype=np.uint8)
    packed = pack_codes(codes, bits)
    assert packed.shape == (5, 3 * bits)
    assert np.array_equal(unpack_stream(packed.view(np.uint8), bits), codes)


@pytest.mark.parametrize("name", [name for name in QUANT_FORMATS if name != "Q6_K"])
def test_formats_with_groups_of_32_are_exact_to_the_bit(name: str) -> None:
    weight = random_weight(name)
    assert has_exact_form(weight)
    groups = encode(weight)
    codes = unpack_stream(groups.codes.view(np.uint8), groups.bits).reshape(*groups.scales.shape, 32)
    values = groups.scales[..., None] * codes.astype(np.float32) + groups.biases[..., None]
    assert np.array_equal(values.reshape(weight.shape), weight.to_float32())


def test_rows_keep_the_order_that_the_weight_gives_them() -> None:
    order = np.array([3, 0, 5, 1, 4, 2])
    plain = random_weight("Q4_K")
    reordered = QuantizedWeight("q", plain.format, plain.stored, row_order=order)
    assert np.array_equal(encode(reordered).codes, encode(plain).codes[order])


def test_reencoding_is_within_half_a_step_of_each_group() -> None:
    values = np.random.default_rng(1).standard_normal((4, 128), np.float32)
    groups = reencode(values)
    steps = np.repeat(groups.scales, 32, axis=1)
    assert (np.abs(decode(groups) - values) <= 0.501 * steps).all()


def test_reencoding_keeps_constant_groups_exactly() -> None:
    values = np.repeat(np.float32([[0.25, -3.0]]), 32, axis=1)
    assert np.array_equal(decode(reencode(values)), values)


def test_damaged_factors_stay_visible_as_nan() -> None:
    values = np.ones((1, 64), np.float32)
    values[0, 3] = np.nan
    decoded = decode(reencode(values))
    assert np.isnan(decoded[0, :32]).all()
    assert (decoded[0, 32:] == 1).all()


def test_the_error_of_reencoded_formats_is_reported_once_per_matrix() -> None:
    _, dense = random_model(ModelShape(), seed=0)
    q6 = random_weight("Q6_K")
    weights = ModelWeights(embedding=q6, layers=dense.layers, final_norm=dense.final_norm, head=q6)
    [error] = reencoding_errors(weights)
    assert (error.format_name, error.num_matrices) == ("Q6_K", 1)
    difference = decode(encode(q6)) - q6.to_float32()
    assert error.largest == pytest.approx(np.abs(difference).max())
    assert 0 < error.relative_rms < 0.01
    assert reencoding_errors(dense) == []
