"""What a drafter is: anything that guesses the next tokens of a sequence.

A guess costs time and never changes an answer: the target model computes every drafted position itself, and
only tokens that it would have chosen anyway are kept (`verifier.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from mvllm.core.batch.row_sampling import RowSampling
from mvllm.core.types import RequestId, TokenId


@dataclass(frozen=True, slots=True)
class DraftRow:
    """A running request for which tokens may be drafted in this step."""

    id: RequestId
    token_ids: Sequence[TokenId]  # prompt and output so far; only read, and only during the call
    max_drafts: int  # at most so many; 0: nothing is wanted now, but the drafter may catch up
    sampling: RowSampling  # how the target will draw the tokens that follow
    cache_salt: str  # requests share cached prefixes only with equal salts
    reads_all: bool = False  # it had better begin anew and read all of the tokens: `Drafter.num_unread`
    least_confidence: float = 0.0
    """Once it thinks that its drafts are all right with a smaller chance, it had better stop."""


class Drafter(ABC):
    """Proposes tokens. Subclass it to bring your own; the engine calls it from its stepping thread only.

    An exception from `propose` or an illegal proposal fails no request: the engine goes on without drafts.
    """

    name: str
    heeds_confidence = False
    """Whether it has an opinion of its drafts, and stops where `DraftRow.least_confidence` asks it to."""

    def num_at_hand(self, id: RequestId, token_ids: Sequence[TokenId]) -> int:
        """Drafts it has at hand for this sequence: they take next to no time, and it could give no more now.
        0 where it has to work them out, or does not know beforehand. Asked first in a step."""
        return 0

    def limit(self, id: RequestId, num_tokens: int) -> int:
        """Most drafts it could give a sequence of `num_tokens` tokens in this step; the scheduler reserves
        no more. Without a limit of its own: a large number."""
        return 1 << 30

    def num_behind(self, id: RequestId, num_tokens: int) -> int:
        """Tokens it would have to read before it could draft for a sequence of `num_tokens` tokens: what
        drafting for it costs at first. 0 where that is next to nothing."""
        return 0

    def num_unread(self, id: RequestId, num_tokens: int) -> int:
        """Tokens, of a sequence of `num_tokens`, that it has left out but could read after all. 0 for one
        that leaves out none."""
        return 0

    @abstractmethod
    def propose(self, rows: Sequence[DraftRow]) -> list[tuple[TokenId, ...]]:
        """Drafts for each row, in order: at most `max_drafts` token ids, () for none."""

    def release(self, id: RequestId) -> None:
        """The request was preempted or has ended: forget it. Unknown ids are ignored."""

    def check_integrity(self, live: frozenset[RequestId]) -> None:
        """Raise `InvariantViolation` if its state contradicts itself or names a request outside `live`."""

    def close(self) -> None:
        """Release memory and threads; idempotent."""
