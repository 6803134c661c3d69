"""The reference sampler. It is the definition: other backends must give the same bits for the same logits.

Written for reading, not for speed. Order of the steps and every definition: README.md in this folder.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mvllm.core.request import GREEDY_TEMPERATURE
from mvllm.core.sampling.arithmetic import MASS_UNITS, log_scalar, masses
from mvllm.core.sampling.keyed_noise import gumbel
from mvllm.core.sampling.penalties import modified_logits
from mvllm.core.step import RowStatus, SamplingArrays, StepOutput

GREEDY_BELOW = np.float32(GREEDY_TEMPERATURE)
NO_TOKEN = -1


@dataclass(frozen=True)
class _RowResult:
    token: int = NO_TOKEN
    status: RowStatus = RowStatus.OK
    logprob: float = 0.0
    rank: int = 0
    target_logprob: float = 0.0
    top_tokens: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


def sample(logits: NDArray[np.float32], sampling: SamplingArrays) -> StepOutput:
    """Choose a token for every row of logits f32[S, V]; neither argument is changed.

    A row whose logits are unusable gets a status other than OK and token -1; other rows don't notice.
    """
    rows = [_sample_row(row_logits, sampling, row) for row, row_logits in enumerate(logits)]
    width = max(0, int(sampling.num_logprobs.max(initial=0)))
    top_tokens = np.full((len(rows), width), NO_TOKEN, np.int32)
    top_logprobs = np.zeros((len(rows), width), np.float32)
    for index, row in enumerate(rows):
        top_tokens[index, : len(row.top_tokens)] = row.top_tokens
        top_logprobs[index, : len(row.top_logprobs)] = row.top_logprobs
    return StepOutput(
        tokens=np.array([row.token for row in rows], np.int32),
        status=np.array([row.status for row in rows], np.int32),
        logprob=np.array([row.logprob for row in rows], np.float32),
        rank=np.array([row.rank for row in rows], np.int32),
        target_logprob=np.array([row.target_logprob for row in rows], np.float32),
        top_tokens=top_tokens,
        top_logprobs=top_logprobs,
    )


def _sample_row(logits: NDArray[np.float32], sampling: SamplingArrays, row: int) -> _RowResult:
    status = row_status(logits)
    if status is not RowStatus.OK:
        return _RowResult(status=status)
    with np.errstate(all="ignore"):  # penalties may overflow; the status says so
        modified = modified_logits(logits, sampling, row)
    status = row_status(modified)
    if status is not RowStatus.OK:
        return _RowResult(status=status)
    token = _choose(modified, sampling, row)
    return _with_logprobs(token, logits, sampling, row)


def row_status(logits: NDArray[np.float32]) -> RowStatus:
    """What is wrong with logits f32[V], if anything; -inf for some tokens is fine."""
    if np.isnan(logits).any():
        return RowStatus.NAN
    if (logits == np.inf).any():
        return RowStatus.INFINITE
    return RowStatus.EMPTY if (logits == -np.inf).all() else RowStatus.OK


def _choose(logits: NDArray[np.float32], sampling: SamplingArrays, row: int) -> int:
    temperature = sampling.temperature[row]
    if temperature < GREEDY_BELOW:
        return int(np.argmax(logits))
    scaled = scaled_logits(logits, temperature)
    kept = kept_tokens(
        logits,
        scaled,
        min_p=float(sampling.min_p[row]),
        top_k=int(sampling.top_k[row]),
        top_p=float(sampling.top_p[row]),
    )
    kept = np.sort(kept)  # so that argmax gives a tie to the lowest id
    noise = gumbel(sampling.seed[row], int(sampling.position[row]), kept)
    return int(kept[np.argmax(scaled[kept] + noise)])


def descending(logits: NDArray[np.float32]) -> NDArray[np.int64]:
    """Ids of the tokens in logits f32[V] by falling logit, equal ones by rising id."""
    return np.argsort(-logits, kind="stable")


def scaled_logits(logits: NDArray[np.float32], temperature: np.float32) -> NDArray[np.float64]:
    """Logits f32[V] as float64[V] in units of the temperature, the greatest being 0; -inf stays."""
    inverse = 1.0 / float(temperature)
    finite = logits > -np.inf
    distance = np.where(finite, logits, logits.max()).astype(np.float64) - float(logits.max())
    return np.where(finite, distance * inverse, -np.inf)


def kept_tokens(
    logits: NDArray[np.float32], scaled: NDArray[np.float64], *, min_p: float, top_k: int, top_p: float
) -> NDArray[np.int64]:
    """Ids that min-p, then top-k, then top-p leave over, best first. Every filter keeps a prefix of the
    descending order of tokens, and at least one token.
    """
    kept = descending(logits)
    kept = kept[logits[kept] > -np.inf]
    if min_p > 0.0:
        kept = kept[scaled[kept] >= log_scalar(min_p)]
    if top_k > 0:
        kept = kept[:top_k]
    if top_p < 1.0:
        mass = np.cumsum(masses(scaled[kept]))
        needed = np.ceil(top_p * float(mass[-1]))
        kept = kept[: 1 + int(np.searchsorted(mass, np.int64(needed)))]
    return kept


def _with_logprobs(token: int, logits: NDArray[np.float32], sampling: SamplingArrays, row: int) -> _RowResult:
    num_logprobs, target = int(sampling.num_logprobs[row]), int(sampling.target[row])
    if num_logprobs < 0 and target < 0:
        return _RowResult(token)
    logprobs = raw_logprobs(logits)
    target_logprob = float(logprobs[target]) if target >= 0 else 0.0
    if num_logprobs < 0:
        return _RowResult(token, target_logprob=target_logprob)
    order = descending(logits)
    top = order[:num_logprobs]
    return _RowResult(
        token,
        logprob=float(logprobs[token]),
        rank=1 + int(np.flatnonzero(order == token)[0]),
        target_logprob=target_logprob,
        top_tokens=tuple(top.tolist()),
        top_logprobs=tuple(logprobs[top].tolist()),
    )


def raw_logprobs(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Log-softmax f32[V] of the model's own logits f32[V], computed in float64 and rounded once."""
    distance = (logits.astype(np.float64) + 0.0) - float(logits.max())  # + 0.0: -0.0 counts as 0.0
    total = float(masses(distance).sum()) / MASS_UNITS
    with np.errstate(over="ignore"):  # below the range of float32 it is -inf
        return (distance - log_scalar(total)).astype(np.float32)
