"""The paged KV pool: one array per layer for keys and one for values, written in place."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mvllm.backends.mlx.device import DTYPES, require_memory
from mvllm.core.model.spec import ModelSpec
from mvllm.core.tensor import KvGeometry
from mvllm.core.types import BlockId


class KvPool:
    """Owns the arrays, keys before values, layer by layer: 2 * layers of
    [(num_blocks + 1) * kv_heads * block_size, head_dim]. The last block is scratch, where padding goes.

    The positions of one block and head lie together, so attention gathers a block of one head as one run.

    MLX writes an indexed assignment in place only if nothing else refers to the array, else it copies all of
    it. So a step hands in `arrays`, puts what comes back into `arrays` before it evaluates, and nobody
    keeps either.
    """

    def __init__(self, spec: ModelSpec, geometry: KvGeometry) -> None:
        """
        Raises:
            CapacityError: MLX can't have that much memory.
        """
        self._num_layers = spec.num_layers
        self._num_heads = spec.num_kv_heads
        self._head_dim = spec.head_dim
        self._block_size = geometry.block_size
        rows = (geometry.num_blocks + 1) * spec.num_kv_heads * geometry.block_size
        dtype = DTYPES[geometry.dtype]
        count = 2 * spec.num_layers
        require_memory(rows * spec.head_dim * dtype.size * count, "KV pool")
        self.arrays = [mx.zeros((rows, spec.head_dim), dtype) for _ in range(count)]
        mx.eval(self.arrays)

    def read(self, ids: Sequence[BlockId]) -> NDArray[np.float32]:
        """f32[len(ids), layers, 2, block_size, kv_heads, head_dim], a copy."""
        shape = (len(ids), self._num_layers, 2, self._block_size, self._num_heads, self._head_dim)
        blocks = np.empty(shape, np.float32)
        rows = self._rows(ids)
        for index, array in enumerate(self.arrays):
            values = np.array(array[rows].astype(mx.float32))
            by_head = values.reshape(len(ids), self._num_heads, self._block_size, self._head_dim)
            blocks[:, index // 2, index % 2] = by_head.swapaxes(1, 2)
        return blocks

    def write(self, ids: Sequence[BlockId], kv: NDArray[np.float32]) -> None:
        """Overwrite blocks with what `read` returns."""
        rows = self._rows(ids)
        for index, array in enumerate(self.arrays):
            by_head = kv[:, index // 2, index % 2].swapaxes(1, 2)
            values = np.ascontiguousarray(by_head, np.float32).reshape(-1, self._head_dim)
            array[rows] = mx.array(values).astype(array.dtype)
        mx.eval(self.arrays)

    def _rows(self, ids: Sequence[BlockId]) -> mx.array:
        per_block = self._num_heads * self._block_size
        rows = np.array(ids, np.int64)[:, None] * per_block + np.arange(per_block)
        return mx.array(rows.reshape(-1).astype(np.int32))
