"""Planted bugs of core/kv. Each is a subclass with one mistake, of a kind that other engines have had.

tests/property/test_kv_mutants.py shows that the state machines catch every one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count

from mvllm.core.kv.block_pool import BlockPool, BlockState
from mvllm.core.kv.block_table import BlockTable
from mvllm.core.kv.grant_check import blocks_needed
from mvllm.core.kv.kv_manager import KvManager
from mvllm.core.kv.lookup_memo import LookupMemo
from mvllm.core.kv.prefix_trie import NodeKey, PrefixTrie
from mvllm.core.step import KvCommit, KvGrant, PlannedRow, StepPlan
from mvllm.core.types import BlockId, RequestId, TokenId

_OUTSIDE = count()
"""Something that changes from run to run, as wall time would."""

# --- block pool ----------------------------------------------------------------------------------------


class MissingIncrementPool(BlockPool):
    """A hit on a block that is in use already is not counted (INVARIANTS 9)."""

    def add_reader(self, block_ids: Sequence[BlockId]) -> None:
        in_use = [block_id for block_id in block_ids if block_id in range(self.num_blocks)]
        in_use = [block_id for block_id in in_use if self._states[block_id] is BlockState.SEALED]
        super().add_reader(block_ids)
        for block_id in in_use:
            self._readers[block_id] -= 1


class FreedWhileSharedPool(BlockPool):
    """The first reader that leaves takes the block with it (INVARIANTS 9)."""

    def drop_reader(self, block_ids: Sequence[BlockId]) -> list[BlockId]:
        self._require("drop_reader", block_ids, BlockState.SEALED)
        for block_id in block_ids:
            self._readers[block_id] = 1
        return super().drop_reader(block_ids)


class OverloadedReleasePool(BlockPool):
    """Dropping a reader of an idle block evicts it instead of being refused."""

    def drop_reader(self, block_ids: Sequence[BlockId]) -> list[BlockId]:
        if block_ids and all(0 <= id < self.num_blocks and self.is_idle(id) for id in block_ids):
            self.evict(block_ids)
            return []
        return super().drop_reader(block_ids)


class PartialOpenPool(BlockPool):
    """Opens what there is before it finds that there is too little."""

    def open(self, count: int) -> tuple[BlockId, ...]:
        super().open(min(max(count, 0), self.num_free) if count > self.num_free else 0)
        return super().open(count)


class OneByOnePool(BlockPool):
    """Discards block by block: a list with a repeated id is refused half-way."""

    def discard(self, block_ids: Sequence[BlockId]) -> None:
        for block_id in block_ids:
            super().discard((block_id,))


class TwiceOpenedPool(BlockPool):
    """A block that was given out stays in the free list."""

    def open(self, count: int) -> tuple[BlockId, ...]:
        opened = super().open(count)
        self._free.extend(opened[-1:])
        return opened


class UnorderedPool(BlockPool):
    """The order of allocation depends on something outside of the pool's history (P9)."""

    def open(self, count: int) -> tuple[BlockId, ...]:
        opened = super().open(count)
        return opened[::-1] if next(_OUTSIDE) % 2 else opened


class ForgottenFlagPool(BlockPool):
    """An evicted block keeps its index flag (INVARIANTS 9: stale hash on reallocation)."""

    def evict(self, block_ids: Sequence[BlockId]) -> None:
        super().evict(block_ids)
        for block_id in block_ids:
            self._indexed[block_id] = True


# --- prefix trie ---------------------------------------------------------------------------------------


class RekeyedTrie(PrefixTrie):
    """Base of tries that see another key than the true one."""

    def seen(self, key: NodeKey) -> NodeKey:
        raise NotImplementedError

    def insert(self, key: NodeKey, block_id: BlockId) -> BlockId:
        return super().insert(self.seen(key), block_id)

    def is_path(self, block_ids: Sequence[BlockId], salt: str) -> bool:
        return all(block_id in self for block_id in block_ids)

    def lookup(
        self, token_ids: Sequence[TokenId], salt: str, limit: int, known: Sequence[BlockId] = ()
    ) -> list[BlockId]:
        path = list(known)
        size = self._block_size
        for end in range((len(path) + 1) * size, limit + 1, size):
            key = (path[-1] if path else salt, tuple(token_ids[end - size : end]))
            block_id = self._block_by_key.get(self.seen(key))
            if block_id is None:
                break
            path.append(block_id)
        return path


class PrefixIgnoringTrie(RekeyedTrie):
    """A block matches whatever came before it (INVARIANTS 9: block hash ignoring its prefix)."""

    def seen(self, key: NodeKey) -> NodeKey:
        return "", key[1]


class SaltIgnoringTrie(RekeyedTrie):
    """All namespaces are one."""

    def seen(self, key: NodeKey) -> NodeKey:
        return ("" if isinstance(key[0], str) else key[0]), key[1]


class BareHashTrie(RekeyedTrie):
    """Tokens are compared by their hash."""

    def seen(self, key: NodeKey) -> NodeKey:
        return key[0], (sum(hash(token) for token in key[1]),) * len(key[1])


class StaleKeyTrie(PrefixTrie):
    """An evicted block can still be found (INVARIANTS 9: stale hash on reallocation)."""

    def _remove(self, block_id: BlockId) -> None:
        key = self._nodes[block_id].key
        super()._remove(block_id)
        self._block_by_key[key] = block_id


class TouchingLookupTrie(PrefixTrie):
    """Looking is using."""

    def lookup(
        self, token_ids: Sequence[TokenId], salt: str, limit: int, known: Sequence[BlockId] = ()
    ) -> list[BlockId]:
        path = super().lookup(token_ids, salt, limit, known)
        self.touch(path)
        return path


class GreedyLookupTrie(PrefixTrie):
    """Matches a whole prompt and leaves nothing to compute."""

    def lookup(
        self, token_ids: Sequence[TokenId], salt: str, limit: int, known: Sequence[BlockId] = ()
    ) -> list[BlockId]:
        return super().lookup(token_ids, salt, len(token_ids), known)


class MostRecentFirstTrie(PrefixTrie):
    """Evicts what was used last."""

    def touch(self, block_ids: Sequence[BlockId]) -> None:
        self._clock -= 2
        super().touch(block_ids)


class OutsideClockTrie(PrefixTrie):
    """Ages come from a clock that is not the trie's own (T10)."""

    def touch(self, block_ids: Sequence[BlockId]) -> None:
        self._clock = next(_OUTSIDE) * 7 % 11
        super().touch(block_ids)


class BusyEvictingTrie(PrefixTrie):
    """Evicts leaves that are in use again."""

    def __init__(self, block_size: int, is_idle: Callable[[BlockId], bool]) -> None:
        super().__init__(block_size, lambda block_id: True)


class ForgottenParentTrie(PrefixTrie):
    """A parent whose last child went is never considered."""

    def _remove(self, block_id: BlockId) -> None:
        queue = list(self._leaves)
        super()._remove(block_id)
        self._leaves = queue


class RootFirstTrie(PrefixTrie):
    """Evicts the beginning of a path before its end."""

    def evict(self, count: int) -> list[BlockId]:
        for block_id, node in self._nodes.items():
            if count and node.num_children and isinstance(node.key[0], str) and self._is_idle(block_id):
                del self._block_by_key[node.key]
                del self._nodes[block_id]
                return [block_id]
        return super().evict(count)

    def _remove(self, block_id: BlockId) -> None:
        key = self._nodes[block_id].key
        if isinstance(key[0], str) or key[0] in self._nodes:
            super()._remove(block_id)
        else:  # its parent went first
            del self._nodes[block_id], self._block_by_key[key]


class TrustingMemo(LookupMemo):
    """Takes a remembered path for valid as long as its last block is indexed, under whatever key."""

    def lookup(self, token_ids: Sequence[TokenId], salt: str, limit: int) -> tuple[BlockId, ...]:
        for memo_key, known in self._remembered.items():
            last_key = self._trie.key(known.path[-1])
            if last_key is not None:
                self._remembered[memo_key] = replace(known, last_key=last_key)
        return super().lookup(token_ids, salt, limit)


# --- manager -------------------------------------------------------------------------------------------


def manager_with(
    *,
    pool: type[BlockPool] = BlockPool,
    trie: type[PrefixTrie] = PrefixTrie,
    memo: type[LookupMemo] = LookupMemo,
) -> type[KvManager]:
    """A manager made of other parts."""

    class AssembledManager(KvManager):
        def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True) -> None:
            super().__init__(num_blocks, block_size, enable_prefix_caching=enable_prefix_caching)
            self._pool = pool(num_blocks)
            self._trie = trie(block_size, self._pool.is_idle)
            self._memo = memo(self._trie)

    return AssembledManager


class IncompleteBlockManager(KvManager):
    """Indexes a block whose last position is known but not computed (INVARIANTS 9)."""

    def commit(self, commits: Sequence[KvCommit]) -> None:
        super().commit(commits)
        for commit in commits:
            table = self._tables[commit.id]
            index, offset = divmod(table.num_computed, self.block_size)
            if offset and len(commit.token_ids) >= (index + 1) * self.block_size:
                self._seal(table, index, commit.token_ids)


class UnsealedManager(KvManager):
    """Leaves full blocks OPEN."""

    def _seal(self, table: BlockTable, index: int, token_ids: Sequence[TokenId]) -> None:
        pass


class GenerousManager(KvManager):
    """Opens a block more than a row needs, if there is one."""

    def _open(self, rows: Sequence[PlannedRow], needs: Sequence[int]) -> KvGrant:
        spare = self.num_free - sum(needs)
        more = [needed + (spare > index) for index, needed in enumerate(needs)]
        return super()._open(rows, more)


class UnpublishedManager(KvManager):
    """Seals full blocks, but does not index them."""

    def _seal(self, table: BlockTable, index: int, token_ids: Sequence[TokenId]) -> None:
        self._pool.seal((table.block_ids[index],))


class KeptDuplicateManager(KvManager):
    """A row keeps its own copy of an indexed block."""

    def _seal(self, table: BlockTable, index: int, token_ids: Sequence[TokenId]) -> None:
        block_id = table.block_ids[index]
        self._pool.seal((block_id,))
        if self._trie.insert(self._key(table, index, token_ids), block_id) == block_id:
            self._pool.index((block_id,))


class CanonicalParentManager(KeptDuplicateManager):
    """A row keeps its own copy of an indexed block, and files its later blocks below the indexed one."""

    def _key(self, table: BlockTable, index: int, token_ids: Sequence[TokenId]) -> NodeKey:
        start = index * self.block_size
        above = self._trie.lookup(token_ids, table.salt, start)
        return above[-1] if above else table.salt, tuple(token_ids[start : start + self.block_size])


class DanglingTableManager(KvManager):
    """Frees the duplicate of an indexed block without rewriting the table."""

    def _seal(self, table: BlockTable, index: int, token_ids: Sequence[TokenId]) -> None:
        before = table.block_ids
        super()._seal(table, index, token_ids)
        table.block_ids = before


class EvictBeforePinManager(KvManager):
    """Makes room before the plan's hits are pinned."""

    def grant(self, plan: StepPlan, salts: Mapping[RequestId, str]) -> KvGrant:
        hits = {admission.id: admission.hit_block_ids for admission in plan.admits}
        num_needed = sum(blocks_needed(plan, hits, self._tables, self.block_size))
        self._pool.evict(self._trie.evict(num_needed - self.num_free))
        return super().grant(plan, salts)


class HastyPreemptManager(KvManager):
    """Preempts before it knows whether the plan fits."""

    def grant(self, plan: StepPlan, salts: Mapping[RequestId, str]) -> KvGrant:
        for id in plan.preempts:
            self.release(id)
        return super().grant(replace(plan, preempts=()), salts)


class KeptDraftBlocksManager(KvManager):
    """Keeps the blocks of rejected drafts."""

    def commit(self, commits: Sequence[KvCommit]) -> None:
        held = {commit.id: len(self.table(commit.id)) for commit in commits}
        super().commit(commits)
        for id, num_blocks in held.items():
            table = self._tables[id]
            table.append(self._pool.open(num_blocks - len(table.block_ids)))


class ForgetfulRollbackManager(KvManager):
    """Leaves the blocks of a failed step in the tables."""

    def rollback(self, grant: KvGrant) -> None:
        super().rollback(grant)
        for id, block_ids in grant.fresh.items():
            self._tables[id].append(self._pool.open(len(block_ids)))


class LeakyReleaseManager(KvManager):
    """Forgets the OPEN blocks of a row that leaves."""

    def release(self, id: RequestId) -> None:
        table = self._live(id)
        table.truncate(table.num_computed // self.block_size)
        super().release(id)


class UntouchedReleaseManager(KvManager):
    """Does not tell the trie that blocks fell idle: they can never be evicted."""

    def release(self, id: RequestId) -> None:
        table = self._live(id)
        sealed = table.num_computed // self.block_size
        self._pool.drop_reader(table.block_ids[:sealed])
        self._pool.discard(table.block_ids[sealed:])
        del self._tables[id]


class OffByOneKeyManager(KvManager):
    """A running row names the block after the one it is about to complete."""

    def next_block_key(self, id: RequestId, token_ids: Sequence[TokenId]) -> NodeKey | None:
        table = self._live(id)
        index = table.num_computed // self.block_size + 1
        if index >= len(table.block_ids) or (index + 1) * self.block_size > len(token_ids):
            return None
        return self._key(table, index, token_ids)


POOL_MUTANTS: tuple[type[BlockPool], ...] = (
    MissingIncrementPool,
    FreedWhileSharedPool,
    OverloadedReleasePool,
    PartialOpenPool,
    OneByOnePool,
    TwiceOpenedPool,
    UnorderedPool,
    ForgottenFlagPool,
)
TRIE_MUTANTS: tuple[type[PrefixTrie], ...] = (
    PrefixIgnoringTrie,
    SaltIgnoringTrie,
    BareHashTrie,
    StaleKeyTrie,
    TouchingLookupTrie,
    GreedyLookupTrie,
    MostRecentFirstTrie,
    OutsideClockTrie,
    BusyEvictingTrie,
    ForgottenParentTrie,
)
MANAGER_MUTANTS: dict[str, type[KvManager]] = {
    "block hash ignores its prefix (INVARIANTS 9)": manager_with(trie=PrefixIgnoringTrie),
    "stale key on reallocation (INVARIANTS 9)": manager_with(trie=StaleKeyTrie),
    "stale flag on reallocation (INVARIANTS 9)": manager_with(pool=ForgottenFlagPool),
    "freed while shared (INVARIANTS 9)": manager_with(pool=FreedWhileSharedPool),
    "missing increment on a shared hit (INVARIANTS 9)": manager_with(pool=MissingIncrementPool),
    "incomplete block indexed (INVARIANTS 9)": IncompleteBlockManager,
    "block given out twice": manager_with(pool=TwiceOpenedPool),
    "salt ignored": manager_with(trie=SaltIgnoringTrie),
    "evicts blocks in use": manager_with(trie=BusyEvictingTrie),
    "memo trusts a reused block": manager_with(memo=TrustingMemo),
    "full blocks not sealed": UnsealedManager,
    "a block too many": GenerousManager,
    "roots evicted first": manager_with(trie=RootFirstTrie),
    "full blocks not published": UnpublishedManager,
    "duplicate kept": KeptDuplicateManager,
    "duplicate kept above an indexed block": CanonicalParentManager,
    "duplicate freed, table not rewritten": DanglingTableManager,
    "evicts before it pins": EvictBeforePinManager,
    "preempts before it checks": HastyPreemptManager,
    "keeps the blocks of rejected drafts": KeptDraftBlocksManager,
    "rollback forgets the fresh blocks": ForgetfulRollbackManager,
    "release leaks open blocks": LeakyReleaseManager,
    "idle blocks not queued for eviction": UntouchedReleaseManager,
    "next block key off by one": OffByOneKeyManager,
}
