"""Where the n-grams of a growing sequence ended before: matching as in LZ77 compressors.

Positions are named by how many tokens end there: `end` e names the n-gram tokens[e - n:e], and tokens[e] is
what followed it. All ends of one n-gram are chained, the latest first (hash chains of J. Ziv and A. Lempel's
LZ77 as in the "deflate" format, RFC 1951, section 4).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from mvllm.core.types import TokenId


class NgramIndex:
    """Owns the ends of the n-grams of one sequence, for one n; holds no tokens.

    Takes about 150 bytes a token: an entry of a table for each distinct n-gram, and a link for each.
    """

    def __init__(self, size: int) -> None:
        """`size` is n, at least 1."""
        self.size = size
        self._latest: dict[tuple[TokenId, ...], int] = {}
        self._earlier = array("q")  # [end] -> the end before it of the same n-gram; 0: there is none

    def extend(self, token_ids: Sequence[TokenId]) -> None:
        """Take in what was added to the sequence since the last call."""
        size, latest, earlier = self.size, self._latest, self._earlier
        for end in range(len(earlier), len(token_ids) + 1):
            if end < size:
                earlier.append(0)
                continue
            ngram = tuple(token_ids[end - size : end])
            earlier.append(latest.get(ngram, 0))
            latest[ngram] = end

    def earlier_ends(self) -> Iterator[int]:
        """Ends, before the sequence's own, of the n-gram that it ends with; the latest first."""
        earlier = self._earlier
        end = earlier[-1] if earlier else 0
        while end:
            yield end
            end = earlier[end]
