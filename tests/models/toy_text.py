"""A tokenizer small enough to see through: each token id has fixed bytes, two of them half a character."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

PIECES = (b"a", b"b", b"", b"ab", b" ", b"\xc3", b"\xa9", b"ba", b"c", b"\n", b"aa", b"b a")
"""Bytes of each token; 5 and 6 make "é" together and are broken characters apart."""


def decode_certain(token_ids: Sequence[int]) -> str:
    """Text of the tokens without what a later byte could still change."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(_bytes_of(token_ids))


def decode_all(token_ids: Sequence[int]) -> str:
    return _bytes_of(token_ids).decode("utf-8", "replace")


class ToyDecoder:
    """Incremental decoding; the state is the bytes not yet shown."""

    def start(self, prompt_token_ids: Sequence[int]) -> bytes:
        return b""

    def advance(self, state: bytes, token_id: int) -> tuple[bytes, str]:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(state + PIECES[token_id])
        return decoder.getstate()[0], text

    def finish(self, state: bytes) -> str:
        return state.decode("utf-8", "replace")


def _bytes_of(token_ids: Sequence[int]) -> bytes:
    return b"".join(PIECES[token] for token in token_ids)
