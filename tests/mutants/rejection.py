"""Planted bugs of rejection sampling, among them those that other projects had."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mvllm.bench.experiments.speculation import rejection
from tests.mutants.mutant import Mutant

Array = NDArray[Any]

_accept_prob = rejection.accept_prob
_residual = rejection.residual


def _keeps_what_the_target_likes(p: Array, q: Array, draft: int) -> float:
    return float(rejection.normalised(p)[draft])


def _forgets_impossible_drafts(p: Array, q: Array, draft: int) -> float:
    return _accept_prob(p, q, draft) if q[draft] > 0 else 1.0


def _ratio_upside_down(p: Array, q: Array, draft: int) -> float:
    return min(1.0, float(q[draft] / p[draft])) if p[draft] > 0 else 1.0


def _residual_is_the_target(p: Array, q: Array) -> Array:
    return rejection.normalised(p)


def _residual_keeps_the_absolute_difference(p: Array, q: Array) -> Array:
    difference = np.abs(rejection.normalised(p) - rejection.normalised(q))
    return rejection.normalised(difference) if difference.any() else rejection.normalised(p)


def _residual_of_equals_is_undefined(p: Array, q: Array) -> Array:
    excess = np.maximum(rejection.normalised(p) - rejection.normalised(q), 0.0)
    with np.errstate(invalid="ignore"):
        return np.asarray(excess / excess.sum())


def _matches_samples(
    target: Sequence[Array], drafter: Sequence[Array], drafts: Sequence[int], uniforms: Sequence[float]
) -> tuple[int, ...]:
    """Keep a draft if the target's own draw equals it; else draw anew."""
    for position, draft in enumerate(drafts):
        if rejection.draw(target[position], uniforms[position]) != draft:
            return (*drafts[:position], rejection.draw(target[position], uniforms[-1]))
    return (*drafts, rejection.draw(target[len(drafts)], uniforms[-1]))


MUTANTS: dict[str, Mutant] = {
    "a draft is kept with the target's probability": Mutant(
        rejection, "accept_prob", _keeps_what_the_target_likes, "V8"
    ),
    "impossible drafts are kept": Mutant(rejection, "accept_prob", _forgets_impossible_drafts, "V8"),
    "the ratio is upside down": Mutant(rejection, "accept_prob", _ratio_upside_down, "V8"),
    "the residual is the target": Mutant(rejection, "residual", _residual_is_the_target, "V8"),
    "the residual has both signs": Mutant(
        rejection, "residual", _residual_keeps_the_absolute_difference, "V8"
    ),
    "no residual for equal distributions": Mutant(
        rejection, "residual", _residual_of_equals_is_undefined, "V8"
    ),
    "drafts must equal a sample of the target": Mutant(rejection, "verify", _matches_samples, "L3"),
}
