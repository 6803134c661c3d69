"""Checks a case against a table of named rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVarTuple, Unpack

Case = TypeVarTuple("Case")


def check_all(rules: Mapping[str, Callable[[Unpack[Case]], None]], *case: *Case) -> None:
    """Raise what the first broken rule raises, with the name of the rule as a note."""
    for name, rule in rules.items():
        try:
            rule(*case)
        except Exception as error:
            error.add_note(f"The broken rule: {name}")
            raise
