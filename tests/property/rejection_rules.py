"""What rejection sampling must do, as functions of the distributions; INVARIANTS 6, V8 and V9, and L3.

They call the module's functions through the module, so that planted bugs reach them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray

from mvllm.bench.experiments.speculation import rejection
from tests.sampling_cases import Row, arrays

Array = NDArray[np.float64]

TOLERANCE = 1e-12


def emitted(p: Array, q: Array) -> Array:
    """float64[V]: the exact law of the token that comes of one draft from q."""
    kept = np.zeros(len(p))
    for token in np.flatnonzero(q):
        kept[token] = q[token] * rejection.accept_prob(p, q, int(token))
    return np.asarray(kept + (1.0 - kept.sum()) * rejection.residual(p, q))


def the_token_is_distributed_as_the_target(p: Array, q: Array) -> None:
    p, q = rejection.normalised(p), rejection.normalised(q)
    assert np.abs(emitted(p, q) - p).max() <= TOLERANCE


def equal_distributions_keep_every_draft(p: Array, q: Array) -> None:
    for token in np.flatnonzero(p):
        assert rejection.accept_prob(p, p, int(token)) == 1.0
    assert np.array_equal(rejection.residual(p, p), rejection.normalised(p))
    assert abs(rejection.acceptance(p, p) - 1.0) <= TOLERANCE


def disjoint_distributions_keep_no_draft(p: Array, q: Array) -> None:
    even, odd = np.arange(2 * len(p)) % 2 == 0, np.arange(2 * len(p)) % 2 == 1
    apart_p, apart_q = np.zeros(2 * len(p)), np.zeros(2 * len(p))
    apart_p[even], apart_q[odd] = p, q
    for token in np.flatnonzero(apart_q):
        assert rejection.accept_prob(apart_p, apart_q, int(token)) == 0.0
    assert np.abs(rejection.residual(apart_p, apart_q) - rejection.normalised(apart_p)).max() <= TOLERANCE
    assert rejection.acceptance(apart_p, apart_q) == 0.0


def a_draft_that_the_drafter_cannot_make_is_refused(p: Array, q: Array) -> None:
    impossible = np.append(q, 0.0)
    try:
        rejection.accept_prob(np.append(p, 1.0), impossible, len(q))
    except ValueError:
        return
    raise AssertionError("accepted")


def acceptance_is_the_chance_to_keep_a_draft(p: Array, q: Array) -> None:
    drawn = rejection.normalised(q)
    kept = sum(drawn[token] * rejection.accept_prob(p, q, int(token)) for token in np.flatnonzero(q))
    assert abs(rejection.acceptance(p, q) - kept) <= TOLERANCE


RULES: dict[str, Callable[[Array, Array], None]] = {
    "V8 the token is distributed as the target": the_token_is_distributed_as_the_target,
    "V8 equal distributions keep every draft": equal_distributions_keep_every_draft,
    "V8 disjoint distributions keep no draft": disjoint_distributions_keep_no_draft,
    "V8 a draft that the drafter cannot make is refused": a_draft_that_the_drafter_cannot_make_is_refused,
    "V8 acceptance is the chance to keep a draft": acceptance_is_the_chance_to_keep_a_draft,
}


# --- V9: the joint law of several tokens -------------------------------------------------------------


Chain = Callable[[tuple[int, ...]], Array]
"""The distribution of the next token, given those before it."""


def random_chain(vocab: int, seed: int, *, zeros: bool) -> Chain:
    def next_token(prefix: tuple[int, ...]) -> Array:
        rng = np.random.default_rng([seed, *prefix, len(prefix)])
        weights = rng.exponential(size=vocab)
        if zeros:
            weights[rng.integers(vocab)] = 0.0
        return np.asarray(weights / weights.sum())

    return next_token


def rounds(p: Chain, q: Chain, length: int) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every outcome of a round of `length` drafts, with its exact probability."""
    vocab = len(p(()))
    for drafts in product(range(vocab), repeat=length):
        chance = float(np.prod([q(drafts[:i])[draft] for i, draft in enumerate(drafts)]))
        if chance == 0.0:
            continue
        for num_kept in range(length + 1):
            target, drafter = p(drafts[:num_kept]), q(drafts[:num_kept])
            if num_kept == length:
                law, here = target, chance
            else:
                keep = rejection.accept_prob(target, drafter, drafts[num_kept])
                law, here = rejection.residual(target, drafter), chance * (1.0 - keep)
                chance *= keep
            yield from (((*drafts[:num_kept], last), here * law[last]) for last in range(vocab))


def prefixes_follow_the_target_chain(p: Chain, q: Chain, length: int) -> None:
    """An outcome says nothing of later tokens, so it is continued by the target's own law."""
    vocab = len(p(()))
    joint = dict.fromkeys(product(range(vocab), repeat=length + 1), 0.0)
    for outcome, chance in rounds(p, q, length):
        for rest in product(range(vocab), repeat=length + 1 - len(outcome)):
            whole = (*outcome, *rest)
            later = [p(whole[:i])[whole[i]] for i in range(len(outcome), length + 1)]
            joint[whole] += chance * float(np.prod(later))
    for whole, chance in joint.items():
        expected = float(np.prod([p(whole[:i])[token] for i, token in enumerate(whole)]))
        assert abs(chance - expected) <= TOLERANCE, whole


# --- draws -------------------------------------------------------------------------------------------


def chi_square(counts: Array, p: Array) -> float:
    """Statistic of draws against p; outcomes of probability 0 must not have come up."""
    assert not counts[p == 0.0].any()
    expected = p[p > 0.0] * counts.sum()
    return float(((counts[p > 0.0] - expected) ** 2 / expected).sum())


def rounds_drawn(
    target: Sequence[Array], drafter: Sequence[Array], *, draws: int, seed: int
) -> list[tuple[int, ...]]:
    """Outcomes of rounds whose distributions do not depend on the tokens before."""
    rng = np.random.default_rng(seed)
    outcomes = []
    for _ in range(draws):
        drafts = [rejection.draw(q, rng.random()) for q in drafter]
        outcomes.append(rejection.verify(target, drafter, drafts, rng.random(len(drafter) + 1).tolist()))
    return outcomes


def settings_of_l3() -> tuple[Array, Array]:
    """Eight tokens; target and drafter logits fixed; temperature 1, top-p 0.9 and penalties."""
    rng = np.random.default_rng(11)
    logits = rng.normal(0.0, 1.5, (2, 8)).astype(np.float32)
    row = Row(top_p=0.9, presence_penalty=0.4, frequency_penalty=0.3, counts={1: (1, 0), 4: (0, 2)})
    sampling = arrays([row, row])
    p = rejection.sampling_distribution(logits[0], sampling, 0)
    q = rejection.sampling_distribution(logits[1], sampling, 1)
    return p, q
