"""Random life of rows over a KvManager, with contents that show every mistake (INVARIANTS K1 to K9).

The machine is scheduler, model and verifier in one, and deliberately careless: it plans whatever it
likes, finds out by arithmetic on the public tables whether the plan fits, and compares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mvllm.core.errors import CapacityError, InvariantViolation
from mvllm.core.kv.block_pool import BlockState
from mvllm.core.kv.kv_manager import KvManager
from mvllm.core.step import Admission, KvCommit, KvGrant, PlannedRow, StepPlan
from mvllm.core.types import BlockId, RequestId, ceil_div
from tests.models.kv_snapshots import manager_snapshot
from tests.models.tagged_cache import TaggedCache

MAX_ROWS = 5


@dataclass
class Row:
    id: RequestId
    salt: str
    tokens: tuple[int, ...]  # committed
    total_limit: int
    num_computed: int = 0
    running: bool = False


# Zeros first, so that prefixes are often shared and often part at a block's border.
prompts = st.builds(
    lambda zeros, rest: (0,) * zeros + tuple(rest),
    st.integers(0, 6),
    st.lists(st.integers(0, 1), min_size=1, max_size=4),
)
Arrival = tuple[tuple[int, ...], str, int]
"""(prompt, salt, max_tokens)."""
arrivals = st.tuples(prompts, st.sampled_from(["", "", "tenant"]), st.integers(1, 6))


class KvManagerMachine(RuleBasedStateMachine):
    make_manager: Callable[..., KvManager] = KvManager
    caching = True
    recompute = True  # False: leave it to what is seen from outside, contents above all
    sound = False  # no check has failed, so that the drain at the end means something

    @initialize(num_blocks=st.integers(4, 10), block_size=st.integers(2, 4))
    def create(self, num_blocks: int, block_size: int) -> None:
        self.kv = type(self).make_manager(num_blocks, block_size, enable_prefix_caching=self.caching)
        self.cache = TaggedCache(num_blocks, block_size)
        self.rows: dict[RequestId, Row] = {}
        self.num_submitted = 0

    # --- arrivals, cancels and steps. Hypothesis leaves out rules at random: each one makes a step -------

    @rule(data=st.data(), arrivals=st.lists(arrivals, max_size=2))
    def submit_and_step(self, data: st.DataObject, arrivals: list[Arrival]) -> None:
        self.sound = False
        for prompt, salt, max_tokens in arrivals[: MAX_ROWS - len(self.rows)]:
            id = RequestId(f"r{self.num_submitted}")
            self.num_submitted += 1
            self.rows[id] = Row(id, salt, prompt, len(prompt) + max_tokens)
        self._step(data)

    @rule(data=st.data(), arrivals=st.lists(arrivals, max_size=3))
    def cancel_submit_and_step(self, data: st.DataObject, arrivals: list[Arrival]) -> None:
        self.sound = False
        if self.rows:
            row = self.rows.pop(data.draw(st.sampled_from(sorted(self.rows))))
            if row.running:
                self.kv.release(row.id)
        self.submit_and_step(data, arrivals)

    @rule(data=st.data(), arrivals=st.lists(arrivals, max_size=2), clear=st.integers(0, 3))
    def clear_cache_submit_and_step(self, data: st.DataObject, arrivals: list[Arrival], clear: int) -> None:
        if clear == 0:
            num_idle, num_free = self.kv.num_idle, self.kv.num_free
            assert self.kv.clear_cache() == num_idle
            assert (self.kv.num_idle, self.kv.num_free) == (0, num_free + num_idle)
        self.submit_and_step(data, arrivals)

    # --- one step -------------------------------------------------------------------------------------

    def _step(self, data: st.DataObject) -> None:
        plan = self._draw_plan(data)
        salts = {id: row.salt for id, row in self.rows.items()}
        in_use, num_needed = self._demand(plan)
        free_before = self.kv.num_blocks - len(in_use) - self._num_idle_after_changes(in_use)
        if num_needed > self.kv.num_blocks - len(in_use):
            self._expect_no_grant(plan, salts)
            return
        grant = self.kv.grant(plan, salts)
        self._apply_to_rows(plan)
        self._check_grant(plan, grant, in_use)
        assert self.kv.num_free == max(0, free_before - num_needed), "evicts no more than it must"
        if data.draw(st.integers(0, 5)) == 0:
            self._fail(plan, grant)
        else:
            self._forward(data, plan, grant)

    def _draw_plan(self, data: st.DataObject) -> StepPlan:
        running = [row for row in self.rows.values() if row.running]
        waiting = [row for row in self.rows.values() if not row.running]
        preempts = [row for row in running if data.draw(st.integers(0, 7)) == 0]
        admits = {row.id: self._hit(row) for row in waiting if data.draw(st.booleans())}
        planned = []
        for row in (*running, *waiting):
            if row in preempts or not (row.running or row.id in admits):
                continue
            start = row.num_computed if row.running else len(admits[row.id]) * self.kv.block_size
            count = data.draw(st.integers(1, len(row.tokens) - start))
            if data.draw(st.booleans()):
                count = len(row.tokens) - start
            room = row.total_limit - 1 - len(row.tokens) if start + count == len(row.tokens) else 0
            planned.append(PlannedRow(row.id, start, count, data.draw(st.integers(0, min(room, 4)))))
        return StepPlan(
            tuple(row.id for row in preempts),
            tuple(Admission(id, hit) for id, hit in admits.items()),
            tuple(planned),
        )

    def _hit(self, row: Row) -> tuple[BlockId, ...]:
        return self.kv.probe(row.tokens, row.salt).hit_block_ids

    def _demand(self, plan: StepPlan) -> tuple[set[int], int]:
        """Blocks in use after the plan's preempts and admits, and how many it needs besides."""
        tables = {id: self.kv.table(id) for id in self.kv.live_ids() if id not in plan.preempts}
        tables.update((admission.id, admission.hit_block_ids) for admission in plan.admits)
        in_use: set[int] = {block_id for table in tables.values() for block_id in table}
        ends = {row.id: row.end + row.max_drafts for row in plan.rows}
        num_needed = sum(
            max(0, ceil_div(end, self.kv.block_size) - len(tables[id])) for id, end in ends.items()
        )
        return in_use, num_needed

    def _num_idle_after_changes(self, in_use: set[int]) -> int:
        return sum(BlockId(block_id) in self.kv._trie for block_id in range(self.kv.num_blocks)) - sum(
            BlockId(block_id) in self.kv._trie for block_id in in_use
        )

    def _expect_no_grant(self, plan: StepPlan, salts: dict[RequestId, str]) -> None:
        """K7: all or nothing."""
        before = manager_snapshot(self.kv)
        with pytest.raises(CapacityError):
            self.kv.grant(plan, salts)
        assert manager_snapshot(self.kv) == before, "K7: a refused grant changed something"

    def _apply_to_rows(self, plan: StepPlan) -> None:
        for id in plan.preempts:
            self.rows[id] = replace(self.rows[id], running=False, num_computed=0)
        for admission in plan.admits:
            row = self.rows[admission.id]
            row.running = True
            row.num_computed = len(admission.hit_block_ids) * self.kv.block_size

    def _check_grant(self, plan: StepPlan, grant: KvGrant, in_use: set[int]) -> None:
        fresh = [block_id for block_ids in grant.fresh.values() for block_id in block_ids]
        assert len(set(fresh)) == len(fresh), "K2: a block was opened twice"
        assert in_use.isdisjoint(fresh), "K7: evicted or reopened what the plan reads"
        for admission in plan.admits:
            num_hit = len(admission.hit_block_ids)
            assert self.kv.table(admission.id)[:num_hit] == admission.hit_block_ids
        assert grant.tables == {row.id: self.kv.table(row.id) for row in plan.rows}
        assert list(grant.fresh) == [row.id for row in plan.rows]
        for row in plan.rows:
            table, block_ids = grant.tables[row.id], grant.fresh[row.id]
            num_held = len(table) - len(block_ids)
            assert table[num_held:] == block_ids
            assert len(table) == max(num_held, ceil_div(row.end + row.max_drafts, self.kv.block_size)), "K3"
            self._check_reads(self.rows[row.id])

    def _check_reads(self, row: Row) -> None:
        computed = row.tokens[: row.num_computed]
        assert self.cache.holds(self.kv.table(row.id), row.salt, computed), f"K1: {row}"

    def _write(self, plan: StepPlan, grant: KvGrant, sequences: dict[RequestId, tuple[int, ...]]) -> None:
        """K2: slots are distinct, and in blocks that no other row has."""
        written: set[int] = set()
        for planned in plan.rows:
            row = self.rows[planned.id]
            slots = self.cache.write(grant.tables[row.id], row.salt, sequences[row.id], planned.start)
            assert len(slots) == len(sequences[row.id]) - planned.start, "K2: two positions share a slot"
            assert written.isdisjoint(slots), "K2: two rows write one slot"
            written |= slots
            blocks = {slot // self.kv.block_size for slot in slots}
            for other in self.kv.live_ids() - {row.id}:
                assert blocks.isdisjoint(self.kv.table(other)), "K2: written while another row has it"

    def _fail(self, plan: StepPlan, grant: KvGrant) -> None:
        """The forward wrote something, then failed: only the fresh blocks go."""
        sequences = {row.id: self.rows[row.id].tokens[: row.start] + (2,) * row.count for row in plan.rows}
        self._write(plan, grant, sequences)
        self.kv.rollback(grant)
        for id, table in grant.tables.items():
            assert self.kv.table(id) == table[: len(table) - len(grant.fresh[id])], "L6"
        if any(grant.fresh.values()):
            before = manager_snapshot(self.kv)
            with pytest.raises(InvariantViolation):
                self.kv.rollback(grant)
            assert manager_snapshot(self.kv) == before

    def _forward(self, data: st.DataObject, plan: StepPlan, grant: KvGrant) -> None:
        """Compute, draw drafts and verify them, commit, and release what has come to its end."""
        bits = st.lists(st.integers(0, 1), min_size=5, max_size=5)
        drafts = {row.id: tuple(data.draw(bits)[: row.max_drafts]) for row in plan.rows}
        self._write(
            plan,
            grant,
            {row.id: self.rows[row.id].tokens[: row.end] + drafts[row.id] for row in plan.rows},
        )
        commits = []
        for planned in plan.rows:
            row = self.rows[planned.id]
            row.num_computed = planned.end
            if planned.end == len(row.tokens):
                num_accepted = data.draw(st.integers(0, len(drafts[row.id])))
                row.num_computed += num_accepted
                row.tokens += self._new_tokens(drafts[row.id], num_accepted)
            commits.append(KvCommit(row.id, row.tokens, row.num_computed))
        self.kv.commit(commits)
        if any(grant.fresh.values()):
            with pytest.raises(InvariantViolation):
                self.kv.rollback(grant)
        for planned in plan.rows:
            row = self.rows[planned.id]
            assert row.num_computed < row.total_limit, "K3: the last token is never cached"
            num_kept = ceil_div(row.num_computed, self.kv.block_size)
            assert len(self.kv.table(row.id)) == num_kept, "K5: blocks of rejected drafts are kept"
            self._check_published(row)
            if len(row.tokens) >= row.total_limit:
                self.kv.release(row.id)
                del self.rows[row.id]

    @staticmethod
    def _new_tokens(drafts: Sequence[int], num_accepted: int) -> tuple[int, ...]:
        own = 1 - drafts[num_accepted] if num_accepted < len(drafts) else 0
        return (*drafts[:num_accepted], own)

    def _check_published(self, row: Row) -> None:
        """T12, K8: the row's full blocks, and nobody else's, are what its tokens lead to."""
        num_full = row.num_computed // self.kv.block_size
        tokens = row.tokens[: num_full * self.kv.block_size]
        expected = self.kv.table(row.id)[:num_full] if self.caching else ()
        assert self.kv.probe((*tokens, 0), row.salt).hit_block_ids == expected, "T12 or K8"

    # --- what always holds ----------------------------------------------------------------------------

    @invariant()
    def always(self) -> None:
        self.sound = False
        if self.recompute:
            self.kv.check_integrity()  # P1 to P4, T5, T6, K8, K9
        self._check_sealed()
        self._check_contents()
        self._check_lengths()
        self._check_conservation()
        self._check_probes()
        self._check_keys()
        self.sound = True

    def _check_sealed(self) -> None:
        """K4: sealed are exactly the blocks all of whose positions are committed and computed."""
        for row in self.rows.values():
            num_full = row.num_computed // self.kv.block_size
            sealed = [self.kv._pool.state(block) is BlockState.SEALED for block in self.kv.table(row.id)]
            assert sealed == [index < num_full for index in range(len(sealed))], f"K4: {row}"

    def _check_contents(self) -> None:
        """K1, K4, K5, K6."""
        for row in self.rows.values():
            if row.running:
                self._check_reads(row)

    def _check_lengths(self) -> None:
        """K3, L4."""
        running = {id: row for id, row in self.rows.items() if row.running}
        assert self.kv.live_ids() == frozenset(running)
        for id, row in running.items():
            assert len(self.kv.table(id)) == ceil_div(row.num_computed, self.kv.block_size), f"K3: {row}"

    def _check_conservation(self) -> None:
        """K9, counted from outside."""
        in_tables = {block_id for id in self.kv.live_ids() for block_id in self.kv.table(id)}
        assert len(in_tables) + self.kv.num_idle + self.kv.num_free == self.kv.num_blocks, "K9"
        assert self.caching or self.kv.num_idle == 0

    def _check_probes(self) -> None:
        """T1, T3 and K1 for blocks that nobody reads; the memo changes no answer."""
        before = manager_snapshot(self.kv)
        for row in self.rows.values():
            probe = self.kv.probe(row.tokens, row.salt)
            assert probe == self.kv.probe(list(row.tokens), row.salt), "the memo gave a stale answer"
            hit = probe.hit_block_ids
            assert len(hit) * self.kv.block_size <= max(0, len(row.tokens) - 1)
            matched = row.tokens[: len(hit) * self.kv.block_size]
            assert self.cache.holds(hit, row.salt, matched), f"K1: hit {hit} of {row}"
            in_tables = {block_id for id in self.kv.live_ids() for block_id in self.kv.table(id)}
            assert probe.idle_block_ids == set(hit) - in_tables
        assert manager_snapshot(self.kv) == before, "T3"

    def _check_keys(self) -> None:
        """S15: a row that waits for a block and the row that computes it name it alike."""
        for row in self.rows.values():
            if row.running:
                num_full = row.num_computed // self.kv.block_size
                probe = self.kv.probe((*row.tokens, 0), row.salt)
                if len(probe.hit_block_ids) == num_full:
                    assert self.kv.next_block_key(row.id, row.tokens) == probe.next_block_key, "S15"

    def teardown(self) -> None:
        """K9: after the drain nothing is in use, after clearing everything is free."""
        if not self.sound:
            return
        for row in self.rows.values():
            if row.running:
                self.kv.release(row.id)
        assert self.kv.num_free + self.kv.num_idle == self.kv.num_blocks, "K9"
        self.kv.clear_cache()
        assert self.kv.num_free == self.kv.num_blocks, "K9"
        self.kv.check_integrity()


class UncachedKvManagerMachine(KvManagerMachine):
    caching = False
