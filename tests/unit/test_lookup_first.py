"""When drafts are looked up, and when the other drafter is asked."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mvllm.core.batch.row_sampling import RowSampling
from mvllm.core.batch.sampling_row import SamplingRow
from mvllm.core.errors import InvariantViolation
from mvllm.core.request import Request, SamplingParams
from mvllm.core.spec.drafter import Drafter, DraftRow
from mvllm.core.spec.lookup_first import LEAST_MATCH, LookupFirst
from mvllm.core.spec.ngram_drafter import NgramDrafter
from mvllm.core.types import RequestId, TokenId

A, B = RequestId("a"), RequestId("b")
COPIED = [5, 6, 7, 8, 9, 10, 5, 6, 7, 8]  # 9 and 10 should follow
NEW = [5, 6, 7, 8, 9, 10]


class Other(Drafter):
    """Drafts 99s, and keeps what it is asked for."""

    name = "other"
    heeds_confidence = True

    def __init__(self) -> None:
        self.asked: list[dict[RequestId, int]] = []
        self.released: list[RequestId] = []
        self.closed = False

    def limit(self, id: RequestId, num_tokens: int) -> int:
        return 3

    def num_behind(self, id: RequestId, num_tokens: int) -> int:
        return 20

    def num_unread(self, id: RequestId, num_tokens: int) -> int:
        return 30

    def propose(self, rows: Sequence[DraftRow]) -> list[tuple[TokenId, ...]]:
        self.asked.append({row.id: row.max_drafts for row in rows})
        return [(99,) * row.max_drafts for row in rows]

    def release(self, id: RequestId) -> None:
        self.released.append(id)

    def close(self) -> None:
        self.closed = True


def make() -> tuple[LookupFirst, Other]:
    other = Other()
    return LookupFirst(other), other


def row(id: RequestId, tokens: list[int], max_drafts: int) -> DraftRow:
    request = Request(id, tuple(tokens), SamplingParams(temperature=0), 0, max_tokens=9)
    return DraftRow(id, tokens, max_drafts, RowSampling(SamplingRow.of(request), None, len(tokens)), "")


def test_what_followed_a_long_match_is_drafted_and_the_other_rests() -> None:
    drafter, other = make()
    assert drafter.num_at_hand(A, COPIED) == LEAST_MATCH
    assert drafter.num_at_hand(B, NEW) == 0
    assert drafter.limit(A, len(COPIED)) == LEAST_MATCH
    assert drafter.limit(B, len(NEW)) == 3
    assert drafter.propose([row(A, COPIED, 2), row(B, NEW, 3)]) == [(9, 10), (99, 99, 99)]
    assert other.asked == [{B: 3}]


def test_a_short_match_is_nothing() -> None:
    drafter, _ = make()
    tokens = [*NEW, 1, *COPIED[-(LEAST_MATCH - 1) :]]
    assert drafter.num_at_hand(A, tokens) == 0
    assert drafter.propose([row(A, tokens, 2)]) == [(99, 99)]


def test_a_row_that_wants_nothing_gets_nothing() -> None:
    drafter, other = make()
    drafter.num_at_hand(A, COPIED)
    assert drafter.propose([row(A, COPIED, 0)]) == [()]
    assert other.asked == [{A: 0}]


def test_what_was_looked_up_for_an_earlier_step_is_not_drafted() -> None:
    drafter, _ = make()
    drafter.num_at_hand(A, COPIED)
    tokens = [*COPIED, 1]
    assert drafter.limit(A, len(tokens)) == 3
    assert drafter.propose([row(A, tokens, 2)]) == [(99, 99)]


def test_it_heeds_what_the_other_heeds() -> None:
    assert LookupFirst(Other()).heeds_confidence
    assert not LookupFirst(NgramDrafter()).heeds_confidence


def test_what_the_other_has_to_read_is_told() -> None:
    drafter, _ = make()
    drafter.num_at_hand(A, COPIED)
    assert (drafter.num_behind(A, len(COPIED)), drafter.num_unread(A, len(COPIED))) == (20, 30)


def test_both_forget_a_row_and_are_closed() -> None:
    drafter, other = make()
    drafter.num_at_hand(A, COPIED)
    drafter.check_integrity(frozenset({A}))
    with pytest.raises(InvariantViolation, match="L4"):
        drafter.check_integrity(frozenset())
    drafter.release(A)
    drafter.check_integrity(frozenset())
    assert other.released == [A]
    assert drafter.limit(A, len(COPIED)) == 3
    drafter.close()
    assert other.closed
