"""BlockPool against a dict model (INVARIANTS P1, P3, P5 to P10)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mvllm.core.errors import CapacityError, ConfigError, InvariantViolation
from mvllm.core.kv.block_pool import BlockPool, BlockState
from mvllm.core.types import BlockId
from tests.models.kv_snapshots import pool_snapshot
from tests.models.pool_model import PoolModel

VERBS = ("seal", "index", "add_reader", "drop_reader", "discard", "evict")
STEPS_TO: dict[str, tuple[str, ...]] = {  # from OPEN
    "FREE": ("discard",),
    "OPEN": (),
    "SEALED": ("seal",),
    "SEALED, indexed": ("seal", "index"),
    "IDLE": ("seal", "index", "drop_reader"),
}


def names(*block_ids: int) -> list[BlockId]:
    return [BlockId(block_id) for block_id in block_ids]


class BlockPoolMachine(RuleBasedStateMachine):
    """Any program of verbs, legal and illegal, does what the model does (P8)."""

    pool_class: type[BlockPool] = BlockPool

    @initialize(states=st.lists(st.sampled_from(sorted(STEPS_TO)), min_size=1, max_size=6))
    def create(self, states: list[str]) -> None:
        """A pool whose blocks stand anywhere, since most programs are too short to get there."""
        self.pool = self.pool_class(len(states))
        self.model = PoolModel(len(states))
        for block_id in self.model.open(len(states)):
            assert self.pool.open(1) == (block_id,)
        for block_id, state in enumerate(states):
            for verb in STEPS_TO[state]:
                self._apply(verb, [block_id])

    @rule(count=st.integers(-1, 4))
    def open(self, count: int) -> None:
        """P5: all or nothing; distinct ids."""
        if 0 <= count <= len(self.model.freed):
            assert self.pool.open(count) == self.model.open(count)
            return
        before = pool_snapshot(self.pool)
        with pytest.raises(CapacityError if count > 0 else InvariantViolation):
            self.pool.open(count)
        assert pool_snapshot(self.pool) == before

    @rule(verb=st.sampled_from(VERBS), data=st.data())
    def apply_any_verb(self, verb: str, data: st.DataObject) -> None:
        """P6, P7: illegal states, repeated and foreign ids are refused whole."""
        candidates = range(-1, self.model.num_blocks + 1)
        self._apply(verb, data.draw(st.lists(st.sampled_from(candidates), max_size=2)))

    @rule(data=st.data())
    def apply_a_legal_verb(self, data: st.DataObject) -> None:
        legal = {verb: [id for id in self.model.blocks if self.model.legal(verb, [id])] for verb in VERBS}
        verb = data.draw(st.sampled_from(["open", *(verb for verb in VERBS if legal[verb])]))
        if verb == "open":
            self.open(data.draw(st.integers(1, 2)))
        else:
            block_ids = st.lists(st.sampled_from(legal[verb]), min_size=1, unique=True)
            self._apply(verb, data.draw(block_ids))

    def _apply(self, verb: str, block_ids: list[int]) -> None:
        if self.model.legal(verb, block_ids):
            assert getattr(self.pool, verb)(names(*block_ids)) == self.model.apply(verb, block_ids)
            return
        before = pool_snapshot(self.pool)
        with pytest.raises(InvariantViolation):
            getattr(self.pool, verb)(names(*block_ids))
        assert pool_snapshot(self.pool) == before

    @invariant()
    def equals_the_model(self) -> None:
        for block_id, block in self.model.blocks.items():
            found = (
                self.pool.state(BlockId(block_id)),
                self.pool.num_readers(BlockId(block_id)),
                self.pool.is_indexed(BlockId(block_id)),
            )
            assert found == (block.state, block.readers, block.indexed), f"block {block_id}"
        assert self.pool.num_free == len(self.model.freed)
        assert self.pool.num_idle == sum(b.state is BlockState.IDLE for b in self.model.blocks.values())

    @invariant()
    def integrity_holds(self) -> None:
        """P1, P3."""
        self.pool.check_integrity()


TestBlockPoolEqualsTheModelP8 = BlockPoolMachine.TestCase


def pool_in_state(state: str) -> BlockPool:
    """A pool of one block, brought into the state named."""
    pool = BlockPool(1)
    pool.open(1)
    for verb in STEPS_TO[state]:
        getattr(pool, verb)(names(0))
    return pool


# The whole table: (state, verb) -> (state after, readers after); everything else is refused.
LEGAL = {
    ("FREE", "open"): (BlockState.OPEN, 1),
    ("OPEN", "seal"): (BlockState.SEALED, 1),
    ("OPEN", "discard"): (BlockState.FREE, 0),
    ("SEALED", "index"): (BlockState.SEALED, 1),
    ("SEALED", "add_reader"): (BlockState.SEALED, 2),
    ("SEALED", "drop_reader"): (BlockState.FREE, 0),
    ("SEALED, indexed", "add_reader"): (BlockState.SEALED, 2),
    ("SEALED, indexed", "drop_reader"): (BlockState.IDLE, 0),
    ("IDLE", "add_reader"): (BlockState.SEALED, 1),
    ("IDLE", "evict"): (BlockState.FREE, 0),
}


@pytest.mark.parametrize("verb", ("open", *VERBS))
@pytest.mark.parametrize("state", STEPS_TO)
def test_exactly_the_legal_state_and_verb_pairs_succeed_p10(state: str, verb: str) -> None:
    pool = pool_in_state(state)
    argument: Any = 1 if verb == "open" else names(0)
    if (state, verb) in LEGAL:
        getattr(pool, verb)(argument)
        assert (pool.state(BlockId(0)), pool.num_readers(BlockId(0))) == LEGAL[state, verb]
        pool.check_integrity()
        return
    before = pool_snapshot(pool)
    with pytest.raises((InvariantViolation, CapacityError)):
        getattr(pool, verb)(argument)
    assert pool_snapshot(pool) == before


def test_opening_more_than_is_free_changes_nothing_and_says_how_much_there_is_p5() -> None:
    pool = BlockPool(3)
    pool.open(2)
    before = pool_snapshot(pool)
    with pytest.raises(CapacityError) as caught:
        pool.open(2)
    assert (caught.value.needed, caught.value.available) == (2, 1)
    assert pool_snapshot(pool) == before


def test_dropping_a_reader_of_an_idle_block_is_refused_as_a_double_free_p6() -> None:
    with pytest.raises(InvariantViolation, match="drop_reader: block 0 is IDLE, expected SEALED"):
        pool_in_state("IDLE").drop_reader(names(0))


@pytest.mark.parametrize("verb", VERBS)
def test_a_list_that_names_a_block_twice_is_refused_whole_p7(verb: str) -> None:
    pool = BlockPool(2)
    pool.open(2)
    if verb not in ("seal", "discard"):
        pool.seal(names(0, 1))
    if verb in ("drop_reader", "evict"):
        pool.index(names(0, 1))
    if verb == "evict":
        pool.drop_reader(names(0, 1))
    before = pool_snapshot(pool)
    with pytest.raises(InvariantViolation, match="named twice"):
        getattr(pool, verb)(names(0, 1, 0))
    assert pool_snapshot(pool) == before


@given(st.lists(st.integers(1, 3), max_size=6))
def test_blocks_are_opened_in_ascending_order_and_the_last_freed_first_p9(counts: list[int]) -> None:
    pool = BlockPool(sum(counts) + 1)
    opened = [pool.open(count) for count in counts]
    assert [block_id for group in opened for block_id in group] == list(range(sum(counts)))
    for group in opened:
        pool.discard(group)
    order = [block_id for group in opened for block_id in group]
    assert pool.open(len(order)) == tuple(reversed(order))


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1 block, got 0"):
        BlockPool(0)
