"""States of the physical KV blocks, one verb per transition.

    FREE --open--> OPEN --seal--> SEALED --drop_reader--> IDLE --evict--> FREE

See README.md of this folder for the whole diagram.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from mvllm.core.errors import CapacityError, ConfigError, InvariantViolation
from mvllm.core.types import BlockId


class BlockState(Enum):
    """Where a block stands."""

    FREE = "free"  # holds nothing
    OPEN = "open"  # writable; its one owner counts as its one reader
    SEALED = "sealed"  # full and final, with at least one reader
    IDLE = "idle"  # full, final and indexed, without readers: evictable


class BlockPool:
    """Owns state, reader count and index flag of every block; does not know tokens, tables or tensors.

    Verbs take distinct block ids and apply to all of them or, raising, to none. The block that became
    FREE last is opened first; a new pool hands out 0, 1, 2, ...

    Raises:
        ConfigError: on construction with fewer than one block.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ConfigError(f"a block pool needs at least 1 block, got {num_blocks}")
        self.num_blocks = num_blocks
        self._states = [BlockState.FREE] * num_blocks
        self._readers = [0] * num_blocks
        self._indexed = [False] * num_blocks
        self._free = [BlockId(block_id) for block_id in reversed(range(num_blocks))]  # opened from the end
        self._num_idle = 0

    @property
    def num_free(self) -> int:
        """FREE blocks."""
        return len(self._free)

    @property
    def num_idle(self) -> int:
        """IDLE blocks."""
        return self._num_idle

    def state(self, block_id: BlockId) -> BlockState:
        """State of a block of this pool."""
        return self._states[block_id]

    def num_readers(self, block_id: BlockId) -> int:
        """How many tables contain the block."""
        return self._readers[block_id]

    def is_indexed(self, block_id: BlockId) -> bool:
        """Whether the prefix trie names the block."""
        return self._indexed[block_id]

    def is_idle(self, block_id: BlockId) -> bool:
        """Whether the block is IDLE."""
        return self._states[block_id] is BlockState.IDLE

    def open(self, count: int) -> tuple[BlockId, ...]:
        """FREE -> OPEN for `count` blocks, which are returned.

        Raises:
            CapacityError: fewer than `count` blocks are FREE.
            InvariantViolation: `count` is negative.
        """
        if count < 0:
            raise InvariantViolation(f"open: the count must not be negative, got {count}")
        if count > len(self._free):
            raise CapacityError("KV blocks to open", needed=count, available=len(self._free))
        opened = tuple(self._free.pop() for _ in range(count))
        for block_id in opened:
            self._states[block_id] = BlockState.OPEN
            self._readers[block_id] = 1
        return opened

    def seal(self, block_ids: Sequence[BlockId]) -> None:
        """OPEN -> SEALED, not indexed; the owner becomes the one reader.

        Raises:
            InvariantViolation: a block is not OPEN, or is named twice.
        """
        self._require("seal", block_ids, BlockState.OPEN)
        for block_id in block_ids:
            self._states[block_id] = BlockState.SEALED

    def index(self, block_ids: Sequence[BlockId]) -> None:
        """Mark SEALED blocks as named by the trie: without readers they will be IDLE instead of FREE.

        Raises:
            InvariantViolation: a block is not SEALED, is already indexed, or is named twice.
        """
        self._require("index", block_ids, BlockState.SEALED)
        for block_id in block_ids:
            if self._indexed[block_id]:
                raise InvariantViolation(f"index: block {block_id} is already indexed")
        for block_id in block_ids:
            self._indexed[block_id] = True

    def add_reader(self, block_ids: Sequence[BlockId]) -> None:
        """SEALED or IDLE -> SEALED with one reader more.

        Raises:
            InvariantViolation: a block is neither SEALED nor IDLE, or is named twice.
        """
        self._require("add_reader", block_ids, BlockState.SEALED, BlockState.IDLE)
        for block_id in block_ids:
            if self._states[block_id] is BlockState.IDLE:
                self._states[block_id] = BlockState.SEALED
                self._num_idle -= 1
            self._readers[block_id] += 1

    def drop_reader(self, block_ids: Sequence[BlockId]) -> list[BlockId]:
        """SEALED with one reader less; after the last one IDLE if indexed, else FREE.

        Returns:
            The blocks that are IDLE now, in the order given.

        Raises:
            InvariantViolation: a block is not SEALED, or is named twice.
        """
        self._require("drop_reader", block_ids, BlockState.SEALED)
        idle = []
        for block_id in block_ids:
            self._readers[block_id] -= 1
            if self._readers[block_id]:
                continue
            if self._indexed[block_id]:
                self._states[block_id] = BlockState.IDLE
                idle.append(block_id)
            else:
                self._states[block_id] = BlockState.FREE
                self._free.append(block_id)
        self._num_idle += len(idle)
        return idle

    def discard(self, block_ids: Sequence[BlockId]) -> None:
        """OPEN -> FREE.

        Raises:
            InvariantViolation: a block is not OPEN, or is named twice.
        """
        self._require("discard", block_ids, BlockState.OPEN)
        for block_id in block_ids:
            self._states[block_id] = BlockState.FREE
            self._readers[block_id] = 0
        self._free.extend(block_ids)

    def evict(self, block_ids: Sequence[BlockId]) -> None:
        """IDLE -> FREE, no longer indexed.

        Raises:
            InvariantViolation: a block is not IDLE, or is named twice.
        """
        self._require("evict", block_ids, BlockState.IDLE)
        for block_id in block_ids:
            self._states[block_id] = BlockState.FREE
            self._indexed[block_id] = False
        self._free.extend(block_ids)
        self._num_idle -= len(block_ids)

    def check_integrity(self) -> None:
        """Recompute what states, counts and flags imply of each other (P1, P3).

        Raises:
            InvariantViolation: they contradict each other.
        """
        free = [block_id for block_id, state in enumerate(self._states) if state is BlockState.FREE]
        if sorted(self._free) != free:
            raise InvariantViolation(f"free list holds {sorted(self._free)}, but the FREE blocks are {free}")
        num_idle = sum(state is BlockState.IDLE for state in self._states)
        if num_idle != self._num_idle:
            raise InvariantViolation(f"{num_idle} blocks are IDLE, but {self._num_idle} were counted")
        for block_id, state in enumerate(self._states):
            readers, indexed = self._readers[block_id], self._indexed[block_id]
            legal = {
                BlockState.FREE: readers == 0 and not indexed,
                BlockState.OPEN: readers == 1 and not indexed,
                BlockState.SEALED: readers >= 1,
                BlockState.IDLE: readers == 0 and indexed,
            }
            if not legal[state]:
                raise InvariantViolation(
                    f"block {block_id} is {state.name} with {readers} readers, indexed: {indexed}"
                )

    def _require(self, verb: str, block_ids: Sequence[BlockId], *legal: BlockState) -> None:
        """Raise InvariantViolation unless the blocks are distinct, of this pool and in a legal state."""
        if len(block_ids) > 1 and len(set(block_ids)) != len(block_ids):
            raise InvariantViolation(f"{verb}: a block is named twice in {list(block_ids)}")
        for block_id in block_ids:
            if not 0 <= block_id < self.num_blocks:
                raise InvariantViolation(f"{verb}: block {block_id} is not in [0, {self.num_blocks})")
            if self._states[block_id] not in legal:
                expected = " or ".join(state.name for state in legal)
                found = self._states[block_id].name
                raise InvariantViolation(f"{verb}: block {block_id} is {found}, expected {expected}")
