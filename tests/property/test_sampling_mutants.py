"""Each planted sampler bug is caught by the rule or law that it breaks, so those can fail."""

from __future__ import annotations

from unittest import mock

import pytest
from hypothesis import Phase, given, settings

from tests.mutants.sampling import MUTANTS
from tests.property.sampler_rules import LAWS, RULES
from tests.sampling_cases import Batch, batches


class _Caught(Exception):
    pass


@settings(max_examples=500, database=None, derandomize=True, phases=[Phase.generate])
@given(batch=batches())
def _look_for_it(rule: str, batch: Batch) -> None:
    try:
        RULES[rule](batch)
    except AssertionError as error:
        raise _Caught from error


def test_every_rule_is_broken_by_some_planted_bug() -> None:
    assert {mutant.broken_rule for mutant in MUTANTS.values()} == {*RULES, *LAWS}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_planted_bug_is_caught(name: str) -> None:
    mutant = MUTANTS[name]
    with mock.patch.object(mutant.owner, mutant.attribute, mutant.replacement):
        if mutant.broken_rule in LAWS:
            with pytest.raises(AssertionError):
                LAWS[mutant.broken_rule]()
        else:
            with pytest.raises(_Caught):
                _look_for_it(mutant.broken_rule)
