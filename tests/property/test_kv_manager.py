"""KvManager: random lives of rows (tests/models/kv_machine.py) and the single cases worth naming."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from mvllm.core.errors import CapacityError, ConfigError, InvariantViolation
from mvllm.core.kv.kv_manager import KvManager
from mvllm.core.kv.lookup_memo import MAX_REMEMBERED
from mvllm.core.step import Admission, KvCommit, KvGrant, PlannedRow, PrefixProbe, StepPlan
from mvllm.core.types import BlockId, RequestId
from tests.models.kv_machine import KvManagerMachine, UncachedKvManagerMachine
from tests.models.kv_snapshots import manager_snapshot

TestRandomLivesOfRowsK1ToK9 = KvManagerMachine.TestCase
TestRandomLivesOfRowsWithoutCachingK1ToK9 = UncachedKvManagerMachine.TestCase

A, B, C = RequestId("a"), RequestId("b"), RequestId("c")


def grant_prompt(kv: KvManager, id: RequestId, tokens: tuple[int, ...], salt: str = "") -> KvGrant:
    """Admit a row on its cached prefix and grant the rest of its prompt."""
    hit = kv.probe(tokens, salt).hit_block_ids
    start = len(hit) * kv.block_size
    plan = StepPlan(admits=(Admission(id, hit),), rows=(PlannedRow(id, start, len(tokens) - start),))
    return kv.grant(plan, {id: salt})


def run_prompt(kv: KvManager, id: RequestId, tokens: tuple[int, ...], salt: str = "") -> None:
    """Admit a row and compute its whole prompt."""
    grant_prompt(kv, id, tokens, salt)
    kv.commit([KvCommit(id, tokens, len(tokens))])


def test_a_prompt_is_found_by_the_next_probe_after_its_commit_t12() -> None:
    kv = KvManager(4, 2)
    grant_prompt(kv, A, (1, 2, 3, 4, 5))
    assert kv.probe((1, 2, 3, 4, 5), "") == PrefixProbe((), frozenset(), ("", (1, 2)))
    kv.commit([KvCommit(A, (1, 2, 3, 4, 5), 5)])
    assert kv.probe((1, 2, 3, 4, 5), "") == PrefixProbe(kv.table(A)[:2], frozenset(), None)


@pytest.mark.parametrize("length", [15, 16, 17, 32])
def test_a_fully_cached_prompt_still_leaves_a_token_to_compute(length: int) -> None:
    kv = KvManager(8, 16)
    tokens = tuple(range(length))
    for repeat in range(3):
        matched = 16 * len(kv.probe(tokens, "").hit_block_ids)
        assert matched == (0 if repeat == 0 else (length - 1) // 16 * 16)
        run_prompt(kv, A, tokens)
        kv.release(A)
        kv.check_integrity()


def test_equal_salts_share_and_unequal_ones_do_not_t11() -> None:
    kv = KvManager(8, 2)
    run_prompt(kv, A, (1, 2, 3), "x")
    assert kv.probe((1, 2, 3), "x").hit_block_ids == kv.table(A)[:1]
    for other in ("", "y", "x "):
        assert kv.probe((1, 2, 3), other).hit_block_ids == ()


def test_without_caching_nothing_is_shared_and_nothing_idles() -> None:
    kv = KvManager(4, 2, enable_prefix_caching=False)
    run_prompt(kv, A, (1, 2, 3))
    assert kv.probe((1, 2, 3), "") == PrefixProbe()
    assert kv.next_block_key(A, (1, 2, 3, 4)) is None
    kv.release(A)
    assert (kv.num_free, kv.num_idle) == (4, 0)


def test_a_full_block_computed_twice_is_given_up_for_the_indexed_one_k8() -> None:
    kv = KvManager(4, 2)
    for id in (A, B):
        kv.grant(StepPlan(admits=(Admission(id),), rows=(PlannedRow(id, 0, 3),)), {id: ""})
    duplicate = kv.table(B)[0]
    kv.commit([KvCommit(A, (1, 2, 3), 3), KvCommit(B, (1, 2, 3), 3)])
    assert kv.table(B)[0] == kv.table(A)[0] != duplicate
    assert kv.num_free == 1
    kv.check_integrity()


def test_siblings_share_every_full_block_of_their_prompt_k6() -> None:
    kv = KvManager(6, 2)
    prompt = (1, 2, 3, 4, 5)
    for id in (A, B, C):
        run_prompt(kv, id, prompt)
    assert len({kv.table(id)[:2] for id in (A, B, C)}) == 1
    assert len({kv.table(id)[2] for id in (A, B, C)}) == 3
    assert kv.num_free == 1


def test_the_block_of_rejected_drafts_is_taken_back_and_the_partial_one_stays_open_k5() -> None:
    kv = KvManager(4, 2)
    run_prompt(kv, A, (1, 2))
    grant = kv.grant(StepPlan(rows=(PlannedRow(A, 2, 1, max_drafts=4),)), {})
    assert len(grant.fresh[A]) == 3
    kv.commit([KvCommit(A, (1, 2, 3, 9), 3)])
    assert kv.table(A) == grant.tables[A][:2]
    assert kv.num_free == 2
    kv.check_integrity()


def test_drafts_that_fill_a_block_do_not_index_it_until_they_are_accepted_k4() -> None:
    kv = KvManager(4, 2)
    run_prompt(kv, A, (1, 2))
    kv.grant(StepPlan(rows=(PlannedRow(A, 2, 1, max_drafts=1),)), {})
    kv.commit([KvCommit(A, (1, 2, 3, 7), 3)])
    assert kv.probe((1, 2, 3, 7, 0), "").hit_block_ids == kv.table(A)[:1]
    kv.grant(StepPlan(rows=(PlannedRow(A, 3, 1),)), {})
    kv.commit([KvCommit(A, (1, 2, 3, 7, 8), 4)])
    assert kv.probe((1, 2, 3, 7, 0), "").hit_block_ids == kv.table(A)


def test_a_hit_is_pinned_before_anything_is_evicted_for_the_same_plan_k7() -> None:
    kv = KvManager(3, 2)
    run_prompt(kv, A, (1, 2))
    kv.release(A)
    run_prompt(kv, B, (3, 4))
    kv.release(B)
    hit = kv.probe((1, 2, 5, 6, 7), "").hit_block_ids  # the least recently used block
    plan = StepPlan(admits=(Admission(C, hit),), rows=(PlannedRow(C, 2, 3),))
    kv.grant(plan, {C: ""})
    assert kv.table(C)[:1] == hit
    assert kv.probe((3, 4, 0), "").hit_block_ids == ()


def test_a_hit_on_blocks_that_the_same_plan_preempts_needs_no_room_for_them_k7() -> None:
    kv = KvManager(3, 2)
    run_prompt(kv, A, (1, 2, 3, 4, 5))
    hit = kv.probe((1, 2, 3, 4, 6), "").hit_block_ids
    plan = StepPlan(preempts=(A,), admits=(Admission(B, hit),), rows=(PlannedRow(B, 4, 1),))
    assert kv.grant(plan, {B: ""}).tables[B][:2] == hit
    assert kv.live_ids() == {B}


def test_a_grant_that_does_not_fit_says_the_numbers_and_changes_nothing_k7() -> None:
    kv = KvManager(3, 2)
    run_prompt(kv, A, (1, 2, 3))
    before = manager_snapshot(kv)
    plan = StepPlan(preempts=(A,), admits=(Admission(B, kv.table(A)[:1]),), rows=(PlannedRow(B, 2, 5),))
    with pytest.raises(CapacityError, match="3 needed, 2 available"):
        kv.grant(plan, {B: ""})
    assert manager_snapshot(kv) == before


def test_the_least_recently_released_leaf_is_evicted_first_t7() -> None:
    kv = KvManager(4, 2)
    run_prompt(kv, A, (1, 2))
    run_prompt(kv, B, (3, 4))
    kv.release(B)
    kv.release(A)
    run_prompt(kv, C, (5, 6, 7, 8, 9, 9))
    assert kv.probe((3, 4, 0), "").hit_block_ids == ()
    assert len(kv.probe((1, 2, 0), "").hit_block_ids) == 1


def test_rollback_keeps_the_partial_block_and_the_admission() -> None:
    kv = KvManager(6, 2)
    run_prompt(kv, A, (1, 2, 3))
    before = kv.table(A)
    hit = kv.probe((1, 2, 5, 6), "").hit_block_ids
    plan = StepPlan(
        admits=(Admission(B, hit),), rows=(PlannedRow(A, 3, 1, max_drafts=3), PlannedRow(B, 2, 2))
    )
    kv.rollback(kv.grant(plan, {B: ""}))
    assert (kv.table(A), kv.table(B)) == (before, hit)
    kv.check_integrity()


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_a_grant_that_was_committed_or_released_can_not_be_rolled_back(length: int) -> None:
    kv = KvManager(6, 2)
    tokens = (1, 2, 3, 4)[:length]
    grant = grant_prompt(kv, A, tokens)
    kv.commit([KvCommit(A, tokens, length)])
    before = manager_snapshot(kv)
    with pytest.raises(InvariantViolation, match="has changed since the grant"):
        kv.rollback(grant)
    assert manager_snapshot(kv) == before
    kv.release(A)
    with pytest.raises(InvariantViolation, match="has no block table"):
        kv.rollback(grant)


def scene() -> tuple[KvManager, StepPlan]:
    """A and B run, B's first block is cached under salt "x"; the plan preempts A and admits C on a hit."""
    kv = KvManager(8, 2)
    run_prompt(kv, A, (1, 2, 3), "x")
    run_prompt(kv, B, (1, 2, 4, 5), "x")
    hit = kv.probe((1, 2, 4, 5, 6), "x").hit_block_ids
    rows = (PlannedRow(B, 4, 1), PlannedRow(C, 4, 1))
    return kv, StepPlan(preempts=(A,), admits=(Admission(C, hit),), rows=rows)


def with_row(row: PlannedRow) -> Callable[[StepPlan], StepPlan]:
    return lambda plan: replace(plan, rows=(row,))


BAD_PLANS: dict[str, Callable[[StepPlan], StepPlan]] = {
    "preempts an unknown row": lambda plan: replace(plan, preempts=(RequestId("nobody"),)),
    "preempts a row twice": lambda plan: replace(plan, preempts=(A, A)),
    "admits a live row": lambda plan: replace(plan, admits=(Admission(B),)),
    "admits a preempted row": lambda plan: replace(plan, admits=(*plan.admits, Admission(A))),
    "admits a row twice": lambda plan: replace(plan, admits=plan.admits * 2),
    "admits a row without a salt": lambda plan: replace(plan, admits=(Admission(RequestId("d")),)),
    "hits blocks out of order": lambda plan: replace(
        plan, admits=(Admission(C, plan.admits[0].hit_block_ids[::-1]),)
    ),
    "hits a block that is not indexed": lambda plan: replace(plan, admits=(Admission(C, (BlockId(7),)),)),
    "hits a block of another pool": lambda plan: replace(plan, admits=(Admission(C, (BlockId(-1),)),)),
    "plans an unknown row": with_row(PlannedRow(RequestId("nobody"), 0, 1)),
    "plans a preempted row": with_row(PlannedRow(A, 3, 1)),
    "plans a row twice": lambda plan: replace(plan, rows=plan.rows * 2),
    "starts before the cache ends": with_row(PlannedRow(B, 3, 1)),
    "starts past the cache": with_row(PlannedRow(B, 5, 1)),
    "starts an admitted row at 0 in spite of its hit": with_row(PlannedRow(C, 0, 5)),
    "computes nothing": with_row(PlannedRow(B, 4, 0)),
    "has a negative number of drafts": with_row(PlannedRow(B, 4, 1, -1)),
}


@pytest.mark.parametrize("fault", BAD_PLANS)
def test_a_plan_that_contradicts_the_state_is_refused_whole_k7(fault: str) -> None:
    kv, plan = scene()
    before = manager_snapshot(kv)
    with pytest.raises(InvariantViolation, match="grant: "):
        kv.grant(BAD_PLANS[fault](plan), {A: "x", B: "x", C: "x"})
    assert manager_snapshot(kv) == before
    kv.grant(plan, {C: "x"})
    kv.check_integrity()


def test_a_hit_from_another_namespace_is_refused_t11() -> None:
    kv, plan = scene()
    with pytest.raises(InvariantViolation, match="no cached prefix in its namespace"):
        kv.grant(plan, {C: "y"})


@pytest.mark.parametrize(
    ("fault", "commits"),
    [
        ("no block table", [KvCommit(C, (1,), 1)]),
        ("occurs twice", [KvCommit(A, (1, 2, 3), 3)] * 2),
        ("outside of that", [KvCommit(A, (1, 2, 3), 2)]),
        ("outside of that", [KvCommit(A, (1, 2, 3, 4, 5), 5)]),
        ("but 3 tokens", [KvCommit(A, (1, 2, 3), 4)]),
    ],
)
def test_a_commit_that_contradicts_the_state_is_refused_whole(fault: str, commits: list[KvCommit]) -> None:
    kv, _ = scene()
    good = KvCommit(B, (1, 2, 4, 5), 4)
    before = manager_snapshot(kv)
    with pytest.raises(InvariantViolation, match=fault):
        kv.commit([good, *commits])
    assert manager_snapshot(kv) == before


def test_releasing_or_asking_about_an_unknown_row_is_refused_l3() -> None:
    kv, _ = scene()
    kv.release(A)
    before = manager_snapshot(kv)
    with pytest.raises(InvariantViolation, match="row 'a' has no block table"):
        kv.release(A)
    with pytest.raises(InvariantViolation, match="row 'a' has no block table"):
        kv.next_block_key(A, (1, 2))
    assert manager_snapshot(kv) == before
    assert kv.table(A) == ()


def test_remembered_lookups_are_bounded_and_survive_eviction() -> None:
    kv = KvManager(4, 2)
    run_prompt(kv, A, (1, 2, 3, 4, 5))
    kv.release(A)
    prompts = [(1, 2, 3, 4, 5, number) for number in range(MAX_REMEMBERED + 10)]
    assert {kv.probe(prompt, "").hit_block_ids for prompt in prompts} == {
        kv.probe([1, 2, 3, 4, 5], "").hit_block_ids
    }
    assert len(kv._memo._remembered) == MAX_REMEMBERED
    kv.clear_cache()
    run_prompt(kv, B, (7, 7, 7, 7))  # the same physical blocks, other contents
    assert {kv.probe(prompt, "").hit_block_ids for prompt in prompts} == {()}


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (4, 0)])
def test_a_manager_without_blocks_or_positions_is_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        KvManager(num_blocks, block_size)
