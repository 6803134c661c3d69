"""What a planted bug replaces, and the rule that has to catch it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Mutant:
    """Put `replacement` in the place of `owner.attribute`; the rule named `broken_rule` then fails."""

    owner: Any
    attribute: str
    replacement: Any
    broken_rule: str
