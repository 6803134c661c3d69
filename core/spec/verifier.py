"""Which drafts stand: the leading ones that the target has chosen itself. Pure, integers only.

The target's token at a position is a function of the model, the tokens before it, the sampling parameters and
noise that depends on (seed, position, token id) alone (`core/sampling`). So the token that the target
computes after drafts that stand is the one it would have computed without them, greedy or sampled, and
equality is all there is to verify. The drafter's probabilities are not asked for, and nothing is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence

from mvllm.core.types import TokenId


def accepted_length(drafts: Sequence[TokenId], chosen: Sequence[TokenId]) -> int:
    """How many leading drafts equal the target's own choices.

    Args:
        drafts: k proposed tokens.
        chosen: the target's tokens, at least k: the first follows the committed tokens, each further one
            follows one more draft. `chosen[accepted_length]`, if there, is right as well: only drafts that
            stand come before it.

    Returns:
        The largest a with `drafts[:a] == chosen[:a]`.
    """
    for index, draft in enumerate(drafts):
        if draft != chosen[index]:
            return index
    return len(drafts)
