"""Incremental detokenisation: the text of a growing token sequence, never half a character."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import NamedTuple

from mvllm.core.text.tokenizer import Tokenizer
from mvllm.core.types import TokenId


class TextState(NamedTuple):
    """Where one sequence stands between two tokens. Immutable, of constant size."""

    pending: bytes = b""  # the begun character: at most 3 bytes
    at_text_start: bool = False  # a leading space that encoding had added is still to be taken away


_BETWEEN_CHARACTERS = TextState()


class Detokenizer:
    """Turns tokens into text one at a time, for any number of sequences.

    Owns nothing of a sequence: its state is a value that the caller keeps. The texts of a sequence, joined,
    equal `Tokenizer.decode` of its output tokens as the continuation of the prompt.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()

    def start(self, prompt_token_ids: Iterable[TokenId]) -> TextState:
        """The state after the prompt. A character that the prompt leaves unfinished is not carried over."""
        if not self._tokenizer.adds_leading_space:
            return _BETWEEN_CHARACTERS
        shown = (id for id in prompt_token_ids if id not in self._skipped)
        return TextState(at_text_start=not any(map(self._tokenizer.token_bytes, shown)))

    def advance(self, state: TextState, token_id: TokenId) -> tuple[TextState, str]:
        """The state after one more token, and the text that is certain now and was not before."""
        if token_id in self._skipped:
            return state, ""
        if state == _BETWEEN_CHARACTERS:
            text = self._tokenizer.whole_text(token_id)
            if text is not None:
                return state, text
        data = self._tokenizer.token_bytes(token_id)
        if not data:
            return state, ""
        if state.at_text_start:
            data = data.removeprefix(b" ")
        data = state.pending + data
        certain, consumed = codecs.utf_8_decode(data, "replace", False)
        pending = data[consumed:]
        return (TextState(pending) if pending else _BETWEEN_CHARACTERS), certain

    def finish(self, state: TextState) -> str:
        """What is still held back when no token follows: an unfinished character, as U+FFFD."""
        return state.pending.decode("utf-8", "replace")
