"""Each planted bug of the text stage is caught by the rule that it breaks, so those rules can fail."""

from __future__ import annotations

from unittest import mock

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.mutants.text import MUTANTS
from tests.property.text_rules import RULES


class _Caught(Exception):
    pass


@pytest.mark.parametrize("name", MUTANTS)
def test_the_planted_bug_is_caught(name: str) -> None:
    mutant = MUTANTS[name]

    @settings(max_examples=2000, database=None, derandomize=True, phases=[Phase.generate])
    @given(data=st.data())
    def look_for_it(data: st.DataObject) -> None:
        try:
            RULES[mutant.broken_rule](data)
        except AssertionError as error:
            raise _Caught from error

    with mock.patch.object(mutant.owner, mutant.attribute, mutant.replacement), pytest.raises(_Caught):
        look_for_it()
