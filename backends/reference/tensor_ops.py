"""Every operation of `TensorOps` in a few lines of NumPy float32: the specification of all backends."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from mvllm.core.model.spec import Activation, ModelSpec
from mvllm.core.step import ForwardBatch
from mvllm.core.tensor import TensorOps, Weight

Array = NDArray[np.float32]
Floats = Callable[[Weight], Array]


@functools.cache
def tile_rows() -> int:
    """How many rows every matrix product has, padded with zeros.

    BLAS orders its sums by the shape of the product, so a fixed shape makes a row's result independent of the
    batch it is in; unless BLAS also treats the rows of one product differently, as some of OpenBLAS's kernels
    do from a number of rows on. Then fewer are taken: a single one is always right, and slow.
    """
    return next((rows for rows in (16, 8, 4) if all(_are_alike(rows, *shape) for shape in _TRIED)), 1)


_TRIED = ((16, 16), (48, 64), (300, 64), (64, 33), (1000, 576), (576, 1536))
"""(outputs, inputs) of products: small and large ones take different ways through BLAS."""


def _are_alike(rows: int, outputs: int, inputs: int) -> bool:
    """Whether each of so many equal rows gets the same bits."""
    rng = np.random.default_rng(0)
    matrix = rng.standard_normal((outputs, inputs), np.float32)
    product = np.tile(rng.standard_normal(inputs, np.float32), (rows, 1)) @ matrix.T
    return bool((product == product[0]).all())


class ReferenceOps(TensorOps[Array]):
    """One pass over one batch. `floats` gives a weight's exact float32 values; `pool` is the KV of every
    layer, f32[layers, 2, num_blocks * block_size, kv_heads, head_dim], which `attend` writes."""

    def __init__(
        self, spec: ModelSpec, batch: ForwardBatch, pool: Array, block_size: int, floats: Floats
    ) -> None:
        self._spec = spec
        self._batch = batch
        self._pool = pool
        self._block_size = block_size
        self._floats = floats

    def embed(self, table: Weight) -> Array:
        return self._floats(table)[self._batch.tokens]

    def rms_norm(self, x: Array, gain: Weight, eps: float) -> Array:
        weight = self._floats(gain)
        groups = x.reshape(len(x), x.shape[1] // len(weight), len(weight))
        mean_square = np.mean(groups * groups, axis=-1, keepdims=True, dtype=np.float64)
        return (groups / np.sqrt(mean_square + eps) * weight).reshape(x.shape).astype(np.float32)

    def linear(self, x: Array, weight: Weight, bias: Weight | None = None) -> Array:
        matrix = self._floats(weight)
        product = np.empty((len(x), len(matrix)), np.float32)
        for start in range(0, len(x), tile_rows()):
            rows = x[start : start + tile_rows()]
            tile = np.zeros((tile_rows(), x.shape[1]), np.float32)
            tile[: len(rows)] = rows
            product[start : start + len(rows)] = (tile @ matrix.T)[: len(rows)]
        return product if bias is None else product + self._floats(bias)

    def rotate(self, x: Array, rope: int) -> Array:
        positions = self._batch.positions
        frequencies = np.array(self._spec.ropes[rope].inverse_frequencies)
        angles = positions[:, None, None].astype(np.float64) * frequencies
        magnitude = self._spec.ropes[rope].magnitude
        cos = (np.cos(angles) * magnitude).astype(np.float32)
        sin = (np.sin(angles) * magnitude).astype(np.float32)
        heads = x.reshape(len(x), x.shape[1] // self._spec.head_dim, self._spec.head_dim)
        first, second = np.split(heads, 2, axis=-1)
        rotated = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
        return rotated.reshape(x.shape)

    def attend(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        layer: int,
        window: int | None,
        scale: float,
        soft_cap: float | None,
    ) -> Array:
        kv_shape = (len(q), self._spec.num_kv_heads, self._spec.head_dim)
        self._pool[layer, 0, self._batch.slots] = k.reshape(kv_shape)
        self._pool[layer, 1, self._batch.slots] = v.reshape(kv_shape)
        out = np.empty_like(q)
        for token, slots in self._visible_slots(window):
            keys, values = self._pool[layer, 0, slots], self._pool[layer, 1, slots]  # [n, kv_heads, dim]
            heads = q[token].reshape(self._spec.num_kv_heads, -1, self._spec.head_dim)
            scores = np.einsum("hgd,nhd->hgn", heads, keys) * np.float32(scale)
            if soft_cap is not None:
                scores = np.float32(soft_cap) * np.tanh(scores / np.float32(soft_cap))
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            out[token] = np.einsum("hgn,nhd->hgd", weights, values).reshape(-1)
        return out

    def _visible_slots(self, window: int | None) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """(index of a token, the slots it attends to in order of position)."""
        batch = self._batch
        for row in range(batch.num_rows):
            for token in range(batch.row_starts[row], batch.row_starts[row + 1]):
                end = int(batch.positions[token]) + 1
                start = 0 if window is None else max(0, end - window)
                at = np.arange(start, end)
                blocks = batch.block_tables[row, at // self._block_size].astype(np.int64)
                yield token, blocks * self._block_size + at % self._block_size

    def gate(self, gate: Array, up: Array, activation: Activation) -> Array:
        activated = _silu(gate) if activation == "silu" else _gelu_tanh(gate)
        return activated * up

    def add(self, x: Array, y: Array) -> Array:
        return x + y

    def scale(self, x: Array, factor: float) -> Array:
        return x * np.float32(factor)

    def soft_cap(self, x: Array, cap: float) -> Array:
        capped: Array = np.float32(cap) * np.tanh(x / np.float32(cap))
        return capped

    def take_logit_rows(self, x: Array) -> Array:
        return x[self._batch.logit_rows]


def _silu(x: Array) -> Array:
    # exp of a non-positive number only, so that no input overflows.
    decay = np.exp(-np.abs(x))
    sigmoid: Array = np.where(x >= 0, 1 / (1 + decay), decay / (1 + decay))
    return x * sigmoid


def _gelu_tanh(x: Array) -> Array:
    inner = np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x * x * x)
    return np.asarray(np.float32(0.5) * x * (1 + np.tanh(inner)), np.float32)
