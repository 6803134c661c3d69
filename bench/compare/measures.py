"""What differs between two observations of one plan: pure functions on what was collected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mvllm.bench.compare.collect import Footprint, Observation, Speed
from mvllm.core.types import TokenId


@dataclass(frozen=True)
class Divergence:
    """The first greedy token of a prompt that two backends choose differently, after the same tokens.

    Margins are differences of log-probabilities: by how much each backend prefers its own candidate to the
    other's. Two tiny margins mean a near-tie that rounding decides.
    """

    prompt: int  # index
    position: int  # 0 is the first token after the prompt
    base_token: TokenId
    token: TokenId
    base_margin: float
    margin: float


@dataclass(frozen=True)
class LogprobError:
    """Over every greedy position of every prompt, both backends fed the base's tokens."""

    mean: float  # absolute difference of the log-probability of the base's token
    largest: float
    divergence: float  # mean Kullback-Leibler divergence of the whole distribution from the base's, nats


@dataclass(frozen=True)
class LayerError:
    """At one layer border. `total` and `added` are root mean squares over the tokens of |difference| / |the
    base's activations|; `scale` is a median over the tokens.
    """

    total: float  # of the activations
    added: float  # of what the layer itself made of it: this border's difference minus the one before
    scale: float  # by how much what the layer adds to the activations is too large, relatively


@dataclass(frozen=True)
class Difference:
    """One backend against the base."""

    agreement: float  # share of positions with the same best token, both fed the base's tokens
    same_answers: int  # prompts whose free-running greedy tokens are all equal
    divergences: tuple[Divergence, ...]  # one for each other prompt
    logprob_error: LogprobError
    layers: tuple[LayerError, ...]  # border 0 is the embedding, border i the output of layer i - 1


@dataclass(frozen=True)
class Result:
    """One backend's line in the report; `difference` is None for the base."""

    backend: str
    speeds: tuple[Speed, ...]
    footprint: Footprint
    difference: Difference | None


def compare(base: Observation, other: Observation) -> Difference:
    """How `other` differs from `base`."""
    pairs = list(zip(base.logprobs, other.logprobs, strict=True))
    same = [ours.argmax(axis=-1) == theirs.argmax(axis=-1) for theirs, ours in pairs]
    divergences = _divergences(base, other)
    return Difference(
        agreement=float(np.mean(np.concatenate(same))),
        same_answers=len(base.greedy) - len(divergences),
        divergences=divergences,
        logprob_error=_logprob_error(base.greedy, pairs),
        layers=_layer_errors(base.taps, other.taps),
    )


def first_above(layers: Sequence[LayerError], threshold: float) -> int | None:
    """The first border at which a layer adds more than `threshold`, or something that is no number."""
    return next((border for border, error in enumerate(layers) if not error.added <= threshold), None)


def first_off_scale(layers: Sequence[LayerError], threshold: float) -> int | None:
    """The first border whose layer is too large or too small by more than `threshold`, or by no number.

    Rounding turns the activations in random directions and leaves their scale: a systematic error stands out
    here even if it is smaller than the rounding.
    """
    return next((border for border, error in enumerate(layers) if not abs(error.scale) <= threshold), None)


def _divergences(base: Observation, other: Observation) -> tuple[Divergence, ...]:
    found = []
    for prompt, (theirs, ours) in enumerate(zip(base.greedy, other.greedy, strict=True)):
        position = next(
            (i for i, pair in enumerate(zip(theirs, ours, strict=True)) if pair[0] != pair[1]), None
        )
        if position is None:
            continue
        base_token, token = theirs[position], ours[position]
        base_row, row = base.logprobs[prompt][position], other.logprobs[prompt][position]
        base_margin = float(base_row[base_token] - base_row[token])
        margin = float(row[token] - row[base_token])
        found.append(Divergence(prompt, position, base_token, token, base_margin, margin))
    return tuple(found)


def _logprob_error(
    greedy: Sequence[Sequence[TokenId]],
    pairs: Sequence[tuple[NDArray[np.float32], NDArray[np.float32]]],
) -> LogprobError:
    errors, divergences = [], []
    for tokens, (theirs, ours) in zip(greedy, pairs, strict=True):
        rows = np.arange(len(tokens))
        errors.append(np.abs(ours[rows, tokens] - theirs[rows, tokens]))
        with np.errstate(invalid="ignore"):
            weighted = np.exp(theirs.astype(np.float64)) * (theirs.astype(np.float64) - ours)
        # A token that the base rules out adds nothing, whatever the other thinks of it.
        divergences.append(np.where(np.isneginf(theirs), 0.0, weighted).sum(axis=-1))
    error = np.concatenate(errors)
    return LogprobError(
        mean=float(error.mean()),
        largest=float(error.max()),
        divergence=float(np.concatenate(divergences).mean()),
    )


def _layer_errors(
    base: Sequence[Sequence[NDArray[np.float32]]], other: Sequence[Sequence[NDArray[np.float32]]]
) -> tuple[LayerError, ...]:
    errors = []
    before = np.zeros((1, 1)), np.zeros((1, 1))  # (base's activations, difference)
    for border in range(len(base[0])):
        theirs = np.concatenate([taps[border] for taps in base]).astype(np.float64)
        difference = np.concatenate([taps[border] for taps in other]) - theirs  # [all tokens, hidden]
        contribution, added = theirs - before[0], difference - before[1]
        errors.append(
            LayerError(_relative(difference, theirs), _relative(added, theirs), _scale(added, contribution))
        )
        before = theirs, difference
    return tuple(errors)


def _scale(added: NDArray[np.float64], contribution: NDArray[np.float64]) -> float:
    """The median over rows of the part of `added` along `contribution`, relative to it."""
    squares = np.sum(contribution**2, axis=-1)
    along = np.sum(added * contribution, axis=-1)
    return float(np.median(along / np.where(squares == 0, 1.0, squares)))


def _relative(difference: NDArray[np.float64], values: NDArray[np.float64]) -> float:
    """Root mean square over rows of |difference| / |values|; a row of zeros counts by its difference."""
    sizes = np.linalg.norm(values, axis=-1)
    ratios = np.linalg.norm(difference, axis=-1) / np.where(sizes == 0, 1.0, sizes)
    return float(np.sqrt(np.mean(ratios**2)))
