"""Who holds which KV block: the one place where blocks are given out, shared, published and taken back.

One step calls `probe` and `next_block_key` for the scheduler's view, `grant` before the forward and
`commit` after it (`rollback` if it failed). Rows leave through `release`. b is the block size below,
c(r) the number of positions of row r whose KV is computed.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from mvllm.core.errors import CapacityError, ConfigError, InvariantViolation
from mvllm.core.kv.block_pool import BlockPool
from mvllm.core.kv.block_table import BlockTable
from mvllm.core.kv.grant_check import blocks_available, blocks_needed, check_changes
from mvllm.core.kv.integrity import check_integrity
from mvllm.core.kv.lookup_memo import LookupMemo
from mvllm.core.kv.prefix_trie import NodeKey, PrefixTrie
from mvllm.core.step import KvCommit, KvGrant, PlannedRow, PrefixProbe, StepPlan
from mvllm.core.types import BlockId, RequestId, TokenId, ceil_div


class KvManager:
    """Owns the block tables, the block pool and the prefix trie, and alone changes them; does not hold
    KV contents, tokens or request state.

    Args:
        num_blocks: blocks in the pool.
        block_size: tokens per block.
        enable_prefix_caching: False: blocks are never indexed, so nothing is shared and nothing is IDLE.

    Raises:
        ConfigError: on construction, if a number is below 1.
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True) -> None:
        if block_size < 1:
            raise ConfigError(f"a KV block needs room for at least 1 token, got {block_size}")
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._pool = BlockPool(num_blocks)
        self._trie = PrefixTrie(block_size, self._pool.is_idle)
        self._memo = LookupMemo(self._trie)
        self._tables: dict[RequestId, BlockTable] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return self._pool.num_blocks

    @property
    def num_free(self) -> int:
        """FREE blocks."""
        return self._pool.num_free

    @property
    def num_idle(self) -> int:
        """IDLE blocks: cached, without readers, evicted when FREE ones run out."""
        return self._pool.num_idle

    def live_ids(self) -> frozenset[RequestId]:
        """Rows that have a table."""
        return frozenset(self._tables)

    def table(self, id: RequestId) -> tuple[BlockId, ...]:
        """Blocks of a row in the order of its positions; () for an unknown row."""
        table = self._tables.get(id)
        return () if table is None else table.block_ids

    def probe(self, token_ids: Sequence[TokenId], salt: str) -> PrefixProbe:
        """Longest cached prefix of at most `len(token_ids) - 1` tokens. Changes no state.

        One token is always left to compute, for its logits. Repeated probes of the same tuple cost
        little; other sequences are looked up anew each time.
        """
        if not self.enable_prefix_caching:
            return PrefixProbe()
        limit = len(token_ids) - 1
        path = self._memo.lookup(token_ids, salt, limit)
        num_busy = len(path)
        while num_busy and self._pool.is_idle(path[num_busy - 1]):  # idle blocks are the end of a path (T6)
            num_busy -= 1
        key: NodeKey | None = None
        start = len(path) * self.block_size
        if start + self.block_size <= limit:
            key = (path[-1] if path else salt, tuple(token_ids[start : start + self.block_size]))
        return PrefixProbe(path, frozenset(path[num_busy:]), key)

    def next_block_key(self, id: RequestId, token_ids: Sequence[TokenId]) -> Hashable | None:
        """Name of the full block that a live row will complete next, as in `PrefixProbe`; changes nothing.

        None if `token_ids`, the row's committed tokens, do not fill that block, or without caching.

        Raises:
            InvariantViolation: the row is unknown.
        """
        table = self._live(id)
        index = table.num_computed // self.block_size
        end = (index + 1) * self.block_size
        if end > len(token_ids) or not self.enable_prefix_caching:
            return None
        return self._key(table, index, token_ids)

    def grant(self, plan: StepPlan, salts: Mapping[RequestId, str]) -> KvGrant:
        """Apply the preempts and admits of `plan` and open the blocks that its rows need.

        Hits are pinned before anything is evicted. Rows outside the plan keep their tables.

        Args:
            salts: cache namespace of at least the admitted rows.

        Returns:
            Table and newly opened blocks of each row of the plan.

        Raises:
            CapacityError: too few blocks are or become available; nothing was changed.
            InvariantViolation: the plan contradicts the state; nothing was changed.
        """
        hits = check_changes(plan, salts, self._tables, self._trie)
        needs = blocks_needed(plan, hits, self._tables, self.block_size)
        num_needed = sum(needs)
        if num_needed > (available := blocks_available(plan, self._tables, self._pool)):
            raise CapacityError("KV blocks for a step", needed=num_needed, available=available)
        for id in plan.preempts:
            self.release(id)
        for id, block_ids in hits.items():
            self._pool.add_reader(block_ids)  # before any eviction (K7)
            self._tables[id] = BlockTable(salts[id], block_ids, len(block_ids) * self.block_size)
        if num_needed > self._pool.num_free:
            self._pool.evict(self._trie.evict(num_needed - self._pool.num_free))
        return self._open(plan.rows, needs)

    def commit(self, commits: Sequence[KvCommit]) -> None:
        """Record what the forward computed: seal and publish full blocks, take back unused ones.

        A block whose content is indexed already is replaced by the indexed one. The partial block of
        a row stays OPEN; those past it, opened for drafts that were rejected, become FREE.

        Raises:
            InvariantViolation: a commit contradicts the state; nothing was changed.
        """
        for commit in commits:
            self._check_commit(commit)
        if len({commit.id for commit in commits}) != len(commits):
            raise InvariantViolation(f"commit: a row occurs twice: {[commit.id for commit in commits]}")
        size = self.block_size
        for commit in commits:
            table = self._tables[commit.id]
            num_computed = commit.num_computed
            for index in range(table.num_computed // size, num_computed // size):  # now full
                self._seal(table, index, commit.token_ids)
            table.num_computed = num_computed
            num_blocks = ceil_div(num_computed, size)
            if len(table.block_ids) > num_blocks:
                self._pool.discard(table.truncate(num_blocks))

    def rollback(self, grant: KvGrant) -> None:
        """After a failed forward: take back the blocks opened by `grant`. Preempts and admits stand.

        Raises:
            InvariantViolation: the tables are not those of the grant any more; nothing was changed.
        """
        for id, block_ids in grant.tables.items():
            table = self._live(id)
            num_kept = len(block_ids) - len(grant.fresh[id])
            if table.block_ids != block_ids or table.num_computed > num_kept * self.block_size:
                raise InvariantViolation(f"rollback: the table of row {id!r} has changed since the grant")
        for id, fresh in grant.fresh.items():
            table = self._tables[id]
            self._pool.discard(table.truncate(len(table.block_ids) - len(fresh)))

    def release(self, id: RequestId) -> None:
        """Forget a row (finished, cancelled or preempted). Indexed blocks stay cached, others go.

        Raises:
            InvariantViolation: the row is unknown.
        """
        table = self._live(id)
        sealed = table.num_computed // self.block_size
        del self._tables[id]
        self._pool.discard(table.block_ids[sealed:])
        idle = self._pool.drop_reader(table.block_ids[:sealed])
        if idle:
            self._trie.touch(idle)

    def clear_cache(self) -> int:
        """Evict every IDLE block; returns how many."""
        evicted = self._trie.evict(self._pool.num_idle)
        self._pool.evict(evicted)
        return len(evicted)

    def check_integrity(self) -> None:
        """Recompute everything that pool, trie and tables say of each other.

        Raises:
            InvariantViolation: they contradict each other.
        """
        check_integrity(self._pool, self._trie, self._tables, self.block_size, self.enable_prefix_caching)

    # --- parts of grant and commit -----------------------------------------------------------------------

    def _open(self, rows: Sequence[PlannedRow], needs: Sequence[int]) -> KvGrant:
        tables = {}
        fresh = {}
        for row, num_needed in zip(rows, needs, strict=True):
            table = self._tables[row.id]
            fresh[row.id] = opened = self._pool.open(num_needed) if num_needed else ()
            if opened:
                table.append(opened)
            tables[row.id] = table.block_ids
        return KvGrant(tables=tables, fresh=fresh)

    def _check_commit(self, commit: KvCommit) -> None:
        table = self._live(commit.id)
        held = len(table.block_ids) * self.block_size
        if not table.num_computed <= commit.num_computed <= held:
            raise InvariantViolation(
                f"commit: row {commit.id!r} had {table.num_computed} computed positions and holds blocks "
                f"for {held}; {commit.num_computed} is outside of that"
            )
        if commit.num_computed > len(commit.token_ids):
            raise InvariantViolation(
                f"commit: row {commit.id!r} has {commit.num_computed} computed positions, "
                f"but {len(commit.token_ids)} tokens"
            )

    def _seal(self, table: BlockTable, index: int, token_ids: Sequence[TokenId]) -> None:
        """Seal a row's block `index` and publish it, or give it up for the one that is published."""
        block_id = table.block_ids[index]
        self._pool.seal((block_id,))
        if not self.enable_prefix_caching:
            return
        canonical = self._trie.insert(self._key(table, index, token_ids), block_id)
        if canonical == block_id:
            self._pool.index((block_id,))
        else:
            # The duplicate goes only when no table names it any more (K8).
            self._pool.add_reader((canonical,))
            table.replace(index, canonical)
            self._pool.drop_reader((block_id,))

    def _key(self, table: BlockTable, index: int, token_ids: Sequence[TokenId]) -> NodeKey:
        """Trie key of a row's block `index`; the blocks before it are indexed."""
        start = index * self.block_size
        parent = table.block_ids[index - 1] if index else table.salt
        return parent, tuple(token_ids[start : start + self.block_size])

    def _live(self, id: RequestId) -> BlockTable:
        table = self._tables.get(id)
        if table is None:
            raise InvariantViolation(f"row {id!r} has no block table")
        return table
