"""Stop strings in a text that arrives in deltas."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from mvllm.core.text.tokenizer import Tokenizer
from mvllm.core.types import TokenId


class StopState(NamedTuple):
    """The end of a text that could still become a stop string. Immutable, shorter than the longest one."""

    tail: str = ""
    matched: str | None = None


class StopStrings:
    """Watches for the first stop string to be completed.

    That match ends the text. Of several stop strings completed by the same character the one that begins
    first counts, so no part of any is left in the text. Both follow from the text alone: how it is cut into
    deltas does not matter.

    Owns the stop strings; does not own the state of a text, which is a value that the caller keeps.
    """

    def __init__(self, stops: tuple[str, ...], include_in_output: bool) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._include = include_in_output

    def start(self) -> StopState:
        return StopState()

    def advance(self, state: StopState, delta: str) -> tuple[StopState, str, str | None]:
        """Take in `delta`.

        Returns the new state, the text that is certain to stand before any match (with `include_in_output`:
        all text up to the end of the match), and the matched stop string, if any. After a match nothing more
        comes.
        """
        if state.matched is not None:
            return state, "", state.matched
        if not self._stops:
            return state, delta, None
        text = state.tail + delta
        match = self._first_match(text)
        if match is not None:
            start, end = match
            emitted = text[len(state.tail) : end] if self._include else text[:start]
            return StopState("", text[start:end]), emitted, text[start:end]
        tail = self._possible_beginning(text)
        emitted = delta if self._include else text[: len(text) - len(tail)]
        return StopState(tail), emitted, None

    def flush(self, state: StopState) -> str:
        """What was held back, now that no more text comes."""
        return "" if self._include or state.matched is not None else state.tail

    def _first_match(self, text: str) -> tuple[int, int] | None:
        """The interval [start, end) of the match that ends first, and of those the one that begins first."""
        ends_and_starts = [
            (start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0
        ]
        if not ends_and_starts:
            return None
        end, start = min(ends_and_starts)
        return start, end

    def _possible_beginning(self, text: str) -> str:
        """The longest suffix of `text` with which some stop string begins."""
        longest = max(map(len, self._stops)) - 1
        for start in range(max(0, len(text) - longest), len(text)):
            suffix = text[start:]
            if any(stop.startswith(suffix) for stop in self._stops):
                return suffix
        return ""


def stop_token_ids_for(tokenizer: Tokenizer, stops: Iterable[str]) -> frozenset[TokenId]:
    """The control tokens that stop strings name exactly: left out of decoded text, they would never match."""
    tokens = tokenizer.control.by_text
    return frozenset(tokens[stop].id for stop in stops if stop in tokens)
