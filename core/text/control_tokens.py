"""Finding control tokens in text, and telling apart text that could become one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property

from mvllm.core.text.vocabulary import ControlToken
from mvllm.core.types import TokenId

Piece = str | TokenId
"""Ordinary text, or one control token."""


class ControlTokens:
    """The strings that stand for control tokens. Immutable."""

    def __init__(self, tokens: Mapping[str, ControlToken]) -> None:
        self.by_text = dict(tokens)
        self.ids = frozenset(token.id for token in self.by_text.values())
        self.border_characters = frozenset(text[0] for text in self.by_text) | frozenset(
            text[-1] for text in self.by_text
        )
        """A control token in text begins and ends with one of these."""
        self._lengths = sorted({len(text) for text in self.by_text}, reverse=True)
        first = "".join(sorted({text[0] for text in self.by_text}))
        self._candidates = re.compile(f"[{re.escape(first)}]") if first else None

    def split(self, text: str) -> list[Piece]:
        """`text` cut at its control tokens: leftmost first, the longest of those that begin together."""
        pieces: list[Piece] = []
        start = 0
        strip_next = False
        while (found := self._next(text, start)) is not None:
            at, end, token = found
            before = text[start:at]
            before = before.lstrip() if strip_next else before
            before = before.rstrip() if token.strips_left else before
            if before:
                pieces.append(before)
            pieces.append(token.id)
            start, strip_next = end, token.strips_right
        rest = text[start:].lstrip() if strip_next else text[start:]
        if rest:
            pieces.append(rest)
        return pieces

    def _next(self, text: str, start: int) -> tuple[int, int, ControlToken] | None:
        if self._candidates is None:
            return None
        for candidate in self._candidates.finditer(text, start):
            at = candidate.start()
            for length in self._lengths:
                token = self.by_text.get(text[at : at + length])
                if token is not None:
                    return at, at + length, token
        return None

    def can_overlap(self, literal: str) -> bool:
        """Whether a control token could share characters with an occurrence of `literal` in some text."""
        beginnings, endings = self._parts
        cuts = range(len(literal) + 1)
        return any(literal[cut:] in beginnings or literal[:cut] in endings for cut in cuts) or any(
            text in literal for text in self.by_text
        )

    @cached_property
    def _parts(self) -> tuple[frozenset[str], frozenset[str]]:
        """Every non-empty beginning, and every non-empty ending, of a control token."""
        beginnings = frozenset(text[:cut] for text in self.by_text for cut in range(1, len(text) + 1))
        endings = frozenset(text[cut:] for text in self.by_text for cut in range(len(text)))
        return beginnings, endings
