"""Prompt lookup: what followed the latest tokens when they stood in the text before, will follow again.

The idea is A. Saxena's "Prompt Lookup Decoding" (2023). It costs no model and pays where an answer repeats
parts of its prompt or of itself: edited code, quotations, tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mvllm.core.errors import ConfigError, InvariantViolation
from mvllm.core.spec.drafter import Drafter, DraftRow
from mvllm.core.spec.ngram_index import NgramIndex
from mvllm.core.types import RequestId, TokenId

DEFAULT_MIN_NGRAM = 1
DEFAULT_MAX_NGRAM = 16
MAX_CANDIDATES = 256
"""Earlier places that are compared, the latest first: bounds the work in a text that repeats itself."""


@dataclass(slots=True)
class _Row:
    """A row's index, and the copy drafted last: tokens from `at` on were expected to be those from `source`
    on. Both move on as far as that comes true."""

    index: NgramIndex
    source: int = 0  # 0: nothing was copied yet
    at: int = 0

    def follow(self, tokens: Sequence[TokenId]) -> bool:
        """Move on over what was added; False if the copy has broken off."""
        while self.at < len(tokens) and tokens[self.source] == tokens[self.at]:
            self.source += 1
            self.at += 1
        return self.at == len(tokens)


class NgramDrafter(Drafter):
    """Finds the longest n-gram, of `max_ngram` down to `min_ngram` tokens, that ends the sequence and stood
    in it before, and drafts what followed it there.

    Among places of equal length it takes the first one after the point where the copy drafted last broke
    off, or else the latest: edited text mostly follows its original in order. It drafts no more tokens
    than were found equal: the longer the match, the further it can be trusted. A draft that reaches the
    end of the sequence goes on with its own beginning, as periodic text does.

    Owns an index of each row's tokens, about 150 bytes a token, until the row is released. A call takes
    microseconds; the first one for a row indexes its prompt.

    Raises:
        ConfigError: on construction, if 1 <= min_ngram <= max_ngram does not hold.
    """

    name = "ngram"

    def __init__(self, *, min_ngram: int = DEFAULT_MIN_NGRAM, max_ngram: int = DEFAULT_MAX_NGRAM) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ConfigError(f"n-grams need 1 <= min_ngram <= max_ngram, got {min_ngram} and {max_ngram}")
        self._min_ngram = min_ngram
        self.max_ngram = max_ngram
        self._rows: dict[RequestId, _Row] = {}

    def propose(self, rows: Sequence[DraftRow]) -> list[tuple[TokenId, ...]]:
        return [self.look_up(row.id, row.token_ids, row.max_drafts) for row in rows]

    def release(self, id: RequestId) -> None:
        self._rows.pop(id, None)

    def check_integrity(self, live: frozenset[RequestId]) -> None:
        if not self._rows.keys() <= live:
            raise InvariantViolation(f"L4: indexed rows {sorted(self._rows)}, live requests {sorted(live)}")

    def look_up(self, id: RequestId, tokens: Sequence[TokenId], max_drafts: int) -> tuple[TokenId, ...]:
        """Drafts for the sequence `tokens` of a request; () if `max_drafts` is 0."""
        if max_drafts <= 0:
            return ()
        row = self._rows.get(id)
        if row is None:
            row = self._rows[id] = _Row(NgramIndex(self._min_ngram))
        row.index.extend(tokens)
        end, length = self._best_match(row, tokens)
        if length == 0:
            return ()
        row.source, row.at = end, len(tokens)
        return _copied(tokens, end, min(length, max_drafts))

    def _best_match(self, row: _Row, tokens: Sequence[TokenId]) -> tuple[int, int]:
        """End and length of the best earlier match; length 0 without one."""
        best, best_length = 0, 0
        if row.source and row.follow(tokens):
            best_length = common_suffix(tokens, row.source, self.max_ngram)
            if best_length == self.max_ngram:
                return row.source, best_length
            best = row.source
        for count, end in enumerate(row.index.earlier_ends()):
            if count == MAX_CANDIDATES:
                break
            if best_length and tokens[end - best_length : end] != tokens[len(tokens) - best_length :]:
                continue  # shorter than the best
            length = common_suffix(tokens, end, self.max_ngram)
            if length > best_length or best > end >= row.source > 0:
                best, best_length = end, length
        return best, best_length


def common_suffix(tokens: Sequence[TokenId], end: int, limit: int) -> int:
    """How many tokens before `end` are those at the end of the sequence, at most `limit`."""
    offset = len(tokens) - end
    length = 0
    while length < min(limit, end) and tokens[end - 1 - length] == tokens[end + offset - 1 - length]:
        length += 1
    return length


def _copied(tokens: Sequence[TokenId], start: int, count: int) -> tuple[TokenId, ...]:
    """`count` tokens from `start` on; past the end of the sequence those just copied."""
    period = len(tokens) - start
    if count <= period:
        return tuple(tokens[start : start + count])
    source = tokens[start:]
    return tuple([source[index % period] for index in range(count)])
