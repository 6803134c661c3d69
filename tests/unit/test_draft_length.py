"""The policies that look at acceptance alone, on examples worked by hand."""

from __future__ import annotations

import pytest

from mvllm.core.errors import ConfigError
from mvllm.core.spec.draft_length import (
    AcceptanceRate,
    AcceptedLength,
    DraftDemand,
    DraftLengthPolicy,
    DraftResult,
    FixedLength,
    SpeculationStep,
)
from mvllm.core.spec.length_policies import DEFAULT_POLICY, POLICIES, create_policy
from mvllm.core.types import RequestId

A, B = RequestId("a"), RequestId("b")


def step(*results: tuple[RequestId, int, int]) -> SpeculationStep:
    """A step of 30 ms with these rows: id, proposed, accepted."""
    return SpeculationStep(
        results=tuple(DraftResult(*result) for result in results),
        num_rows=len(results),
        num_tokens=len(results) + sum(proposed for _, proposed, _ in results),
        num_prefill_tokens=0,
        context_tokens=100 * len(results),
        draft_seconds=0.005,
        forward_seconds=0.030,
    )


def length(policy: DraftLengthPolicy, id: RequestId = A, limit: int = 100) -> int:
    return policy.lengths([DraftDemand(id, 50, limit)])[0]


def lengths_after(policy: DraftLengthPolicy, results: list[tuple[int, int]]) -> list[int]:
    """The length after each round."""
    length(policy)  # rows that were not asked about are ignored
    answers = []
    for proposed, accepted in results:
        policy.observe(step((A, proposed, accepted)))
        answers.append(length(policy))
    return answers


def test_fixed_is_4_always() -> None:
    policy = create_policy("fixed")
    assert length(policy) == 4
    assert lengths_after(policy, [(4, 0), (4, 4), (0, 0)]) == [4, 4, 4]


def test_acceptance_rate_starts_at_4_and_moves_by_one_below_04_and_above_08() -> None:
    policy = create_policy("acceptance-rate")
    assert length(policy) == 4
    #                     all -> 5, 4/5 is not above 0.8, 2/5 not below 0.4, 1/5 -> 4, none -> 3
    rounds = [(4, 4), (5, 4), (5, 2), (5, 1), (4, 0)]
    assert lengths_after(policy, rounds) == [5, 5, 5, 4, 3]


def test_acceptance_rate_stays_within_1_and_8() -> None:
    policy = create_policy("acceptance-rate")
    assert lengths_after(policy, [(4, 0)] * 5) == [3, 2, 1, 1, 1]
    assert lengths_after(policy, [(1, 1)] * 9) == [2, 3, 4, 5, 6, 7, 8, 8, 8]


def test_accepted_length_is_the_rounded_mean_and_one() -> None:
    policy = create_policy("accepted-length")
    assert length(policy) == 4  # the mean starts at 3
    #         mean: 3.2, 2.56, 2.048, 2.6384, 3.51072, 4.408576
    rounds = [(4, 4), (4, 0), (4, 0), (5, 5), (7, 7), (8, 8)]
    assert lengths_after(policy, rounds) == [4, 4, 3, 4, 5, 5]


def test_accepted_length_stays_within_1_and_8() -> None:
    policy = create_policy("accepted-length")
    assert lengths_after(policy, [(4, 0)] * 20)[-1] == 1
    assert lengths_after(policy, [(8, 8)] * 40)[-1] == 8


def test_accepted_length_rounds_halves_up() -> None:
    policy = AcceptedLength()
    policy._means[A] = 2.5
    assert length(policy) == 4


@pytest.mark.parametrize("name", [name for name in POLICIES if name != DEFAULT_POLICY])
def test_a_round_without_drafts_and_the_rounds_of_others_change_nothing(name: str) -> None:
    policy = create_policy(name)
    before = length(policy)
    length(policy, B)
    policy.observe(step((A, 0, 0), (B, 4, 4)))
    policy.observe(step((A, 0, 0), (B, 4, 0)))
    assert length(policy) == before


@pytest.mark.parametrize("name", [name for name in POLICIES if name != DEFAULT_POLICY])
def test_a_released_request_starts_anew(name: str) -> None:
    policy = create_policy(name)
    lengths_after(policy, [(4, 0)] * 5)
    policy.release(A)
    policy.release(B)
    assert length(policy) == 4


@pytest.mark.parametrize("name", POLICIES)
def test_nobody_gets_more_than_the_limit(name: str) -> None:
    policy = create_policy(name)
    lengths_after(policy, [(4, 4)] * 5)
    assert length(policy, limit=2) <= 2
    assert length(policy, limit=0) == 0


@pytest.mark.parametrize(
    ("policy", "longest"), [(FixedLength(2), 2), (AcceptanceRate(3), 3), (AcceptedLength(3), 3)]
)
def test_the_greatest_length_can_be_set(policy: DraftLengthPolicy, longest: int) -> None:
    assert length(policy) == longest
    assert lengths_after(policy, [(longest, longest)] * 9)[-1] == longest


def test_policies_are_made_by_name() -> None:
    assert [type(create_policy(name)).__name__ for name in POLICIES] == [
        "AdaptiveLength",
        "FixedLength",
        "AcceptanceRate",
        "AcceptedLength",
    ]
    assert type(create_policy()) is type(create_policy("adaptive"))
    assert length(create_policy("fixed", max_length=7)) == 7
    with pytest.raises(ConfigError, match=r"adaptive, fixed, acceptance-rate, accepted-length.*'fast'"):
        create_policy("fast")
    for name in POLICIES:
        with pytest.raises(ConfigError, match="at least 1, got 0"):
            create_policy(name, max_length=0)
