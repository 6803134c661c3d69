"""The obviously right block pool: a dict of records, a linear scan for everything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mvllm.core.kv.block_pool import BlockState


@dataclass
class BlockRecord:
    state: BlockState = BlockState.FREE
    readers: int = 0
    indexed: bool = False


@dataclass
class PoolModel:
    num_blocks: int
    blocks: dict[int, BlockRecord] = field(default_factory=dict)
    freed: list[int] = field(default_factory=list)  # FREE blocks, the one opened next last

    def __post_init__(self) -> None:
        self.blocks = {block_id: BlockRecord() for block_id in range(self.num_blocks)}
        self.freed = list(range(self.num_blocks - 1, -1, -1))

    def legal(self, verb: str, block_ids: Sequence[int]) -> bool:
        if len(set(block_ids)) != len(block_ids) or not set(block_ids) <= set(self.blocks):
            return False
        return all(self._legal_for(verb, self.blocks[block_id]) for block_id in block_ids)

    @staticmethod
    def _legal_for(verb: str, block: BlockRecord) -> bool:
        if verb == "index":
            return block.state is BlockState.SEALED and not block.indexed
        return (
            block.state
            in {
                "seal": (BlockState.OPEN,),
                "add_reader": (BlockState.SEALED, BlockState.IDLE),
                "drop_reader": (BlockState.SEALED,),
                "discard": (BlockState.OPEN,),
                "evict": (BlockState.IDLE,),
            }[verb]
        )

    def open(self, count: int) -> tuple[int, ...]:
        opened = tuple(self.freed.pop() for _ in range(count))
        for block_id in opened:
            self.blocks[block_id] = BlockRecord(BlockState.OPEN, readers=1)
        return opened

    def apply(self, verb: str, block_ids: Sequence[int]) -> list[int] | None:
        """Apply a legal verb; the result is that of the real one."""
        idle = [block_id for block_id in block_ids if self._apply_to(verb, block_id)]
        return idle if verb == "drop_reader" else None

    def _apply_to(self, verb: str, block_id: int) -> bool:
        """Returns whether the block fell idle."""
        block = self.blocks[block_id]
        if verb == "seal":
            block.state = BlockState.SEALED
        elif verb == "index":
            block.indexed = True
        elif verb == "add_reader":
            block.state = BlockState.SEALED
            block.readers += 1
        elif verb == "drop_reader":
            block.readers -= 1
            if block.readers == 0 and block.indexed:
                block.state = BlockState.IDLE
                return True
            if block.readers == 0:
                self._free(block_id)
        else:
            self._free(block_id)
        return False

    def _free(self, block_id: int) -> None:
        self.blocks[block_id] = BlockRecord()
        self.freed.append(block_id)
