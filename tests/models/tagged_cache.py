"""KV contents without floats: each slot holds a tag of everything its value would depend on."""

from __future__ import annotations

from collections.abc import Sequence

Tag = tuple[str, tuple[int, ...]]


def tag(salt: str, tokens: Sequence[int]) -> Tag:
    """What the KV of the last of `tokens` is a function of."""
    return salt, tuple(tokens)


class TaggedCache:
    """Owns the contents of all slots; finds slots through block tables, as attention does."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._contents: list[Tag | None] = [None] * (num_blocks * block_size)

    def slot(self, block_ids: Sequence[int], position: int) -> int:
        return block_ids[position // self._block_size] * self._block_size + position % self._block_size

    def write(self, block_ids: Sequence[int], salt: str, tokens: Sequence[int], start: int) -> set[int]:
        """Compute positions `[start, len(tokens))`; returns the slots written."""
        slots = set()
        for position in range(start, len(tokens)):
            slot = self.slot(block_ids, position)
            self._contents[slot] = tag(salt, tokens[: position + 1])
            slots.add(slot)
        return slots

    def holds(self, block_ids: Sequence[int], salt: str, tokens: Sequence[int]) -> bool:
        """Whether the KV of every position of `tokens` is what it would be for this sequence alone."""
        return all(
            self._contents[self.slot(block_ids, position)] == tag(salt, tokens[: position + 1])
            for position in range(len(tokens))
        )
