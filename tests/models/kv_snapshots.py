"""Complete, comparable copies of KV state: equal before and after a call that must change nothing."""

from __future__ import annotations

import copy

from mvllm.core.kv.block_pool import BlockPool
from mvllm.core.kv.kv_manager import KvManager
from mvllm.core.kv.prefix_trie import PrefixTrie


def pool_snapshot(pool: BlockPool) -> dict[str, object]:
    return copy.deepcopy(vars(pool))


def trie_snapshot(trie: PrefixTrie) -> dict[str, object]:
    return copy.deepcopy({name: value for name, value in vars(trie).items() if name != "_is_idle"})


def manager_snapshot(kv: KvManager) -> tuple[object, ...]:
    tables = {id: (table.salt, table.block_ids, table.num_computed) for id, table in kv._tables.items()}
    return pool_snapshot(kv._pool), trie_snapshot(kv._trie), tables
