"""The part of a step that drafts: what it asks of drafter and policy, tells them, and survives of them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from mvllm.core.batch.sampling_row import SamplingRow
from mvllm.core.engine.request_table import RequestState, RequestTable
from mvllm.core.engine.speculator import Speculator
from mvllm.core.request import Request, SamplingParams
from mvllm.core.spec.draft_length import (
    DraftDemand,
    DraftLengthPolicy,
    DraftResult,
    FixedLength,
    SpeculationStep,
)
from mvllm.core.spec.drafter import Drafter, DraftRow
from mvllm.core.spec.speculation import Speculation
from mvllm.core.step import PlannedRow, RowDecision
from mvllm.core.types import RequestId, TokenId

A, B, C = (RequestId(name) for name in "abc")


class Clock:
    """Ticks by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class FakeDrafter(Drafter):
    """Proposes what the test says, and remembers what it was asked."""

    def __init__(self, clock: Clock, proposals: Any = (), limit: Any = 100, seconds: float = 0.0) -> None:
        self.clock = clock
        self.proposals = proposals
        self.limits = limit
        self.seconds = seconds
        self.asked: list[tuple[RequestId, int]] = []
        self.reading: list[RequestId] = []
        self.confidence: list[float] = []
        self.at_hand: Any = 0
        self.questions: list[str] = []
        self.released: list[RequestId] = []
        self.num_closed = 0

    def num_at_hand(self, id: RequestId, token_ids: Sequence[TokenId]) -> Any:
        self.questions.append(f"at hand after {len(token_ids)}")
        return self.at_hand

    def limit(self, id: RequestId, num_tokens: int) -> Any:
        self.questions.append(f"limit after {num_tokens}")
        return self.limits

    def num_unread(self, id: RequestId, num_tokens: int) -> int:
        return 2

    def propose(self, rows: Sequence[DraftRow]) -> Any:
        self.asked = [(row.id, row.max_drafts) for row in rows]
        self.reading = [row.id for row in rows if row.reads_all]
        self.confidence = [row.least_confidence for row in rows]
        self.clock.now += self.seconds
        if isinstance(self.proposals, Exception):
            raise self.proposals
        return self.proposals

    def release(self, id: RequestId) -> None:
        self.released.append(id)

    def close(self) -> None:
        self.num_closed += 1


class FakePolicy(DraftLengthPolicy):
    """Wants `answer` (called with the demands, if it can be); remembers what it was told."""

    def __init__(self, answer: Callable[[Sequence[DraftDemand]], Any]) -> None:
        self.answer = answer
        self.reading: Any = frozenset()
        self.confidence: Any = 0.0
        self.demands: list[DraftDemand] = []
        self.steps: list[SpeculationStep] = []
        self.released: list[RequestId] = []

    def lengths(self, rows: Sequence[DraftDemand]) -> Any:
        self.demands = list(rows)
        return self.answer(rows)

    def readers(self) -> Any:
        return self.reading

    def least_confidence(self) -> Any:
        return self.confidence

    def observe(self, step: SpeculationStep) -> None:
        self.steps.append(step)

    def release(self, id: RequestId) -> None:
        self.released.append(id)


def three_rows() -> list[RequestState]:
    """`a` and `b` decode with 3 tokens and 7 more to come; `c` is at its prompt."""
    table = RequestTable()
    for id in (A, B, C):
        request = Request(id, (1, 2, 3), SamplingParams(), 0, 7)
        table.add(request, SamplingRow.of(request), None)
        table.admit(id, 0)
    for id in (A, B):
        table.commit(RowDecision(id, 2), None)
    return list(table.running)


PLAN = (PlannedRow(A, 2, 1, 3), PlannedRow(B, 2, 1, 0), PlannedRow(C, 0, 2))


def speculator(drafter: Drafter, policy: DraftLengthPolicy, clock: Clock, most: int = 50) -> Speculator:
    return Speculator(Speculation(drafter, policy), vocab_size=10, max_step_drafts=most, clock=clock)


def test_decoding_rows_alone_are_asked_about_with_what_they_could_get() -> None:
    drafter, policy = FakeDrafter(Clock()), FakePolicy(lambda rows: [2, 0])
    wishes = speculator(drafter, policy, Clock()).wishes(three_rows())
    expected = DraftDemand(A, 3, limit=6, num_unread=2, num_left=7)
    assert policy.demands == [expected, replace(expected, id=B)]
    assert wishes == {A: 2}


def test_the_policy_hears_what_is_at_hand_and_the_drafter_is_asked_for_it_first() -> None:
    drafter, policy = FakeDrafter(Clock(), limit=4), FakePolicy(lambda rows: [2, 0])
    drafter.at_hand = 4
    speculator(drafter, policy, Clock()).wishes(three_rows())
    assert [demand.num_at_hand for demand in policy.demands] == [4, 4]
    assert drafter.questions == ["at hand after 3"] * 2 + ["limit after 3"] * 2


def test_the_rows_that_the_policy_names_are_told_to_read_all_their_tokens() -> None:
    drafter, policy = FakeDrafter(Clock(), [(1,), ()]), FakePolicy(lambda rows: [2, 2])
    one, states = speculator(drafter, policy, Clock()), three_rows()
    for reading in ([B], []):
        policy.reading = frozenset(reading)
        one.wishes(states)
        one.propose(PLAN, states)
        assert drafter.reading == reading


def test_the_drafter_hears_how_sure_it_has_to_be_and_the_policy_whether_it_heeds_that() -> None:
    drafter, policy = FakeDrafter(Clock(), [(1,), ()]), FakePolicy(lambda rows: [2, 2])
    one, states = speculator(drafter, policy, Clock()), three_rows()
    for heeds, confidence in ((False, 0.0), (True, 0.75)):
        drafter.heeds_confidence, policy.confidence = heeds, confidence
        one.wishes(states)
        one.propose(PLAN, states)
        assert [demand.heeds_confidence for demand in policy.demands] == [heeds] * 2
        assert drafter.confidence == [confidence] * 2


@pytest.mark.parametrize("confidence", ["sure", math.nan, -0.1, 1.5])
def test_a_confidence_that_is_none_ends_drafting_and_not_the_step(confidence: Any) -> None:
    drafter, policy = FakeDrafter(Clock(), [(1,), ()]), FakePolicy(lambda rows: [2, 2])
    one, states, policy.confidence = speculator(drafter, policy, Clock()), three_rows(), confidence
    assert one.wishes(states) == {}
    assert one.totals.switched_off is not None


def test_rows_to_read_that_are_none_end_drafting_and_not_the_step() -> None:
    drafter, policy = FakeDrafter(Clock(), [(1,), ()]), FakePolicy(lambda rows: [2, 2])
    one, states, policy.reading = speculator(drafter, policy, Clock()), three_rows(), 7
    assert one.wishes(states) == {}
    assert one.propose(PLAN, states) == [(), (), ()]
    assert one.totals.switched_off is not None


@pytest.mark.parametrize(("limit", "most", "expected"), [(4, 50, 4), (100, 5, 5), (100, 50, 6)])
def test_limits_of_drafter_step_and_request_bound_a_demand(limit: int, most: int, expected: int) -> None:
    drafter, policy = FakeDrafter(Clock(), limit=limit), FakePolicy(lambda rows: [r.limit for r in rows])
    wishes = speculator(drafter, policy, Clock(), most).wishes(three_rows())
    assert wishes == {A: expected, B: expected}


def test_a_drafter_that_can_give_nothing_yet_is_asked_all_the_same_so_that_it_can_catch_up() -> None:
    drafter, policy = FakeDrafter(Clock(), [(), ()], limit=0), FixedLength(4)
    one = speculator(drafter, policy, Clock())
    states = three_rows()
    assert one.wishes(states) == {A: 0, B: 0}
    assert one.propose([PlannedRow(A, 2, 1), PlannedRow(B, 2, 1)], states[:2]) == [(), ()]
    assert drafter.asked == [(A, 0), (B, 0)]


def test_the_drafter_is_asked_for_what_was_planned_and_only_for_rows_that_the_policy_wants() -> None:
    drafter, policy = FakeDrafter(Clock(), [(7, 8)]), FakePolicy(lambda rows: [3, 0])
    one = speculator(drafter, policy, Clock())
    states = three_rows()
    one.wishes(states)
    assert one.propose(PLAN, states) == [(7, 8), (), ()]
    assert drafter.asked == [(A, 3)]


def test_a_wanted_row_that_the_plan_gave_nothing_is_asked_for_nothing() -> None:
    drafter = FakeDrafter(Clock(), [(7,), ()])
    one = speculator(drafter, FixedLength(3), Clock())
    states = three_rows()
    one.wishes(states)
    assert one.propose(PLAN, states) == [(7,), (), ()]
    assert drafter.asked == [(A, 3), (B, 0)]


def test_the_policy_is_told_what_the_step_computed_and_took() -> None:
    clock = Clock()
    drafter, policy = FakeDrafter(clock, [(7, 8)], seconds=0.25), FakePolicy(lambda rows: [3, 0])
    one = speculator(drafter, policy, clock)
    states = three_rows()
    one.wishes(states)
    drafts = one.propose(PLAN, states)
    clock.now += 2.0
    decisions = [
        RowDecision(A, 4, (7, 9), num_drafts=2, num_accepted=1),
        RowDecision(B, 3, (5,)),
        RowDecision(C, 2),
    ]
    one.observe(PLAN, drafts, decisions, together=True)
    assert policy.steps == [
        SpeculationStep(
            results=(DraftResult(A, 2, 1), DraftResult(B, 0, 0)),
            num_rows=3,
            num_tokens=2 + 2 + 2,
            num_prefill_tokens=2,
            context_tokens=5 + 3 + 2,
            draft_seconds=0.25,
            forward_seconds=2.0,
        )
    ]
    totals = one.totals
    assert (totals.num_proposed, totals.num_accepted, totals.num_own_tokens) == (2, 1, 2)
    assert (totals.num_passes, totals.num_pass_tokens, totals.tokens_per_pass) == (2, 3, 1.5)
    assert (totals.proposed_lengths, totals.accepted_lengths) == ({0: 1, 2: 1}, {1: 1})
    assert (totals.draft_seconds, totals.verify_seconds, totals.acceptance_rate) == (0.25, 2.0, 0.5)


def test_without_decoding_rows_or_after_a_failure_there_is_nothing_to_learn() -> None:
    policy = FakePolicy(lambda rows: [0] * len(rows))
    one = speculator(FakeDrafter(Clock()), policy, Clock())
    states = three_rows()
    one.wishes(states[2:])
    one.observe(PLAN[2:], one.propose(PLAN[2:], states[2:]), [RowDecision(C, 2)], together=True)
    one.wishes(states)
    one.observe(PLAN, one.propose(PLAN, states), [RowDecision(A, 3, (7,))], together=False)
    assert policy.steps == []
    assert one.totals.num_passes == 1


PROPOSALS: list[tuple[Any, str]] = [
    (RuntimeError("no"), "RuntimeError: no"),
    ([(1,)], "1 proposals for 2 rows"),
    ([(1,), (), ()], "3 proposals for 2 rows"),
    ([(1, 2, 3, 4), ()], "4 drafts for a row of at most 3"),
    ([(), (1,)], "1 drafts for a row of at most 0"),
    ([(10,), ()], "outside of the vocabulary"),
    ([(-1,), ()], "outside of the vocabulary"),
    ([(1.5,), ()], "float"),
    ([None, ()], "not iterable"),
    (None, "no len"),
]


@pytest.mark.parametrize(("proposals", "reason"), PROPOSALS)
def test_a_drafter_that_breaks_its_contract_is_not_asked_again(
    proposals: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """L6, V7: a warning, the reason in the totals, and no drafts."""
    drafter = FakeDrafter(Clock(), proposals)
    one = speculator(drafter, FixedLength(3), Clock())
    states = three_rows()
    one.wishes(states)
    with caplog.at_level(logging.WARNING, "mvllm"):
        assert one.propose(PLAN, states) == [(), (), ()]
    assert "drafting is switched off" in caplog.text
    assert reason in (one.totals.switched_off or "")
    drafter.asked = []
    assert one.wishes(states) == {}
    assert one.propose(PLAN, states) == [(), (), ()]
    assert drafter.asked == []
    one.release(A)
    assert drafter.released == []


LENGTHS: list[tuple[Callable[[Sequence[DraftDemand]], Any], str]] = [
    (lambda rows: [1], "FakePolicy: ValueError: 1 lengths for 2 rows"),
    (lambda rows: [1, 1, 1], "3 lengths for 2 rows"),
    (lambda rows: [7, 1], "a length of 7 for a row of at most 6"),
    (lambda rows: [-1, 1], "a length of -1"),
    (lambda rows: None, "not iterable"),
    (lambda rows: [1.5, 1], "float"),
    (lambda rows: 1 // 0, "ZeroDivisionError"),
]


@pytest.mark.parametrize(("answer", "reason"), LENGTHS)
def test_a_policy_that_breaks_its_contract_ends_drafting_too(
    answer: Callable[[Sequence[DraftDemand]], Any], reason: str
) -> None:
    one = speculator(FakeDrafter(Clock()), FakePolicy(answer), Clock())
    assert one.wishes(three_rows()) == {}
    assert reason in (one.totals.switched_off or "")


def test_a_limit_that_is_no_number_ends_drafting() -> None:
    one = speculator(FakeDrafter(Clock(), limit=None), FixedLength(1), Clock())
    assert one.wishes(three_rows()) == {}
    assert one.totals.switched_off is not None


def test_an_answer_about_what_is_at_hand_that_is_no_number_ends_drafting() -> None:
    drafter = FakeDrafter(Clock())
    drafter.at_hand = "many"
    one = speculator(drafter, FixedLength(1), Clock())
    assert one.wishes(three_rows()) == {}
    assert (one.totals.switched_off or "").startswith("FakeDrafter")


def test_ended_and_preempted_rows_are_released_in_drafter_and_policy() -> None:
    drafter, policy = FakeDrafter(Clock()), FakePolicy(lambda rows: [])
    one = speculator(drafter, policy, Clock())
    one.release(A)
    assert (drafter.released, policy.released) == ([A], [A])


def test_a_drafter_that_fails_to_close_is_no_obstacle(caplog: pytest.LogCaptureFixture) -> None:
    class Stuck(FakeDrafter):
        def close(self) -> None:
            raise OSError("busy")

    with caplog.at_level(logging.WARNING, "mvllm"):
        speculator(Stuck(Clock()), FixedLength(1), Clock()).close()
    assert "closing the drafter failed: OSError: busy" in caplog.text


def test_own_tokens_are_counted_on_when_drafting_is_switched_off() -> None:
    """V7: accepted + own = output, to the end."""
    drafter = FakeDrafter(Clock(), RuntimeError("no"))
    one = speculator(drafter, FixedLength(3), Clock())
    states = three_rows()
    for _ in range(2):
        one.wishes(states)
        drafts = one.propose(PLAN, states)
        one.observe(PLAN, drafts, [RowDecision(A, 3, (7,)), RowDecision(B, 3, (5,))], together=True)
    assert (one.totals.num_own_tokens, one.totals.num_passes) == (4, 4)
