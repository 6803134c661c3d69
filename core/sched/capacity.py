"""Block arithmetic of one view: what rows need and what the pool can give. Pure; allocates nothing.

Terms. A row *holds* the blocks of its table, or, before its admission, those of its prefix hit. *Available*
are the FREE and the IDLE blocks: idle ones are evicted on demand. A hit *pins* idle blocks, which takes them
from what is available. *Known positions* are all tokens a row has now and the next one.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from mvllm.core.request import Phase
from mvllm.core.step import RowView, SchedulerView
from mvllm.core.types import BlockId, ceil_div

NO_BLOCKS: frozenset[BlockId] = frozenset()


def worst_case_blocks(total_limit: int, block_size: int) -> int:
    """Most blocks a request can ever hold: its last token is never cached."""
    return ceil_div(total_limit - 1, block_size)


def known_positions(row: RowView) -> int:
    """Positions of the row's tokens and of the next one, as far as they can ever be cached."""
    return min(row.num_tokens + 1, row.total_limit - 1)


@dataclass(frozen=True)
class Capacity:
    """Answers questions about blocks for one view. All counts are in blocks of `block_size` positions."""

    view: SchedulerView
    block_size: int

    @property
    def num_available(self) -> int:
        return self.view.num_free + self.view.num_idle

    def num_held(self, row: RowView) -> int:
        return len(row.block_ids if row.phase is Phase.RUNNING else row.probe.hit_block_ids)

    def start(self, row: RowView) -> int:
        """The first position that the row has yet to compute."""
        if row.phase is Phase.RUNNING:
            return row.num_computed
        return len(row.probe.hit_block_ids) * self.block_size

    def new_blocks(self, row: RowView, end: int) -> int:
        """Blocks to open for the row so that its positions `[0, end)` are covered."""
        return max(0, ceil_div(end, self.block_size) - self.num_held(row))

    def minimum_blocks(self, rows: Collection[RowView]) -> int:
        """Blocks to open so that each of these running rows can compute one position."""
        block_size = self.block_size
        return sum([row.num_computed >= len(row.block_ids) * block_size for row in rows])

    def promised_blocks(self, row: RowView, end: int) -> int:
        """Blocks that the row will still need for its known positions once `[0, end)` is covered."""
        return self.new_blocks(row, max(end, known_positions(row))) - self.new_blocks(row, end)

    def released_by(self, victims: Collection[RowView]) -> frozenset[BlockId]:
        """Blocks that preempting these running rows makes available: those in no other row's table."""
        if not victims:
            return NO_BLOCKS
        victim_ids = {row.id for row in victims}
        survivors = [row for row in self.view.rows if row.id not in victim_ids]
        kept = {block for row in survivors for block in row.block_ids}
        return frozenset(block for row in victims for block in row.block_ids if block not in kept)

    def pinned_by(self, row: RowView, released: frozenset[BlockId] = NO_BLOCKS) -> frozenset[BlockId]:
        """Otherwise available blocks that the waiting row's prefix hit pins.

        Args:
            released: blocks that a preemption makes available in the same plan.
        """
        if not released:
            return row.probe.idle_block_ids
        return row.probe.idle_block_ids | released.intersection(row.probe.hit_block_ids)
