"""The blocks of one row, in the order of its positions."""

from __future__ import annotations

from collections.abc import Sequence

from mvllm.core.types import BlockId


class BlockTable:
    """Owns one row's block list and computed length; does not change the state of any block.

        [0, sealed * b)       SEALED blocks, sealed = num_computed // b; shared with other rows
        [sealed * b, held)    OPEN blocks: the rest of the computed positions, then those granted

    b is the block size; held is the number of positions the blocks have room for. Methods that shorten
    the table return what it no longer holds, for the caller to release.
    """

    __slots__ = ("block_ids", "num_computed", "salt")

    def __init__(self, salt: str, block_ids: tuple[BlockId, ...], num_computed: int) -> None:
        self.salt = salt
        self.block_ids = block_ids
        self.num_computed = num_computed

    def append(self, block_ids: Sequence[BlockId]) -> None:
        """Add blocks at the end."""
        self.block_ids += tuple(block_ids)

    def replace(self, index: int, block_id: BlockId) -> BlockId:
        """Put another block at `index`; returns the one that was there."""
        replaced = self.block_ids[index]
        self.block_ids = (*self.block_ids[:index], block_id, *self.block_ids[index + 1 :])
        return replaced

    def truncate(self, num_blocks: int) -> tuple[BlockId, ...]:
        """Keep the first `num_blocks` blocks; returns the others."""
        removed = self.block_ids[num_blocks:]
        self.block_ids = self.block_ids[:num_blocks]
        return removed
