"""What forwards and drafting are taken to cost, after given measurements."""

from __future__ import annotations

from mvllm.core.spec.step_costs import FORGET_AFTER, LATER_SHARE, DraftCosts, ForwardCosts


def test_what_later_passes_took_is_forgotten_if_there_were_none_for_long() -> None:
    """With a single row; what is known of eight rows stays."""
    costs = DraftCosts()
    for rows in (8, 1):
        for passes in (1, 1, 3):
            costs.add_round(rows, passes, 0.010 * passes)
    costs.add_round(1, 2, 0.090)
    for _ in range(FORGET_AFTER):
        assert costs.pass_seconds(1, 1) > 0.009
        costs.add_round(1, 1, 0.010)
    assert costs.pass_seconds(1, 1) == LATER_SHARE * costs.pass_seconds(1, 0)
    assert costs.pass_seconds(8, 1) > 0.0
    assert set(costs._later) == {8}


def test_what_first_passes_took_is_forgotten_if_no_round_had_a_single_one_for_long() -> None:
    costs = DraftCosts()
    for _ in range(4):
        costs.add_round(1, 1, 0.040)
    for _ in range(FORGET_AFTER + 4):
        costs.add_round(1, 2, 0.022)
    assert costs.pass_seconds(1, 0) < 0.012


def test_steps_with_a_row_more_do_not_tell_what_drafts_cost() -> None:
    """They share measurements with those with a row less, and may well take the same time."""
    costs = ForwardCosts()
    for rows in (38, 40) * 4:
        costs.add(rows, rows, 0.63)
    assert not costs.curve(40).is_known
    costs.add(40, 44, 0.63)
    assert costs.curve(40).is_known
    assert costs.seconds(40, 80) > 0.63 * 1.4, "four drafts among forty rows tell little"
    costs.add(40, 60, 0.64)
    assert costs.seconds(40, 80) < 0.63 * 1.1
    assert costs.curve(34).most_drafts == 20
    assert costs.curve(8).most_drafts == 0


def test_a_step_with_a_row_less_and_a_draft_more_is_one_with_drafts() -> None:
    costs = ForwardCosts()
    for _ in range(20):
        costs.add(8, 8, 0.06)
    costs.add(7, 8, 0.06)
    assert costs.curve(8).is_known
    for _ in range(FORGET_AFTER):
        costs.add(7, 8, 0.06)
    assert costs.curve(8).num_plain == 0
    for _ in range(FORGET_AFTER):
        costs.add(8, 8, 0.06)
    assert not costs.curve(8).is_known
    assert costs.seconds(8, 16) > 0.06


def test_a_later_pass_takes_no_longer_than_the_first_of_its_round() -> None:
    costs = DraftCosts()
    for passes, seconds in ((1, 0.010), (1, 0.011), (2, 0.100), (3, 0.130)):
        costs.add_round(1, passes, seconds)
    assert costs.pass_seconds(1, 1) == costs.pass_seconds(1, 0) == 0.010


def test_of_two_steps_with_drafts_the_quicker_counts_for_a_single_row_only() -> None:
    costs = ForwardCosts()
    for rows in (1, 8):
        costs.add(rows, rows, 0.025)
        for seconds in (0.045, 0.034):
            costs.add(rows, rows + 2, seconds)
    assert costs.seconds(1, 3) == 0.034
    assert costs.seconds(8, 10) == 0.045
