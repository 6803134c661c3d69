"""Which token ids a draft model chooses among: without rare ones a small model's pass takes much less time.

Of a small model with a large vocabulary the head is a good part (37 % of what a pass of a 0.5B Qwen reads),
and most of its rows stand for tokens that the text at hand never uses. Vocabularies of merged tokens are
ordered by frequency, so a beginning of the head serves nearly as well as the whole. How long it must be
depends on the text, for the words of one language may lie far behind those of another: the text itself is
asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from mvllm.core.step import NO_VOCAB_LIMIT
from mvllm.core.tensor import Capabilities, ModelWeights
from mvllm.core.types import RequestId, TokenId

SAMPLE_TOKENS = 512  # of a text, its last ones
_REFRESH_TOKENS = 64  # new tokens after which a text is looked at again
_UNSEEN_TOKENS = 4  # added to the sample, spread evenly over all ids
_STEP = 1024  # limits are multiples


@dataclass(slots=True)
class _RowLimit:
    num_tokens: int  # of the text when it was looked at
    limit: int


class VocabLimits:
    """Chooses a limit below which ids are drafted. Owns what it knows of each row.

    Args:
        vocab_size: of the draft model.
        head_share: part of a pass that the whole head takes, 0 to 1; 0: nothing is ever left out.
    """

    def __init__(self, vocab_size: int, head_share: float) -> None:
        self._vocab_size = vocab_size
        self._head_share = head_share
        self._limits: dict[RequestId, _RowLimit] = {}

    def of(self, texts: Iterable[tuple[RequestId, Sequence[TokenId]]]) -> int:
        """The `vocab_limit` of a pass that draws one token after each of these texts."""
        if not self._head_share:
            return NO_VOCAB_LIMIT
        return max((self._row_limit(id, tokens) for id, tokens in texts), default=NO_VOCAB_LIMIT)

    def release(self, id: RequestId) -> None:
        """Forget a row; unknown ids are ignored."""
        self._limits.pop(id, None)

    @property
    def rows(self) -> frozenset[RequestId]:
        """Those it knows something of."""
        return frozenset(self._limits)

    def _row_limit(self, id: RequestId, tokens: Sequence[TokenId]) -> int:
        known = self._limits.get(id)
        if known is None or len(tokens) >= known.num_tokens + _REFRESH_TOKENS:
            limit = best_limit(tokens[-SAMPLE_TOKENS:], self._vocab_size, self._head_share)
            known = self._limits[id] = _RowLimit(len(tokens), limit)
        return known.limit


def head_share_of(model: ModelWeights, backend: Capabilities) -> float:
    """The head's part of the bytes that a pass over one token reads; 0 where a limit saves none of them."""
    if not backend.skips_logits:
        return 0.0
    layers = sum(
        weight.nbytes for layer in model.layers for weight in vars(layer).values() if weight is not None
    )
    share: float = model.head.nbytes / (model.head.nbytes + layers)
    return share


def best_limit(sample: Sequence[TokenId], vocab_size: int, head_share: float) -> int:
    """The limit with the best chance that a token lies below it, cubed, per time of a pass.

    Cubed, since a missing token spoils the drafts behind it too, and a shorter pass saves less than it is
    shorter: the other half of a round is verification. On 282 source and text files limits for exponents of 2
    to 4 were worth the same within 2 %.

    Args:
        sample: ids of a text, each in [0, vocab_size).

    Returns:
        A multiple of 1,024, or `NO_VOCAB_LIMIT` if nothing is better than all ids.
    """
    if not len(sample):
        return NO_VOCAB_LIMIT
    ids = np.sort(np.asarray(sample, np.int64))
    limits = (ids // _STEP + 1) * _STEP
    shares = np.minimum(limits / vocab_size, 1.0)
    inside = np.searchsorted(ids, limits) + _UNSEEN_TOKENS * shares
    chances = inside / (len(ids) + _UNSEEN_TOKENS)
    worth = chances**3 / (1.0 - head_share * (1.0 - shares))
    best = int(np.argmax(worth))
    if worth[best] <= 1.0 or limits[best] >= vocab_size:
        return NO_VOCAB_LIMIT
    return int(limits[best])
