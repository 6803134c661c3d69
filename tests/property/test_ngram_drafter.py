"""The n-gram drafter against a linear scan that shares nothing with its index."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mvllm.core.batch.row_sampling import RowSampling
from mvllm.core.batch.sampling_row import SamplingRow
from mvllm.core.errors import ConfigError, InvariantViolation
from mvllm.core.request import Request, SamplingParams
from mvllm.core.spec.drafter import DraftRow
from mvllm.core.spec.ngram_drafter import MAX_CANDIDATES, NgramDrafter
from mvllm.core.types import RequestId

SAMPLING = RowSampling(SamplingRow.of(Request(RequestId("r"), (0,), SamplingParams(), 0, 1)), None, 1)


def row(tokens: list[int], max_drafts: int, id: str = "r") -> DraftRow:
    return DraftRow(RequestId(id), tokens, max_drafts, SAMPLING, "")


def scan(
    tokens: list[int], source: int, in_step: bool, min_ngram: int, max_ngram: int
) -> tuple[int, int] | None:
    """End and length of the match to go on from, by looking at every place.

    `source` is where the last copy stands, 0 without one; `in_step`: all tokens since were copied from there.
    """
    size = len(tokens)

    def matching(end: int) -> int:
        lengths = range(1, min(end, max_ngram) + 1)
        return max((n for n in lengths if tokens[end - n : end] == tokens[size - n :]), default=0)

    places = [end for end in range(min_ngram, size) if matching(end) >= min_ngram][-MAX_CANDIDATES:]
    if in_step:
        places.append(source)
    if not places:
        return None
    longest = max(map(matching, places))
    best = [end for end in places if matching(end) == longest]
    if in_step and source in best:
        return source, longest
    return min([end for end in best if end >= source > 0], default=max(best)), longest


def copied(tokens: list[int], start: int, count: int) -> tuple[int, ...]:
    """One token after the other, each from as far back as the first."""
    sequence = list(tokens)
    for _ in range(count):
        sequence.append(sequence[start + len(sequence) - len(tokens)])
    return tuple(sequence[len(tokens) :])


texts = st.lists(st.integers(0, 2), min_size=1, max_size=40)


@given(
    prompt=texts,
    steps=st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=5), st.integers(0, 6))),
    min_ngram=st.integers(1, 3),
    more=st.integers(0, 4),
)
def test_it_drafts_what_a_scan_of_the_whole_text_finds(
    prompt: list[int], steps: list[tuple[list[int], int]], min_ngram: int, more: int
) -> None:
    drafter = NgramDrafter(min_ngram=min_ngram, max_ngram=min_ngram + more)
    tokens = list(prompt)
    start, at = 0, 0  # of the last copy
    for added, max_drafts in [([], 4), *steps]:
        tokens += added
        [drafts] = drafter.propose([row(tokens, max_drafts)])
        if max_drafts == 0:
            assert drafts == ()
            continue
        expected = copied(tokens[:at], start, len(tokens) - at) if at else ()
        equal = [pair[0] == pair[1] for pair in zip(expected, tokens[at:], strict=True)] if at else []
        num_copied = equal.index(False) if False in equal else len(equal)
        source, in_step = start + num_copied, at > 0 and all(equal)
        found = scan(tokens, source, in_step, min_ngram, min_ngram + more)
        if found is None:
            assert drafts == ()
            continue
        end, length = found
        assert drafts == copied(tokens, end, min(length, max_drafts))
        start, at = end, len(tokens)


@given(st.lists(texts, min_size=2, max_size=4), st.integers(1, 6))
def test_rows_are_independent_of_each_other(prompts: list[list[int]], max_drafts: int) -> None:
    together = NgramDrafter().propose([row(tokens, max_drafts, str(i)) for i, tokens in enumerate(prompts)])
    alone = [NgramDrafter().propose([row(tokens, max_drafts)])[0] for tokens in prompts]
    assert together == alone


def test_periodic_text_is_drafted_past_its_end() -> None:
    text = [7, 8, 9, 7, 8, 9, 7]
    assert NgramDrafter().propose([row(text, 8)]) == [(8, 9, 7, 8)]
    assert NgramDrafter().propose([row(text, 2)]) == [(8, 9)]


def test_an_edited_copy_goes_on_where_its_original_does() -> None:
    # "2 3" stands twice in the original, after 1 and after 5; the copy has a 9 between 1 and 2.
    original = [0, 1, 2, 3, 4, 5, 2, 3, 6]
    drafter = NgramDrafter()
    assert drafter.propose([row([*original, 8, 0, 1], 2)]) == [(2, 3)]
    assert drafter.propose([row([*original, 8, 0, 1, 9, 2, 3], 2)]) == [(4, 5)]
    assert NgramDrafter().propose([row([*original, 8, 0, 1, 9, 2, 3], 2)]) == [(6, 8)], "without the copy"


def test_text_that_never_repeats_is_not_drafted() -> None:
    assert NgramDrafter().propose([row(list(range(50)), 4)]) == [()]


def test_released_rows_leave_nothing_behind() -> None:
    drafter = NgramDrafter()
    drafter.propose([row([1, 2, 1, 2], 2, "a"), row([1, 2, 1, 2], 2, "b")])
    drafter.release(RequestId("a"))
    drafter.release(RequestId("a"))
    drafter.check_integrity(frozenset({RequestId("b")}))
    with pytest.raises(InvariantViolation, match="L4"):
        drafter.check_integrity(frozenset())


def test_impossible_lengths_are_refused() -> None:
    with pytest.raises(ConfigError, match="min_ngram"):
        NgramDrafter(min_ngram=0)
    with pytest.raises(ConfigError, match="max_ngram"):
        NgramDrafter(min_ngram=3, max_ngram=2)
