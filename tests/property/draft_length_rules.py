"""What every draft-length policy must do whatever happens: INVARIANTS 6, V7."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mvllm.core.spec import length_policies
from mvllm.core.spec.draft_length import DraftDemand, DraftLengthPolicy, DraftResult, SpeculationStep
from mvllm.core.types import RequestId

MAX_LENGTH = 6
FREE = 1000  # a limit that limits nothing


@dataclass(frozen=True)
class Turn:
    """A step: which rows decode, what they may get, and what becomes of it."""

    limits: dict[str, int]
    proposing: dict[str, float]  # share of the allowed length that the drafter uses
    accepting: dict[str, float]  # share of the proposed drafts that is accepted
    draft_seconds: float
    forward_seconds: float
    prefill: int
    ended: frozenset[str]
    at_hand: frozenset[str] = frozenset()  # rows whose drafts have been looked up


def play(policy: DraftLengthPolicy, turns: Sequence[Turn]) -> list[dict[str, tuple[int, int]]]:
    """Drive a policy; returns for each turn, by row: the length, and how many drafts were proposed."""
    num_tokens = dict.fromkeys("abc", 20)
    record = []
    for turn in turns:
        ids = list(turn.limits)
        demands = [
            DraftDemand(
                RequestId(id),
                num_tokens[id],
                turn.limits[id],
                num_at_hand=turn.limits[id] if id in turn.at_hand else 0,
            )
            for id in ids
        ]
        lengths = dict(zip(ids, policy.lengths(demands), strict=True))
        proposed = {id: round(turn.proposing[id] * length) for id, length in lengths.items()}
        accepted = {id: round(turn.accepting[id] * count) for id, count in proposed.items()}
        for id in ids:
            num_tokens[id] += accepted[id] + 1
        results = [DraftResult(RequestId(id), proposed[id], accepted[id]) for id in ids]
        policy.observe(
            SpeculationStep(
                results=tuple(results),
                num_rows=len(ids) + (turn.prefill > 0),
                num_tokens=len(ids) + sum(proposed.values()) + turn.prefill,
                num_prefill_tokens=turn.prefill,
                context_tokens=sum(num_tokens[id] for id in ids),
                draft_seconds=turn.draft_seconds,
                forward_seconds=turn.forward_seconds,
            )
        )
        for id in turn.ended:
            policy.release(RequestId(id))
        record.append({id: (lengths[id], proposed[id]) for id in ids})
    return record


def lengths_stay_within_their_bounds(name: str, turns: Sequence[Turn]) -> None:
    least = 0 if name == "adaptive" else 1
    record = play(length_policies.create_policy(name, max_length=MAX_LENGTH), turns)
    for turn, lengths in zip(turns, record, strict=True):
        for id, (length, _) in lengths.items():
            assert min(least, turn.limits[id]) <= length <= min(MAX_LENGTH, turn.limits[id])


def a_round_without_drafts_changes_nothing(name: str, turns: Sequence[Turn]) -> None:
    """Nothing of the next length of the policies that look at acceptance alone."""
    policy = length_policies.create_policy(name, max_length=MAX_LENGTH)
    play(policy, turns)
    for id in "abc":
        demand = [DraftDemand(RequestId(id), 20, FREE)]
        before = policy.lengths(demand)
        policy.observe(SpeculationStep((DraftResult(RequestId(id), 0, 0),), 1, 1, 0, 20, 0.0, 0.03))
        assert policy.lengths(demand) == before


def the_acceptance_rate_moves_by_one_at_most(name: str, turns: Sequence[Turn]) -> None:
    policy = length_policies.create_policy(name, max_length=MAX_LENGTH)
    for turn in turns:
        demands = [DraftDemand(RequestId(id), 20, FREE) for id in "abc"]
        before = policy.lengths(demands)
        play(policy, [turn])
        after = policy.lengths(demands)
        for id, old, new in zip("abc", before, after, strict=True):
            assert id in turn.ended or abs(new - old) <= 1


def equal_observations_give_equal_lengths(name: str, turns: Sequence[Turn]) -> None:
    first = play(length_policies.create_policy(name, max_length=MAX_LENGTH), turns)
    assert play(length_policies.create_policy(name, max_length=MAX_LENGTH), turns) == first


def ended_requests_leave_nothing_behind(name: str, turns: Sequence[Turn]) -> None:
    policy = length_policies.create_policy(name, max_length=MAX_LENGTH)
    play(policy, turns)
    for id in "abc":
        policy.release(RequestId(id))
    late = tuple(DraftResult(RequestId(id), 2, 1) for id in "abc")
    policy.observe(SpeculationStep(late, 3, 9, 0, 60, 0.01, 0.03))
    assert not [id for id in "abc" if f"'{id}'" in repr(_state(policy))]


def _state(value: object) -> object:
    """Everything that hangs on an object, as plain collections."""
    if isinstance(value, dict):
        return {key: _state(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_state(item) for item in value]
    return {name: _state(item) for name, item in vars(value).items()} if hasattr(value, "__dict__") else value


RULES: dict[str, Callable[[str, Sequence[Turn]], None]] = {
    "V7 lengths stay within their bounds": lengths_stay_within_their_bounds,
    "V7 a round without drafts changes nothing": a_round_without_drafts_changes_nothing,
    "V7 acceptance-rate moves by one at most": the_acceptance_rate_moves_by_one_at_most,
    "equal observations give equal lengths": equal_observations_give_equal_lengths,
    "ended requests leave nothing behind": ended_requests_leave_nothing_behind,
}

CASES = [
    (rule, name)
    for rule in RULES
    for name in length_policies.POLICIES
    if (rule != "V7 a round without drafts changes nothing" or name != "adaptive")
    and (rule != "V7 acceptance-rate moves by one at most" or name == "acceptance-rate")
]
"""Each rule with the policies that it holds for."""
