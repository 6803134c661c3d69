"""A model's weights on the device, each brought there once."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mvllm.backends.mlx.device import DTYPES, is_gpu, require_memory
from mvllm.backends.mlx.encode import encode, has_exact_form, is_quantized
from mvllm.backends.mlx.options import MlxOptions
from mvllm.core.load.mapped import release_pages
from mvllm.core.load.weights import AffineWeight, DenseWeight, QuantizedWeight
from mvllm.core.model.spec import ModelSpec
from mvllm.core.tensor import ModelWeights, Weight


@dataclass(frozen=True, eq=False)
class DenseMatrix:
    """N rows, K inputs. `by_input` is the order that the device's matrix product is fastest with."""

    values: mx.array  # [K, N] if by_input, else [N, K]
    by_input: bool

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    @property
    def form(self) -> str:
        return str(self.values.dtype).removeprefix("mlx.core.")

    def product(self, x: mx.array) -> mx.array:
        """[M, K] -> [M, N]."""
        return x @ (self.values if self.by_input else self.values.T)

    def rows(self, indices: mx.array) -> mx.array:
        """[n] -> [n, K]."""
        if self.by_input:
            return mx.take(self.values, indices, axis=1).T
        return mx.take(self.values, indices, axis=0)


@dataclass(frozen=True, eq=False)
class QuantizedMatrix:
    """Affine groups, N rows, K inputs."""

    bits: int
    group_size: int
    codes: mx.array  # uint32[N, K * bits / 32]
    scales: mx.array  # [N, K / group_size]
    biases: mx.array  # [N, K / group_size]

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes + self.biases.nbytes

    @property
    def form(self) -> str:
        return f"{self.bits}-bit groups of {self.group_size}"

    def product(self, x: mx.array) -> mx.array:
        """[M, K] -> [M, N]."""
        return mx.quantized_matmul(
            x,
            self.codes,
            self.scales,
            self.biases,
            transpose=True,
            group_size=self.group_size,
            bits=self.bits,
        )

    def rows(self, indices: mx.array) -> mx.array:
        """[n] -> [n, K]."""
        codes, scales, biases = [
            mx.take(array, indices, axis=0) for array in (self.codes, self.scales, self.biases)
        ]
        return mx.dequantize(codes, scales, biases, group_size=self.group_size, bits=self.bits)


Matrix = DenseMatrix | QuantizedMatrix


class DeviceWeights:
    """Owns the device's copies of all weights, and of the rotary tables. Nothing is loaded later.

    Raises:
        CapacityError: memory for one can't be had.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        *,
        num_positions: int,
        options: MlxOptions,
        device: mx.Device,
    ) -> None:
        self._dtype = DTYPES[options.activations]
        self._options = options
        self._device = device
        self._matrices: dict[int, tuple[Weight, Matrix]] = {}  # by id of the weight
        self._vectors: dict[int, tuple[Weight, mx.array]] = {}
        for weight in _all(weights):
            if len(weight.shape) == 2:
                self._add_matrix(weight)
            elif id(weight) not in self._vectors:
                values = mx.array(weight.to_float32()).astype(self._dtype)
                self._vectors[id(weight)] = weight, values
        self._ropes = [tuple(map(mx.array, rope.table(num_positions))) for rope in spec.ropes]
        mx.eval([values for _, values in self._vectors.values()], self._ropes)

    @property
    def nbytes(self) -> int:
        """Bytes of matrices and vectors."""
        matrices = sum(matrix.nbytes for _, matrix in self._matrices.values())
        return matrices + sum(values.nbytes for _, values in self._vectors.values())

    @property
    def dtype(self) -> mx.Dtype:
        """Of activations."""
        return self._dtype

    def matrix(self, weight: Weight) -> Matrix:
        return self._matrices[id(weight)][1]

    def vector(self, weight: Weight) -> mx.array:
        return self._vectors[id(weight)][1]

    def rope(self, number: int) -> tuple[mx.array, mx.array]:
        """cos and sin, each f32[num_positions, head_dim / 2]."""
        cos, sin = self._ropes[number]
        return cos, sin

    def _add_matrix(self, weight: Weight) -> None:
        if id(weight) in self._matrices:
            return
        matrix = place_matrix(weight, self._options, self._device)
        self._matrices[id(weight)] = weight, matrix


def place_matrix(weight: Weight, options: MlxOptions, device: mx.Device) -> Matrix:
    """A weight [N, K] on the device, in the form that the options ask for.

    Raises:
        CapacityError: memory for it can't be had.
    """
    rows, inputs = weight.shape
    require_memory(4 * rows * inputs, f"weight {weight.name} as float32")
    quantized = is_quantized(weight) and (has_exact_form(weight) or not options.dense)
    dtype = DTYPES[options.activations]
    matrix = _quantized(weight, dtype) if quantized else _dense(weight, dtype, by_input=not is_gpu(device))
    if isinstance(weight, (DenseWeight, QuantizedWeight, AffineWeight)):
        release_pages(weight.stored)
    return matrix


def _quantized(weight: Weight, dtype: mx.Dtype) -> QuantizedMatrix:
    """Scales keep float32 with float32 activations: MLX rounds what it dequantizes to the scales' type."""
    assert isinstance(weight, (QuantizedWeight, AffineWeight))
    groups = encode(weight)
    scales, biases = (mx.array(part).astype(dtype) for part in (groups.scales, groups.biases))
    matrix = QuantizedMatrix(groups.bits, groups.group_size, mx.array(groups.codes), scales, biases)
    mx.eval(matrix.codes, matrix.scales, matrix.biases)
    return matrix


def _dense(weight: Weight, dtype: mx.Dtype, *, by_input: bool) -> DenseMatrix:
    values = weight.to_float32()
    if by_input:
        values = np.ascontiguousarray(values.T)
    on_device = mx.array(values).astype(dtype)
    mx.eval(on_device)
    return DenseMatrix(on_device, by_input)


def _all(weights: ModelWeights) -> list[Weight]:
    layers = [weight for layer in weights.layers for weight in vars(layer).values() if weight is not None]
    return [weights.embedding, weights.final_norm, *layers, weights.head]
