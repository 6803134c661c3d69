"""Keeps what callers write from becoming part of a control token."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from mvllm.core.text.control_tokens import ControlTokens

_PRIVATE_USE = range(0xF0000, 0xFFFFE)

Disguise = Mapping[str, str]
"""Border characters of control tokens, each with the private-use character that stands in for it."""


class ContentGuard:
    """Replaces, in callers' strings, each character with which a control token begins or ends.

    Whatever a template then does with the strings, both ends of every control token in its output come from
    the template itself. Strings that the template may look for, such as "</think>", stay as they are where no
    control token can overlap them. Immutable.
    """

    def __init__(self, control: ControlTokens, template_literals: Iterable[str]) -> None:
        self._borders = sorted(control.border_characters)
        kept = [
            literal
            for literal in template_literals
            if not control.border_characters.isdisjoint(literal) and not control.can_overlap(literal)
        ]
        kept.sort(key=len, reverse=True)
        borders = [f"[{re.escape(''.join(self._borders))}]"] if self._borders else []
        self._pattern = re.compile("|".join([*map(re.escape, kept), *borders])) if borders else None

    def disguise_for(self, texts: Iterable[str]) -> Disguise:
        """Stand-ins that occur in none of `texts`."""
        taken = set().union(*map(set, texts))
        free = (chr(code) for code in _PRIVATE_USE if chr(code) not in taken)
        return dict(zip(self._borders, free, strict=False))

    def disguised(self, value: Any, disguise: Disguise) -> Any:
        """A copy of a JSON-like value with the characters replaced in all its strings, keys included."""
        if isinstance(value, str):
            if self._pattern is None:
                return value
            return self._pattern.sub(lambda found: disguise.get(found[0], found[0]), value)
        if isinstance(value, dict):
            return {
                self.disguised(key, disguise): self.disguised(item, disguise) for key, item in value.items()
            }
        if isinstance(value, list):
            return [self.disguised(item, disguise) for item in value]
        return value


def undisguised(text: str, disguise: Disguise) -> str:
    return text.translate({ord(stand_in): border for border, stand_in in disguise.items()})
