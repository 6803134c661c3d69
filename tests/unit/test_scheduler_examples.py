"""Whole decisions of the scheduler, one situation each."""

from __future__ import annotations

from typing import Any

import pytest

from mvllm.core.errors import ConfigError, InvariantViolation
from mvllm.core.request import Phase
from mvllm.core.sched.policy import POLICIES
from mvllm.core.sched.scheduler import Scheduler
from mvllm.core.step import Admission, PlannedRow, PrefixProbe, RowView, SchedulerView, StepPlan
from mvllm.core.types import BlockId, RequestId

A, B, C, D = (RequestId(name) for name in "ABCD")


def scheduler(**changes: Any) -> Scheduler:
    """16 tokens and 4 rows per step, 10 blocks of 4 tokens, unless told otherwise."""
    limits = {"max_num_batched_tokens": 16, "max_num_seqs": 4, "block_size": 4, "num_blocks": 10}
    return Scheduler(**(limits | changes))


def blocks(*ids: int) -> tuple[BlockId, ...]:
    return tuple(map(BlockId, ids))


def running(
    id: RequestId, num_tokens: int, num_computed: int, *block_ids: int, limit: int = 40, **fields: Any
) -> RowView:
    return RowView(id, Phase.RUNNING, num_tokens, num_computed, limit, blocks(*block_ids), **fields)


def waiting(id: RequestId, num_tokens: int, *, limit: int = 40, **fields: Any) -> RowView:
    return RowView(id, Phase.WAITING, num_tokens, 0, limit, **fields)


def view(*rows: RowView, free: int = 0, idle: int = 0) -> SchedulerView:
    return SchedulerView(rows, free, idle)


def test_nothing_live_gives_an_empty_plan() -> None:
    assert scheduler().plan(view(free=10)) == StepPlan()


def test_a_decoding_row_computes_its_last_token() -> None:
    plan = scheduler().plan(view(running(A, 7, 6, 0, 1), free=8))
    assert plan == StepPlan(rows=(PlannedRow(A, 6, 1),))


def test_a_decoding_row_takes_precedence_over_a_younger_prompt_which_gets_the_rest_of_the_budget() -> None:
    plan = scheduler().plan(view(running(A, 7, 6, 0, 1), running(B, 30, 0), free=8))
    assert plan == StepPlan(rows=(PlannedRow(A, 6, 1), PlannedRow(B, 0, 15)))


def test_an_older_prompt_leaves_every_younger_row_its_minimum() -> None:
    plan = scheduler().plan(view(running(A, 30, 8, 0, 1), running(B, 7, 6, 2, 3), running(C, 9, 0), free=6))
    assert plan == StepPlan(rows=(PlannedRow(A, 8, 14), PlannedRow(B, 6, 1), PlannedRow(C, 0, 1)))


def test_a_chunk_stops_where_the_blocks_end() -> None:
    plan = scheduler().plan(view(running(A, 30, 8, 0, 1), running(B, 25, 24, 2, 3, 4, 5, 6, 7, 8), free=1))
    assert plan == StepPlan(rows=(PlannedRow(A, 8, 4), PlannedRow(B, 24, 1)))


@pytest.mark.parametrize(
    ("policy", "counts"), [("fcfs", (14, 1)), ("shortest-prefill", (6, 9)), ("round-robin", (6, 9))]
)
def test_the_policy_orders_prompts_that_share_a_step(policy: str, counts: tuple[int, int]) -> None:
    first, second = running(A, 30, 4, 0), running(B, 9, 0)
    plan = scheduler(max_num_batched_tokens=15, policy=policy).plan(view(first, second, free=9))
    assert plan == StepPlan(rows=(PlannedRow(A, 4, counts[0]), PlannedRow(B, 0, counts[1])))


def test_every_policy_keeps_equal_rows_in_the_order_of_their_age() -> None:
    rows = [running(A, 9, 0), running(B, 9, 0)]
    assert all(list(order(rows)) == rows for order in POLICIES.values())


def test_the_oldest_waiting_request_is_admitted_at_once() -> None:
    plan = scheduler().plan(view(waiting(A, 9), free=10))
    assert plan == StepPlan(admits=(Admission(A),), rows=(PlannedRow(A, 0, 9),))


def test_an_admission_starts_after_its_cached_prefix() -> None:
    hit = PrefixProbe(blocks(3, 5), frozenset(blocks(5)))
    plan = scheduler().plan(view(waiting(A, 9, probe=hit), free=8, idle=1))
    assert plan == StepPlan(admits=(Admission(A, blocks(3, 5)),), rows=(PlannedRow(A, 8, 1),))


def test_requests_are_admitted_by_age_while_their_whole_prompts_fit() -> None:
    plan = scheduler().plan(view(waiting(A, 12), waiting(B, 24), waiting(C, 3), free=10))
    assert plan == StepPlan(admits=(Admission(A),), rows=(PlannedRow(A, 0, 12),))


def test_a_prompt_may_start_with_fewer_tokens_than_it_has_if_all_of_it_fits() -> None:
    plan = scheduler().plan(view(running(A, 7, 6, 0, 1), waiting(B, 30), free=8))
    assert plan == StepPlan(admits=(Admission(B),), rows=(PlannedRow(A, 6, 1), PlannedRow(B, 0, 15)))


def test_blocks_that_a_running_prompt_still_needs_are_not_given_to_a_new_request() -> None:
    older = running(A, 30, 8, 0, 1)  # covers 22 positions after this step, needs 8 blocks for 31
    plan = scheduler(max_num_batched_tokens=15).plan(view(older, waiting(B, 9), free=8))
    assert plan == StepPlan(rows=(PlannedRow(A, 8, 15),))
    plan = scheduler().plan(view(running(A, 20, 8, 0, 1), waiting(B, 3), free=5))
    assert plan.admits == (Admission(B),)
    plan = scheduler().plan(view(running(A, 20, 8, 0, 1), waiting(B, 3), free=4))
    assert plan.admits == ()


def test_an_idle_hit_that_two_admissions_share_is_counted_once() -> None:
    hit = PrefixProbe(blocks(0, 1), frozenset(blocks(0, 1)))
    rows = view(waiting(A, 9, probe=hit), waiting(B, 9, probe=hit), free=2, idle=2)
    plan = scheduler().plan(rows)
    assert plan == StepPlan(
        admits=(Admission(A, blocks(0, 1)), Admission(B, blocks(0, 1))),
        rows=(PlannedRow(A, 8, 1), PlannedRow(B, 8, 1)),
    )


def test_the_youngest_is_preempted_when_an_older_row_needs_a_block() -> None:
    old, young = running(A, 9, 8, 0, 1), running(B, 7, 6, 2, 3)
    assert scheduler().plan(view(old, young)) == StepPlan(preempts=(B,), rows=(PlannedRow(A, 8, 1),))


def test_preempting_goes_on_until_enough_unshared_blocks_are_released() -> None:
    rows = view(running(A, 9, 8, 0, 1), running(B, 6, 5, 0, 2), running(C, 6, 5, 0, 2))
    assert scheduler().plan(rows) == StepPlan(preempts=(C, B), rows=(PlannedRow(A, 8, 1),))


def test_a_plan_that_preempts_admits_nobody() -> None:
    rows = view(running(A, 9, 8, 0, 1), running(B, 7, 6, 2, 3, 4, 5), waiting(C, 2))
    assert scheduler().plan(rows) == StepPlan(preempts=(B,), rows=(PlannedRow(A, 8, 1),))


def test_the_oldest_request_if_waiting_displaces_the_youngest_for_lack_of_blocks() -> None:
    rows = view(waiting(A, 6), running(B, 7, 6, 0, 1), running(C, 7, 6, 2, 3))
    assert scheduler().plan(rows) == StepPlan(
        preempts=(C,), admits=(Admission(A),), rows=(PlannedRow(A, 0, 6), PlannedRow(B, 6, 1))
    )


def test_the_oldest_request_if_waiting_displaces_the_youngest_for_lack_of_rows() -> None:
    rows = view(waiting(A, 6), running(B, 7, 6, 0, 1), running(C, 7, 6, 2, 3), free=6)
    assert scheduler(max_num_seqs=2).plan(rows) == StepPlan(
        preempts=(C,), admits=(Admission(A),), rows=(PlannedRow(A, 0, 6), PlannedRow(B, 6, 1))
    )


def test_a_hit_on_the_blocks_of_a_victim_is_kept() -> None:
    hit = PrefixProbe(blocks(0, 1))
    rows = view(waiting(A, 10, limit=13, probe=hit), running(B, 9, 8, 0, 1, 2), free=0)
    plan = scheduler(num_blocks=3).plan(rows)
    assert plan == StepPlan(preempts=(B,), admits=(Admission(A, blocks(0, 1)),), rows=(PlannedRow(A, 8, 2),))


def test_a_waiting_request_that_is_not_the_oldest_displaces_nobody() -> None:
    rows = view(running(A, 7, 6, 0, 1), waiting(B, 6), running(C, 7, 6, 2, 3))
    assert scheduler().plan(rows) == StepPlan(rows=(PlannedRow(A, 6, 1), PlannedRow(C, 6, 1)))


def test_a_follower_waits_for_its_leader_and_an_unrelated_younger_request_passes_it() -> None:
    leader = running(A, 9, 0, next_block_key="first")
    follower = waiting(B, 9, probe=PrefixProbe(next_block_key="first"))
    plan = scheduler().plan(view(leader, follower, waiting(C, 3), free=10))
    assert plan == StepPlan(admits=(Admission(C),), rows=(PlannedRow(A, 0, 9), PlannedRow(C, 0, 3)))


def test_of_two_equal_prompts_that_arrive_together_one_is_admitted() -> None:
    probe = PrefixProbe(next_block_key="first")
    plan = scheduler().plan(view(waiting(A, 6, probe=probe), waiting(B, 6, probe=probe), free=10))
    assert plan == StepPlan(admits=(Admission(A),), rows=(PlannedRow(A, 0, 6),))


def test_prompts_without_a_full_block_do_not_follow_each_other() -> None:
    plan = scheduler().plan(view(waiting(A, 3), waiting(B, 3), free=10))
    assert plan.admits == (Admission(A), Admission(B))


def test_a_request_older_than_the_row_that_computes_its_block_computes_for_itself() -> None:
    older = waiting(A, 9, probe=PrefixProbe(next_block_key="first"))
    younger = running(B, 9, 0, next_block_key="first")
    plan = scheduler().plan(view(older, younger, free=10))
    assert plan == StepPlan(admits=(Admission(A),), rows=(PlannedRow(A, 0, 9), PlannedRow(B, 0, 7)))


def test_drafts_take_the_rest_of_the_budget_oldest_first() -> None:
    first, second = running(A, 6, 5, 0, 1, max_drafts=2), running(B, 6, 5, 2, 3, max_drafts=2)
    plan = scheduler(max_num_batched_tokens=5).plan(view(first, second, free=6))
    assert plan == StepPlan(rows=(PlannedRow(A, 5, 1, 2), PlannedRow(B, 5, 1, 1)))


def test_drafts_of_all_rows_together_stop_at_the_limit_of_the_step() -> None:
    first, second = running(A, 6, 5, 0, 1, max_drafts=2), running(B, 6, 5, 2, 3, max_drafts=2)
    plan = scheduler(max_step_drafts=3).plan(view(first, second, free=6))
    assert plan == StepPlan(rows=(PlannedRow(A, 5, 1, 2), PlannedRow(B, 5, 1, 1)))
    assert scheduler(max_step_drafts=0).plan(view(first, free=6)) == StepPlan(rows=(PlannedRow(A, 5, 1),))


def test_drafts_stop_at_the_limit_of_the_request() -> None:
    plan = scheduler().plan(view(running(A, 6, 5, 0, 1, limit=8, max_drafts=4), free=8))
    assert plan == StepPlan(rows=(PlannedRow(A, 5, 1, 1),))


def test_drafts_use_no_more_blocks_than_there_are_and_displace_nobody() -> None:
    rows = view(running(A, 7, 6, 0, 1, max_drafts=4), running(B, 7, 6, 2, 3))
    assert scheduler().plan(rows) == StepPlan(rows=(PlannedRow(A, 6, 1, 1), PlannedRow(B, 6, 1)))


def test_a_prompt_that_does_not_end_in_this_step_has_no_drafts() -> None:
    plan = scheduler(max_num_batched_tokens=8).plan(view(running(A, 9, 0, max_drafts=4), free=10))
    assert plan == StepPlan(rows=(PlannedRow(A, 0, 8),))


def test_reserving_admits_only_what_fits_in_the_worst_case() -> None:
    rows = view(running(A, 3, 2, 0, limit=25), waiting(B, 3, limit=18), free=9)
    assert scheduler(admission="reserve").plan(rows) == StepPlan(rows=(PlannedRow(A, 2, 1),))
    rows = view(running(A, 3, 2, 0, limit=25), waiting(B, 3, limit=17), free=9)
    assert scheduler(admission="reserve").plan(rows).admits == (Admission(B),)


def test_reserving_preempts_nobody_even_for_the_oldest() -> None:
    rows = view(waiting(A, 3, limit=40), running(B, 3, 2, 0, limit=9), free=9)
    assert scheduler(admission="reserve").plan(rows) == StepPlan(rows=(PlannedRow(B, 2, 1),))


@pytest.mark.parametrize("admission", ["optimistic", "reserve"])
def test_a_request_that_needs_exactly_the_whole_pool_is_served(admission: str) -> None:
    chosen = scheduler(admission=admission, max_num_batched_tokens=64)
    assert chosen.refusal(40, 41) is None
    plan = chosen.plan(view(waiting(A, 40, limit=41), free=10))
    assert plan == StepPlan(admits=(Admission(A),), rows=(PlannedRow(A, 0, 40),))


def test_a_request_that_needs_one_block_more_is_refused_with_both_numbers_and_what_would_fit() -> None:
    refusal = scheduler().refusal(30, 42)
    assert refusal is not None
    assert (refusal.needed, refusal.available) == (11, 10)
    assert str(refusal) == (
        "a prompt of 30 tokens and up to 12 new ones need 11 KV blocks of 4 tokens; the cache has 10: "
        "set max_tokens to at most 11 or enlarge the KV cache"
    )


def test_the_refusal_of_a_prompt_that_alone_is_too_long_says_how_long_it_may_be() -> None:
    refusal = scheduler().refusal(41, 42)
    assert refusal is not None
    assert "shorten the prompt to at most 40 tokens" in str(refusal)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_num_seqs": 17},
        {"max_num_seqs": 0},
        {"block_size": 0},
        {"num_blocks": 0},
        {"admission": "greedy"},
        {"policy": "random"},
    ],
)
def test_unusable_settings_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        scheduler(**changes)


def test_a_view_that_can_not_occur_is_reported_instead_of_planned() -> None:
    with pytest.raises(InvariantViolation, match="no room for the oldest"):
        scheduler(num_blocks=2).plan(view(waiting(A, 20), free=2))
    with pytest.raises(InvariantViolation, match="reservation"):
        scheduler(admission="reserve").plan(view(running(A, 9, 8, 0, 1), running(B, 7, 6, 2, 3)))
