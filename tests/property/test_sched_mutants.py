"""Each planted scheduler bug is caught by the rule that it breaks, so those rules can fail."""

from __future__ import annotations

from unittest import mock

import pytest
from hypothesis import Phase, given, settings

from mvllm.core.errors import InvariantViolation
from mvllm.core.step import SchedulerView
from tests.mutants.sched import MUTANTS
from tests.property.scheduler_rules import RULES, block_arithmetic_is_exact
from tests.strategies import SchedulerLimits, scheduler_cases

SOME_PLAN_EXISTS = "S6-some-plan-exists"
ALL_RULES = {
    **RULES,
    "S4-block-arithmetic": block_arithmetic_is_exact,
    SOME_PLAN_EXISTS: lambda limits, view, plan: None,  # broken by raising instead of planning
}


class _Caught(Exception):
    pass


@pytest.mark.parametrize("name", MUTANTS)
def test_the_planted_bug_is_caught(name: str) -> None:
    mutant = MUTANTS[name]

    @settings(max_examples=3000, database=None, derandomize=True, phases=[Phase.generate])
    @given(case=scheduler_cases())
    def look_for_it(case: tuple[SchedulerLimits, SchedulerView]) -> None:
        limits, view = case
        try:
            plan = limits.scheduler().plan(view)
        except InvariantViolation as error:
            if mutant.broken_rule == SOME_PLAN_EXISTS:
                raise _Caught from error
            return
        try:
            ALL_RULES[mutant.broken_rule](limits, view, plan)
        except AssertionError as error:
            raise _Caught from error

    with mock.patch.object(mutant.owner, mutant.attribute, mutant.replacement), pytest.raises(_Caught):
        look_for_it()


def test_every_rule_is_broken_by_some_planted_bug() -> None:
    assert {mutant.broken_rule for mutant in MUTANTS.values()} == set(ALL_RULES)
