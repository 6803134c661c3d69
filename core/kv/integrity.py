"""What pool, trie and tables must say of each other, recomputed from scratch.

The letters are those of docs/INVARIANTS.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from mvllm.core.errors import InvariantViolation
from mvllm.core.kv.block_pool import BlockPool, BlockState
from mvllm.core.kv.block_table import BlockTable
from mvllm.core.kv.prefix_trie import PrefixTrie
from mvllm.core.types import BlockId, RequestId, ceil_div


def check_integrity(
    pool: BlockPool,
    trie: PrefixTrie,
    tables: Mapping[RequestId, BlockTable],
    block_size: int,
    caching: bool,
) -> None:
    """Verify P1-P4, T5, T6, K3, K8 and K9 between steps; changes nothing.

    Raises:
        InvariantViolation: one of them does not hold; the message begins with its letter.
    """
    pool.check_integrity()
    trie.check_integrity()
    readers = Counter(block_id for table in tables.values() for block_id in table.block_ids)
    _check_pool_agrees(pool, trie, readers)
    for id, table in tables.items():
        _check_table(id, table, pool, trie, block_size, caching)
    num_accounted = len(readers) + pool.num_idle + pool.num_free
    if num_accounted != pool.num_blocks:
        raise InvariantViolation(f"K9: {num_accounted} blocks accounted for, of {pool.num_blocks}")


def _check_pool_agrees(pool: BlockPool, trie: PrefixTrie, readers: Counter[BlockId]) -> None:
    for block_id in map(BlockId, range(pool.num_blocks)):
        if pool.num_readers(block_id) != readers[block_id]:
            raise InvariantViolation(
                f"P2: block {block_id} is in {readers[block_id]} tables, its count is "
                f"{pool.num_readers(block_id)}"
            )
        if pool.is_indexed(block_id) != (block_id in trie):
            raise InvariantViolation(f"P2: pool and trie disagree whether block {block_id} is indexed")
        key = trie.key(block_id)
        parent = None if key is None else key[0]
        if isinstance(parent, int) and readers[parent] < readers[block_id]:
            raise InvariantViolation(f"T6: block {block_id} has more readers than its parent {parent}")


def _check_table(
    id: RequestId, table: BlockTable, pool: BlockPool, trie: PrefixTrie, block_size: int, caching: bool
) -> None:
    if len(set(table.block_ids)) != len(table.block_ids):
        raise InvariantViolation(f"P2: row {id!r} has a block twice: {table.block_ids}")
    if len(table.block_ids) < ceil_div(table.num_computed, block_size):
        raise InvariantViolation(
            f"K3: row {id!r} has {table.num_computed} computed positions in {len(table.block_ids)} blocks"
        )
    sealed = table.num_computed // block_size
    for index, block_id in enumerate(table.block_ids):
        expected = BlockState.SEALED if index < sealed else BlockState.OPEN
        if pool.state(block_id) is not expected:
            raise InvariantViolation(
                f"P4: block {block_id} at index {index} of row {id!r} is {pool.state(block_id).name}, "
                f"expected {expected.name}"
            )
    if caching and not trie.is_path(table.block_ids[:sealed], table.salt):
        raise InvariantViolation(f"K8: the full blocks of row {id!r} are no indexed path of its namespace")
