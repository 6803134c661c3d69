"""Verification of drafts: V1 and V4, on its own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mvllm.core.spec.verifier import accepted_length

tokens = st.lists(st.integers(0, 1), max_size=6)


@given(tokens, st.lists(st.integers(0, 1), min_size=7, max_size=7))
def test_v1_the_accepted_drafts_are_the_longest_prefix_that_the_target_chose(
    drafts: list[int], chosen: list[int]
) -> None:
    accepted = accepted_length(drafts, chosen)
    assert 0 <= accepted <= len(drafts)
    assert drafts[:accepted] == chosen[:accepted]
    assert accepted == len(drafts) or drafts[accepted] != chosen[accepted]


@given(tokens, st.integers(0, 1))
def test_v4_drafts_that_are_the_targets_choices_are_all_accepted(drafts: list[int], last: int) -> None:
    assert accepted_length(drafts, [*drafts, last]) == len(drafts)


def test_v1_without_drafts_there_is_nothing_to_accept() -> None:
    assert accepted_length((), [7]) == 0


def test_drafts_after_the_first_mismatch_do_not_count_even_if_they_are_equal() -> None:
    assert accepted_length((1, 9, 3), (1, 2, 3, 4)) == 1
