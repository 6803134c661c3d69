"""Index of sealed blocks by what they hold, and the order in which unused ones are given up.

A node is one block. Its key is (parent, tokens): the parent is the block before it or, for the first
block of a sequence, the salt of its namespace. Keys are compared by equality of tokens, so that equal
hashes of unequal tokens do no harm. A node goes only when it is a leaf, hence the parent of a node is
always in the trie and a block id names one path as long as the node exists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from mvllm.core.errors import InvariantViolation
from mvllm.core.types import BlockId, TokenId

NodeKey = tuple[BlockId | str, tuple[TokenId, ...]]
"""(parent block, or salt at the root; the `block_size` tokens of the block)."""


@dataclass(slots=True)
class _Node:
    key: NodeKey
    num_children: int = 0
    last_used: int = 0  # tick of the last `touch`


class PrefixTrie:
    """Owns the mapping from token paths to blocks and its clock; does not own blocks or reader counts.

    Args:
        block_size: tokens per block.
        is_idle: tells whether nobody reads a block now; only such blocks are evicted.
    """

    def __init__(self, block_size: int, is_idle: Callable[[BlockId], bool]) -> None:
        self._block_size = block_size
        self._is_idle = is_idle
        self._block_by_key: dict[NodeKey, BlockId] = {}
        self._nodes: dict[BlockId, _Node] = {}
        self._clock = 0
        # (tick, block) of leaves. Every idle leaf is in it; entries that are none of that any more are
        # recognised and dropped when they come up.
        self._leaves: list[tuple[int, BlockId]] = []

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, block_id: BlockId) -> bool:
        return block_id in self._nodes

    def key(self, block_id: BlockId) -> NodeKey | None:
        """Key of an indexed block, else None. One object for the lifetime of the node: `is` tells nodes
        apart that had the same block at different times.
        """
        node = self._nodes.get(block_id)
        return None if node is None else node.key

    def lookup(
        self, token_ids: Sequence[TokenId], salt: str, limit: int, known: Sequence[BlockId] = ()
    ) -> list[BlockId]:
        """Longest indexed path along `token_ids[:limit]` in the namespace `salt`. Changes nothing.

        Args:
            known: beginning of that path, from an earlier lookup.
        """
        path = list(known)
        parent: BlockId | str = path[-1] if path else salt
        size = self._block_size
        for end in range((len(path) + 1) * size, limit + 1, size):
            block_id = self._block_by_key.get((parent, tuple(token_ids[end - size : end])))
            if block_id is None:
                break
            path.append(block_id)
            parent = block_id
        return path

    def is_path(self, block_ids: Sequence[BlockId], salt: str) -> bool:
        """Whether the blocks are indexed and lie one below the other from the root of `salt`."""
        parent: BlockId | str = salt
        for block_id in block_ids:
            node = self._nodes.get(block_id)
            if node is None or node.key[0] != parent:
                return False
            parent = block_id
        return True

    def insert(self, key: NodeKey, block_id: BlockId) -> BlockId:
        """Index `block_id` under `key` unless another block is there already. Idempotent.

        Returns:
            The canonical block of `key`: `block_id` itself, or the one that it duplicates.

        Raises:
            InvariantViolation: the parent is not indexed, the number of tokens is not the block size,
                or the block is indexed under another key.
        """
        canonical = self._block_by_key.get(key)
        if canonical is not None:
            return canonical
        parent, tokens = key
        parent_node = None if isinstance(parent, str) else self._nodes.get(parent)
        if parent_node is None and not isinstance(parent, str):
            raise InvariantViolation(f"insert: parent block {parent} of block {block_id} is not indexed")
        if len(tokens) != self._block_size:
            raise InvariantViolation(f"insert: {len(tokens)} tokens in a block of {self._block_size}")
        if block_id in self._nodes:
            raise InvariantViolation(f"insert: block {block_id} is already indexed under another key")
        if parent_node is not None:
            parent_node.num_children += 1
        self._block_by_key[key] = block_id
        self._nodes[block_id] = _Node(key)
        return block_id

    def touch(self, block_ids: Sequence[BlockId]) -> None:
        """Note that indexed blocks were in use until now. To be called when their last reader leaves.

        All of one call get the same tick: a path that falls idle together goes leaf by leaf.

        Raises:
            InvariantViolation: a block is not indexed.
        """
        if not self._nodes.keys() >= set(block_ids):
            raise InvariantViolation(f"touch: not all of the blocks {list(block_ids)} are indexed")
        self._clock += 1
        for block_id in block_ids:
            node = self._nodes[block_id]
            node.last_used = self._clock
            if node.num_children == 0:
                heappush(self._leaves, (self._clock, block_id))
        if len(self._leaves) > 2 * len(self._nodes) + 64:
            self._drop_stale_leaves()

    def evict(self, count: int) -> list[BlockId]:
        """Remove up to `count` idle nodes, each time the idle leaf with the least (tick, block id).

        Returns:
            The blocks removed, in that order; fewer than `count` only if no idle leaf is left.
        """
        evicted: list[BlockId] = []
        while len(evicted) < count and self._leaves:
            tick, block_id = heappop(self._leaves)
            if self._is_leaf_since(block_id, tick) and self._is_idle(block_id):
                self._remove(block_id)
                evicted.append(block_id)
        return evicted

    def check_integrity(self) -> None:
        """Recompute links, child counts and the eviction queue (T5; T7 needs every idle leaf queued).

        Raises:
            InvariantViolation: they contradict each other.
        """
        if {node.key: block_id for block_id, node in self._nodes.items()} != self._block_by_key:
            raise InvariantViolation("the trie's keys and nodes do not correspond")
        num_children = dict.fromkeys(self._nodes, 0)
        for block_id, node in self._nodes.items():
            parent = node.key[0]
            if isinstance(parent, str):
                continue
            if parent not in num_children:
                raise InvariantViolation(f"T5: block {block_id} is indexed, its parent {parent} is not")
            num_children[parent] += 1
        queued = set(self._leaves)
        for block_id, node in self._nodes.items():
            if node.num_children != num_children[block_id]:
                raise InvariantViolation(
                    f"block {block_id} has {num_children[block_id]} children, {node.num_children} counted"
                )
            is_idle_leaf = node.num_children == 0 and self._is_idle(block_id)
            if is_idle_leaf and (node.last_used, block_id) not in queued:
                raise InvariantViolation(f"idle leaf {block_id} can't be evicted: it is not queued")

    def _is_leaf_since(self, block_id: BlockId, tick: int) -> bool:
        node = self._nodes.get(block_id)
        return node is not None and node.num_children == 0 and node.last_used == tick

    def _remove(self, block_id: BlockId) -> None:
        key = self._nodes.pop(block_id).key
        del self._block_by_key[key]
        parent = key[0]
        if isinstance(parent, str):
            return
        parent_node = self._nodes[parent]
        parent_node.num_children -= 1
        if parent_node.num_children == 0:
            heappush(self._leaves, (parent_node.last_used, parent))

    def _drop_stale_leaves(self) -> None:
        """Keep the queue within a constant factor of the trie, at a cost spread over many touches."""
        self._leaves = [entry for entry in set(self._leaves) if self._is_leaf_since(entry[1], entry[0])]
        heapify(self._leaves)
