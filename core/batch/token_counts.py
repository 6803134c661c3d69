"""How often each token occurs in a request's prompt and in its output, in the form that a batch wants."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence

from mvllm.core.types import TokenId


class TokenCounts:
    """Owns the counts of one request; penalties are computed from them.

    Kept as sorted arrays of 32-bit integers, so that packing a batch copies memory instead of sorting anew.
    """

    __slots__ = ("in_output", "in_prompt", "tokens")

    def __init__(self, prompt_token_ids: Sequence[TokenId]) -> None:
        counts = Counter(prompt_token_ids)
        self.tokens = array("i", sorted(counts))  # distinct, ascending
        self.in_prompt = array("i", [counts[token] for token in self.tokens])
        self.in_output = array("i", [0] * len(self.tokens))

    def __len__(self) -> int:
        return len(self.tokens)

    def add_output(self, token_ids: Iterable[TokenId]) -> None:
        """Count newly generated tokens."""
        for token in token_ids:
            index = bisect_left(self.tokens, token)
            if index == len(self.tokens) or self.tokens[index] != token:
                self.tokens.insert(index, token)
                self.in_prompt.insert(index, 0)
                self.in_output.insert(index, 0)
            self.in_output[index] += 1

    def copy(self) -> TokenCounts:
        """Equal counts that can be changed on their own."""
        other = TokenCounts(())
        other.tokens, other.in_prompt, other.in_output = self.tokens[:], self.in_prompt[:], self.in_output[:]
        return other

    def matches(self, prompt_token_ids: Sequence[TokenId], output_token_ids: Sequence[TokenId]) -> bool:
        """Whether these are the counts of those tokens; recounts everything."""
        fresh = TokenCounts(prompt_token_ids)
        fresh.add_output(output_token_ids)
        same = self.tokens == fresh.tokens and self.in_prompt == fresh.in_prompt
        return same and self.in_output == fresh.in_output
