"""Every rule of tests/property/text_rules.py, on random cases."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.property.text_rules import RULES


@pytest.mark.parametrize("name", RULES)
def test_the_rule_holds(name: str) -> None:
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        RULES[name](data)

    check()
