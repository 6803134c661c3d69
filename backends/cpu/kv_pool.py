"""How keys and values lie in memory, and their exchange with host arrays.

Block, layer and kv head follow one another, so that the blocks in use lie together; for each head first the
keys of a block, then its values:

    keys     [block_size / tile][head_dim][tile]     `tile` positions interleaved, so that a vector holds one
                                                     component of consecutive positions
    values   [block_size][padded_dim]                head_dim rounded up to 16, the rest zeros

The tile is the greatest common divisor of 16 and the block size. With a tile of 16 the scores are computed
straight from the blocks; smaller tiles are first put together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mvllm.backends.cpu.memory import aligned_zeros, round_up
from mvllm.core.errors import InvariantViolation
from mvllm.core.model.spec import ModelSpec
from mvllm.core.tensor import KvGeometry

TILE = 16
"""Positions that one vector of scores covers, on every instruction set."""

DTYPES: dict[str, type[np.floating[Any]]] = {"f32": np.float32, "f16": np.float16}
VALUE_BYTES = {"f32": 4, "f16": 2}


@dataclass(frozen=True)
class KvLayout:
    """Sizes of a pool. Offsets in bytes."""

    num_layers: int
    num_blocks: int
    block_size: int
    kv_heads: int
    head_dim: int
    dtype: str

    @property
    def tile(self) -> int:
        return math.gcd(TILE, self.block_size)

    @property
    def padded_dim(self) -> int:
        return round_up(self.head_dim, TILE)

    @property
    def value_bytes(self) -> int:
        return VALUE_BYTES[self.dtype]

    @property
    def value_offset(self) -> int:
        """From a head's keys to its values."""
        return round_up(self.block_size * self.head_dim * self.value_bytes)

    @property
    def head_bytes(self) -> int:
        return self.value_offset + round_up(self.block_size * self.padded_dim * self.value_bytes)

    @property
    def layer_bytes(self) -> int:
        """Of one layer in one block."""
        return self.kv_heads * self.head_bytes

    @property
    def block_bytes(self) -> int:
        """Of all layers."""
        return self.num_layers * self.layer_bytes


def layout_for(spec: ModelSpec, geometry: KvGeometry) -> KvLayout:
    """The layout of a model's pool."""
    return KvLayout(
        spec.num_layers,
        geometry.num_blocks,
        geometry.block_size,
        spec.num_kv_heads,
        spec.head_dim,
        geometry.dtype,
    )


class KvPool:
    """The KV memory of a model. Owns it; compiled code writes it during a step, `write` in between."""

    def __init__(self, layout: KvLayout) -> None:
        """Reserve memory; pages are taken when first written.

        Raises:
            CapacityError: the system refuses.
        """
        self.layout = layout
        memory = aligned_zeros(layout.num_blocks * layout.block_bytes, "KV cache")
        self._address = memory.ctypes.data
        shape = (
            layout.num_blocks,
            layout.num_layers,
            layout.kv_heads,
            layout.head_bytes // layout.value_bytes,
        )
        self._heads = memory.view(DTYPES[layout.dtype]).reshape(shape)

    def layer_address(self, layer: int) -> int:
        """Where `layer` starts in block 0."""
        return self._address + layer * self.layout.layer_bytes

    def read(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """f32[len(ids), layers, 2, block_size, kv_heads, head_dim], a copy.

        Raises:
            InvariantViolation: there is no such block.
        """
        layout = self.layout
        shape = (len(ids), layout.num_layers, 2, layout.block_size, layout.kv_heads, layout.head_dim)
        result = np.empty(shape, np.float32)
        for index, block in enumerate(self._checked(ids)):
            keys, values = self._views(block)
            result[index, :, 0] = keys.reshape(result[index, :, 0].shape)
            result[index, :, 1] = values
        return result

    def write(self, ids: Sequence[int], kv: NDArray[np.float32]) -> None:
        """Overwrite blocks with what `read` returned.

        Raises:
            InvariantViolation: there is no such block, or the array has another shape.
        """
        layout = self.layout
        shape = (len(ids), layout.num_layers, 2, layout.block_size, layout.kv_heads, layout.head_dim)
        if kv.shape != shape:
            raise InvariantViolation(f"KV of {len(ids)} blocks has shape {shape}, got {kv.shape}")
        for index, block in enumerate(self._checked(ids)):
            keys, values = self._views(block)
            with np.errstate(over="ignore"):
                keys[...] = kv[index, :, 0].reshape(keys.shape)
                values[...] = kv[index, :, 1]

    def _checked(self, ids: Sequence[int]) -> Sequence[int]:
        for block in ids:
            if not 0 <= block < self.layout.num_blocks:
                raise InvariantViolation(f"block {block} is outside [0, {self.layout.num_blocks})")
        return ids

    def _views(self, block: int) -> tuple[NDArray[np.floating[Any]], NDArray[np.floating[Any]]]:
        """Views of a block: keys [layers, tiles, tile, heads, dim], values [layers, offsets, heads, dim]."""
        layout = self.layout
        heads = self._heads[block]
        tiles = layout.block_size // layout.tile
        keys = heads[..., : layout.block_size * layout.head_dim]
        keys = keys.reshape(layout.num_layers, layout.kv_heads, tiles, layout.head_dim, layout.tile)
        start = layout.value_offset // layout.value_bytes
        values = heads[..., start : start + layout.block_size * layout.padded_dim]
        values = values.reshape(layout.num_layers, layout.kv_heads, layout.block_size, layout.padded_dim)
        return keys.transpose(0, 2, 4, 1, 3), values[..., : layout.head_dim].transpose(0, 2, 1, 3)
