"""Draft-length policies under random steps: INVARIANTS 6, V7. Planted bugs show that the rules can fail."""

from __future__ import annotations

from functools import partial
from unittest import mock

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.mutants.draft_length import MUTANTS
from tests.property.check_rules import check_all
from tests.property.draft_length_rules import CASES, RULES, Turn

IDS = "abc"
shares = st.fixed_dictionaries(dict.fromkeys(IDS, st.sampled_from([0.0, 0.3, 0.5, 1.0, 1.0])))
seconds = st.sampled_from([0.0, 1e-5, 0.004, 0.03, 0.05, 3.0])


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    ids = draw(st.lists(st.sampled_from(IDS), min_size=1, max_size=3, unique=True))
    return Turn(
        limits={id: draw(st.sampled_from([0, 1, 3, 30, 30])) for id in ids},
        proposing=draw(shares),
        accepting=draw(shares),
        draft_seconds=draw(seconds),
        forward_seconds=draw(seconds),
        prefill=draw(st.sampled_from([0, 0, 0, 32])),
        ended=draw(st.frozensets(st.sampled_from(IDS), max_size=1)),
        at_hand=draw(st.frozensets(st.sampled_from(IDS), max_size=1)),
    )


@given(script=st.lists(turns(), max_size=15))
def test_v7_rules(script: list[Turn]) -> None:
    """V7: every rule, with every policy that it holds for."""
    check_all({f"{rule}, {name}": partial(RULES[rule], name) for rule, name in CASES}, script)


class _Caught(Exception):
    pass


@settings(max_examples=300, database=None, derandomize=True, phases=[Phase.generate])
@given(script=st.lists(turns(), min_size=5, max_size=15))
def _look_for_it(rule: str, script: list[Turn]) -> None:
    for name in [name for other, name in CASES if other == rule]:
        try:
            RULES[rule](name, script)
        except AssertionError as error:
            raise _Caught from error


def test_every_rule_is_broken_by_some_planted_bug() -> None:
    assert {mutant.broken_rule for mutant in MUTANTS.values()} == set(RULES)


@pytest.mark.parametrize("name", MUTANTS)
def test_the_planted_bug_is_caught(name: str) -> None:
    mutant = MUTANTS[name]
    with mock.patch.object(mutant.owner, mutant.attribute, mutant.replacement), pytest.raises(_Caught):
        _look_for_it(mutant.broken_rule)
