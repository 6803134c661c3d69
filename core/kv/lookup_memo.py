"""Lookups of waiting rows, which ask for the same tokens step after step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mvllm.core.kv.prefix_trie import NodeKey, PrefixTrie
from mvllm.core.types import BlockId, TokenId

MAX_REMEMBERED = 512  # more than a scheduler's view shows of waiting rows


@dataclass(frozen=True, slots=True)
class _Remembered:
    token_ids: tuple[TokenId, ...]  # kept alive, so that its `id` stays its own
    path: tuple[BlockId, ...]  # not empty
    last_key: NodeKey  # the key object of path[-1]


class LookupMemo:
    """Owns remembered paths of a trie; does not change the trie or any answer.

    A path is valid as long as its last node exists, since a parent outlives its children; then only
    its continuation is looked up. Only tuples are remembered: other sequences may change.
    """

    def __init__(self, trie: PrefixTrie) -> None:
        self._trie = trie
        self._remembered: dict[tuple[int, str], _Remembered] = {}  # oldest first

    def lookup(self, token_ids: Sequence[TokenId], salt: str, limit: int) -> tuple[BlockId, ...]:
        """Same as `PrefixTrie.lookup`; `limit` must be the same for the same tuple."""
        if type(token_ids) is not tuple:
            return tuple(self._trie.lookup(token_ids, salt, limit))
        memo_key = (id(token_ids), salt)
        known = self._remembered.get(memo_key)
        if known is not None and self._trie.key(known.path[-1]) is not known.last_key:
            del self._remembered[memo_key]
            known = None
        path = tuple(self._trie.lookup(token_ids, salt, limit, known.path if known is not None else ()))
        if known is not None and len(path) == len(known.path):
            return known.path
        last_key = self._trie.key(path[-1]) if path else None
        if last_key is not None:
            if known is None and len(self._remembered) >= MAX_REMEMBERED:
                del self._remembered[next(iter(self._remembered))]
            self._remembered[memo_key] = _Remembered(token_ids, path, last_key)
        return path
