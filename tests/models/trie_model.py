"""The obviously right prefix index: a dict from whole prefixes to blocks, a linear scan for everything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

Prefix = tuple[str, tuple[int, ...]]
"""(salt, all tokens up to the end of the block)."""


@dataclass
class TrieModel:
    block_size: int
    blocks: dict[Prefix, int] = field(default_factory=dict)
    readers: dict[int, int] = field(default_factory=dict)
    last_used: dict[int, int] = field(default_factory=dict)
    clock: int = 0

    def prefixes(self, tokens: Sequence[int], salt: str, limit: int) -> list[Prefix]:
        """Every full-block prefix of `tokens[:limit]`, shortest first."""
        ends = range(self.block_size, limit + 1, self.block_size)
        return [(salt, tuple(tokens[:end])) for end in ends]

    def lookup(self, tokens: Sequence[int], salt: str, limit: int) -> list[int]:
        path = []
        for prefix in self.prefixes(tokens, salt, limit):
            if prefix not in self.blocks:
                break
            path.append(self.blocks[prefix])
        return path

    def insert(self, prefix: Prefix, block_id: int) -> int:
        self.readers.setdefault(block_id, 0)
        return self.blocks.setdefault(prefix, block_id)

    def pin(self, path: Sequence[int]) -> None:
        for block_id in path:
            self.readers[block_id] += 1

    def unpin(self, path: Sequence[int]) -> list[int]:
        """One reader leaves; returns the blocks that nobody reads any more, stamped as used until now."""
        self.clock += 1
        idle = []
        for block_id in path:
            self.readers[block_id] -= 1
            if self.readers[block_id] == 0:
                self.last_used[block_id] = self.clock
                idle.append(block_id)
        return idle

    def is_idle(self, block_id: int) -> bool:
        return self.readers[block_id] == 0

    def idle_blocks(self) -> list[int]:
        return [block_id for block_id in self.blocks.values() if self.is_idle(block_id)]

    def evict(self, count: int) -> list[int]:
        """Each time the idle leaf with the least (tick, block)."""
        evicted: list[int] = []
        while len(evicted) < count and (leaves := self._idle_leaves()):
            _, block_id, prefix = min(leaves)
            del self.blocks[prefix], self.readers[block_id], self.last_used[block_id]
            evicted.append(block_id)
        return evicted

    def _idle_leaves(self) -> list[tuple[int, int, Prefix]]:
        parents = {(salt, tokens[: -self.block_size]) for salt, tokens in self.blocks}
        return [
            (self.last_used[block_id], block_id, prefix)
            for prefix, block_id in self.blocks.items()
            if prefix not in parents and self.is_idle(block_id)
        ]
