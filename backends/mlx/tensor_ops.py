"""`TensorOps` on MLX: every operation adds to a lazy graph, which is evaluated once per step."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mvllm.backends.mlx.attention import GroupInputs, attend_group
from mvllm.backends.mlx.batch_plan import BatchArrays, GraphShape
from mvllm.backends.mlx.weights import DeviceWeights, Matrix
from mvllm.core.model.spec import Activation, ModelSpec
from mvllm.core.tensor import TensorOps, Weight


@dataclass(frozen=True, eq=False)
class BatchInputs:
    """`BatchArrays` on the device, where shapes and meaning are explained."""

    tokens: mx.array
    positions: mx.array
    slots: mx.array
    logit_rows: mx.array
    answers: mx.array
    groups: tuple[GroupInputs, ...]


def to_device(arrays: BatchArrays) -> list[mx.array]:
    """A batch's arrays as one list, which a compiled graph takes; `from_list` puts them back."""
    groups = [
        array
        for group in arrays.groups
        for array in (group.queries, group.positions, group.context_lens, group.tables)
    ]
    fixed = [arrays.tokens, arrays.positions, arrays.slots, arrays.logit_rows, arrays.answers]
    return [mx.array(array) for array in (*fixed, *groups)]


def from_list(arrays: list[mx.array]) -> BatchInputs:
    tokens, positions, slots, logit_rows, answers, *rest = arrays
    groups = [GroupInputs(*rest[start : start + 4]) for start in range(0, len(rest), 4)]
    return BatchInputs(tokens, positions, slots, logit_rows, answers, tuple(groups))


class MlxOps(TensorOps[mx.array]):
    """One pass over one batch.

    Changes `pool`, the KV pool's arrays (see `KvPool`): `attend` replaces a layer's two by their successors.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: DeviceWeights,
        pool: list[mx.array],
        *,
        batch: BatchInputs,
        shape: GraphShape,
        block_size: int,
        rows_apart: int,
    ) -> None:
        self._spec = spec
        self._weights = weights
        self._pool = pool
        self._batch = batch
        self._shape = shape
        self._block_size = block_size
        self._rows_apart = rows_apart
        self._pool_rows = self._rows_of_slots()
        self._rotations: dict[int, tuple[mx.array, mx.array]] = {}

    def embed(self, table: Weight) -> mx.array:
        return self._weights.matrix(table).rows(self._batch.tokens)

    def rms_norm(self, x: mx.array, gain: Weight, eps: float) -> mx.array:
        weight = self._weights.vector(gain)
        groups = x.reshape(len(x), -1, len(weight))
        return mx.fast.rms_norm(groups, weight, eps).reshape(x.shape)

    def linear(self, x: mx.array, weight: Weight, bias: Weight | None = None) -> mx.array:
        matrix = self._weights.matrix(weight)
        apart = 1 < len(x) <= self._rows_apart
        product = row_by_row(matrix, x) if apart else matrix.product(x)
        return product if bias is None else product + self._weights.vector(bias)

    def rotate(self, x: mx.array, rope: int) -> mx.array:
        cos, sin = self._rotation(rope)
        heads = x.reshape(len(x), -1, self._spec.head_dim)
        first, second = mx.split(heads, 2, axis=-1)
        rotated = mx.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
        return rotated.reshape(x.shape)

    def attend(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        *,
        layer: int,
        window: int | None,
        scale: float,
        soft_cap: float | None,
    ) -> mx.array:
        keys, values = (self._store(2 * layer + part, new) for part, new in enumerate((k, v)))
        heads = q.reshape(len(q), self._spec.num_heads, self._spec.head_dim)
        mixed = [
            attend_group(
                heads if self._shape.in_order else mx.take(heads, group.queries, axis=0),
                keys,
                values,
                group=group,
                window=window,
                scale=scale,
                soft_cap=soft_cap,
            )
            for group in self._batch.groups
        ]
        if self._shape.in_order:
            return mixed[0].reshape(q.shape)
        return mx.take(mx.concatenate(mixed), self._batch.answers, axis=0).reshape(q.shape)

    def gate(self, gate: mx.array, up: mx.array, activation: Activation) -> mx.array:
        activated = gate * mx.sigmoid(gate) if activation == "silu" else _gelu_tanh(gate)
        return activated * up

    def add(self, x: mx.array, y: mx.array) -> mx.array:
        return x + y

    def scale(self, x: mx.array, factor: float) -> mx.array:
        return x * factor

    def soft_cap(self, x: mx.array, cap: float) -> mx.array:
        return mx.tanh(x / cap) * cap

    def take_logit_rows(self, x: mx.array) -> mx.array:
        return mx.take(x, self._batch.logit_rows, axis=0)

    def _rows_of_slots(self) -> mx.array:
        """[T * kv_heads] the pool's row of every token and head, see `KvPool`."""
        heads = mx.arange(self._spec.num_kv_heads)
        blocks, offsets = mx.divmod(self._batch.slots, self._block_size)
        first = (blocks * self._spec.num_kv_heads)[:, None] + heads
        return (first * self._block_size + offsets[:, None]).reshape(-1)

    def _store(self, index: int, new: mx.array) -> mx.array:
        """Write [T, kv_heads * head_dim] into a pool array and leave its successor in its place."""
        array = self._pool[index]
        array[self._pool_rows] = new.reshape(-1, self._spec.head_dim).astype(array.dtype)
        self._pool[index] = array
        blocks = (-1, self._spec.num_kv_heads, self._block_size, self._spec.head_dim)
        return array.reshape(blocks)

    def _rotation(self, rope: int) -> tuple[mx.array, mx.array]:
        """cos and sin at the batch's positions, each [T, 1, head_dim / 2]."""
        if rope not in self._rotations:
            cos, sin = (
                mx.take(table, self._batch.positions, axis=0)[:, None].astype(self._weights.dtype)
                for table in self._weights.rope(rope)
            )
            self._rotations[rope] = cos, sin
        return self._rotations[rope]


def row_by_row(matrix: Matrix, x: mx.array) -> mx.array:
    """[M, K] -> [M, N], each row a product of its own."""
    return mx.concatenate([matrix.product(x[row : row + 1]) for row in range(len(x))])


def _gelu_tanh(x: mx.array) -> mx.array:
    inner = float(np.sqrt(2 / np.pi)) * (x + 0.044715 * x * x * x)
    return 0.5 * x * (1 + mx.tanh(inner))
