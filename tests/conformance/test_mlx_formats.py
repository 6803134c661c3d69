"""Every weight format on MLX: exact where MLX has the format, within a stated error where it has not."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from mvllm.backends.mlx.backend import MlxBackend
from mvllm.backends.mlx.device import choose_device
from mvllm.backends.mlx.options import MlxOptions
from mvllm.backends.mlx.weights import DenseMatrix, DeviceWeights, QuantizedMatrix
from mvllm.backends.registry import create_backend
from mvllm.core.load.mlx_format import MLX_FORMATS
from mvllm.core.load.quantized import QUANT_FORMATS
from mvllm.core.load.weights import DENSE_DTYPES, AffineWeight, DenseWeight, HostWeight, QuantizedWeight
from mvllm.core.model.spec import ModelSpec
from mvllm.core.tensor import LayerWeights, ModelWeights
from tests.conformance.random_models import ModelShape, Row, geometry, make_batch, random_model
from tests.mlx_files import quantize
from tests.model_files import random_blocks, to_dense_type

ROWS, INPUTS = 64, 256
FORMATS = (*DENSE_DTYPES, *QUANT_FORMATS, *MLX_FORMATS)
BLOCK_SIZE = 4


def random_weight(format_name: str, seed: int = 0, rows: int = ROWS) -> HostWeight:
    """Values spread as 1 / sqrt(inputs)."""
    rng = np.random.default_rng(seed)
    name = f"{format_name}.{seed}"
    if format_name in QUANT_FORMATS:
        format = QUANT_FORMATS[format_name]
        return QuantizedWeight(name, format, random_blocks(format, (rows, INPUTS), rng))
    values = rng.standard_normal((rows, INPUTS), np.float32) / np.float32(np.sqrt(INPUTS))
    if format_name in DENSE_DTYPES:
        return DenseWeight(name, format_name, to_dense_type(values, format_name))
    format = MLX_FORMATS[format_name]
    parts = quantize(values, format.bits, format.group_size, format_name.rpartition("_")[-1])
    return AffineWeight(name, format, *(parts[part][1] for part in ("weight", "scales", "biases")))


def on_device(weight: HostWeight, options: MlxOptions) -> DenseMatrix | QuantizedMatrix:
    spec, weights = random_model(ModelShape(num_layers=0), seed=0)
    loaded = DeviceWeights(
        spec,
        replace(weights, embedding=weight, head=weight),
        num_positions=8,
        options=options,
        device=choose_device(options),
    )
    return loaded.matrix(weight)


@pytest.mark.parametrize("name", FORMATS)
def test_rows_and_products_of_every_format_are_those_of_the_exact_weights(name: str) -> None:
    weight = random_weight(name)
    exact = weight.to_float32()
    x = np.random.default_rng(1).standard_normal((3, INPUTS), np.float32)
    options = MlxOptions(dense=True)
    matrix = on_device(weight, options)
    with mx.stream(choose_device(options)):
        assert np.array_equal(np.array(matrix.rows(mx.array([5, 0, 63]))), exact[[5, 0, 63]])
        product = np.array(matrix.product(mx.array(x)))
    np.testing.assert_allclose(product, x @ exact.T, atol=1e-5)
    assert isinstance(matrix, DenseMatrix) == (name in DENSE_DTYPES or name == "Q6_K")


def test_q6_k_is_re_encoded_unless_it_is_to_stay_dense() -> None:
    weight = random_weight("Q6_K")
    options = MlxOptions()
    matrix = on_device(weight, options)
    assert isinstance(matrix, QuantizedMatrix)
    assert (matrix.bits, matrix.group_size) == (8, 32)
    with mx.stream(choose_device(options)):
        values = np.array(matrix.rows(mx.arange(ROWS)))
    exact = weight.to_float32()
    assert np.sqrt(np.mean((values - exact) ** 2) / np.mean(exact**2)) < 0.005


def quantized_model(format_name: str) -> tuple[ModelSpec, ModelWeights]:
    """A random model all of whose matrices have the format."""
    shape = ModelShape(num_heads=4, num_kv_heads=2, head_dim=64, hidden_size=INPUTS, intermediate_size=INPUTS)
    spec, weights = random_model(replace(shape, num_layers=1), seed=3)
    [layer] = weights.layers
    slots = ("q", "k", "v", "o", "gate", "up", "down")
    matrices = {
        slot: random_weight(format_name, seed, rows=getattr(layer, slot).shape[0])
        for seed, slot in enumerate(slots, 1)
    }
    layer = LayerWeights(**{**vars(layer), **matrices})
    head = random_weight(format_name, 8, rows=spec.vocab_size)
    return spec, replace(weights, embedding=head, head=head, layers=(layer,))


@pytest.mark.parametrize("name", [*QUANT_FORMATS, *(f"MLX{bits}_G64_BF16" for bits in (2, 3, 4, 5, 6, 8))])
@pytest.mark.parametrize("rows_apart", [0, 8])
def test_c1_a_model_of_any_format_equals_the_reference(name: str, rows_apart: int) -> None:
    spec, weights = quantized_model(name)
    batch = make_batch([Row([1, 2, 3, 4, 5, 6], 0, 6, [3, 1], num_logits=4)], BLOCK_SIZE)
    size = geometry(block_size=BLOCK_SIZE)
    options = MlxOptions(dense=True, rows_apart=rows_apart)
    with (
        closing(MlxBackend(options).load(spec, weights, size)) as model,
        closing(create_backend("reference").load(spec, weights, size)) as reference,
    ):
        np.testing.assert_allclose(model.logits(batch), reference.logits(batch), atol=2e-4, rtol=0)


@pytest.mark.parametrize("activations", ["f16", "bf16"])
def test_narrow_activations_stay_near_the_reference(activations: str) -> None:
    spec, weights = quantized_model("Q4_0")
    batch = make_batch([Row([1, 2, 3, 4, 5, 6], 0, 6, [3, 1], num_logits=4)], BLOCK_SIZE)
    size = geometry(block_size=BLOCK_SIZE)
    options = MlxOptions(activations=activations)  # type: ignore[arg-type]
    with (
        closing(MlxBackend(options).load(spec, weights, size)) as model,
        closing(create_backend("reference").load(spec, weights, size)) as reference,
    ):
        difference = np.abs(model.logits(batch) - reference.logits(batch)).max()
    assert 0 < difference < {"f16": 0.05, "bf16": 0.5}[activations]
