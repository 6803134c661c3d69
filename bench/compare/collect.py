"""Runs a plan on one backend and writes down what came out. Nothing is judged here."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mvllm.bench.compare.plan import BLOCK_SIZE, Plan
from mvllm.core.batch.batcher import Batcher, BatchRow
from mvllm.core.batch.row_sampling import RowSampling
from mvllm.core.batch.sampling_row import SamplingRow, TokenBias
from mvllm.core.load.contents import Checkpoint
from mvllm.core.step import ForwardBatch
from mvllm.core.tensor import Backend, Model
from mvllm.core.types import BlockId, RequestId, TokenId, ceil_div

Clock = Callable[[], float]

_SECONDS_FOR_REPEATS = 1.0  # a measurement that took less is repeated
_REPEATS = 3

_NO_BIAS = TokenBias()
_GREEDY = SamplingRow(
    filters=(0.0, 1.0, 0.0, 1.0, 0.0, 0.0),
    top_k=0,
    seed=0,
    num_logprobs=-1,
    has_penalties=False,
    min_tokens=0,
    early_bias=_NO_BIAS,
    bias=_NO_BIAS,
)


@dataclass(frozen=True)
class Speed:
    """Tokens per second over all sequences of a batch."""

    sequences: int
    prefill: float
    decode: float


@dataclass(frozen=True)
class Footprint:
    """What loading and running took."""

    load_seconds: float
    first_step_seconds: float  # the first prompt; compiling and widening at first use included
    weight_bytes: int
    resident_bytes: int | None  # growth of the process while the model ran; None where it can't be told
    kv_dtype: str


@dataclass(frozen=True, eq=False)
class Observation:
    """What one backend did with a plan. P prompts, M = max_tokens, V the vocabulary, L layers."""

    backend: str
    greedy: tuple[tuple[TokenId, ...], ...]  # [P][M] its own greedy tokens
    logprobs: tuple[NDArray[np.float32], ...]  # [P] of f32[M, V], after the base's tokens
    taps: tuple[list[NDArray[np.float32]], ...]  # [P][L + 1] of f32[prompt + M - 1, hidden], on these tokens
    speeds: tuple[Speed, ...]
    footprint: Footprint


def observe(
    backend: Backend,
    checkpoint: Checkpoint,
    plan: Plan,
    forced: Sequence[Sequence[TokenId]] | None,
    clock: Clock = time.perf_counter,
) -> Observation:
    """Load the model, run the plan, close the model.

    Args:
        forced: the base's greedy tokens of each prompt, on which log-probabilities and activations are
            taken; None for the base itself, which takes its own.

    Raises:
        ModelFileError, ConfigError, CapacityError: the backend can't run this model so.
    """
    gc.collect()
    resident_before = resident_bytes()
    geometry = plan.geometry(backend)
    start = clock()
    with closing(backend.load(checkpoint.spec, checkpoint.weights, geometry)) as model:
        load_seconds = clock() - start
        runner = _Runner(model, plan.longest)
        start = clock()
        greedy = [runner.greedy(plan.prompts[0].token_ids, 1)]
        first_step_seconds = clock() - start
        greedy = [runner.greedy(prompt.token_ids, plan.max_tokens) for prompt in plan.prompts]
        followed = greedy if forced is None else forced
        sequences = [
            (*prompt.token_ids, *tokens[: plan.max_tokens - 1])
            for prompt, tokens in zip(plan.prompts, followed, strict=True)
        ]
        logprobs = tuple(_log_softmax(runner.logits(ids, plan.max_tokens)) for ids in sequences)
        taps = tuple(runner.taps(ids) for ids in sequences)
        speeds = tuple(_speed(runner, plan, count, clock) for count in plan.batch_sizes)
        resident_after = resident_bytes()
        growth = None
        if resident_before is not None and resident_after is not None:
            growth = max(0, resident_after - resident_before)
        footprint = Footprint(load_seconds, first_step_seconds, model.weight_bytes, growth, geometry.dtype)
    return Observation(backend.name, tuple(map(tuple, greedy)), logprobs, taps, speeds, footprint)


class _Runner:
    """Sequences on one model, each in blocks of its own. Owns the batcher; the model's KV pool changes."""

    def __init__(self, model: Model, longest: int) -> None:
        self._model = model
        self._blocks_each = ceil_div(longest, BLOCK_SIZE)
        self._batcher = Batcher(BLOCK_SIZE)

    def greedy(self, prompt: Sequence[TokenId], count: int) -> list[TokenId]:
        """The `count` likeliest tokens after `prompt`, computed one by one; ties go to the lowest id."""
        tokens, done = list(prompt), 0
        for _ in range(count):
            logits = self._model.logits(self._batch([(tokens, done)]))
            done = len(tokens)
            tokens.append(int(np.argmax(logits[0])))
        return tokens[len(prompt) :]

    def logits(self, tokens: Sequence[TokenId], count: int) -> NDArray[np.float32]:
        """f32[count, V] at the last `count` positions, in one pass."""
        return self._model.logits(self._batch([(tokens, 0)], count))

    def taps(self, tokens: Sequence[TokenId]) -> list[NDArray[np.float32]]:
        """Activations f32[T, hidden] at every layer border."""
        return self._model.taps(self._batch([(tokens, 0)]))

    def step(self, sequences: Sequence[tuple[Sequence[TokenId], int]]) -> None:
        """One step, sampler included, over (tokens, how many of them are computed already) each."""
        self._model.step(self._batch(sequences))

    def _batch(
        self, sequences: Sequence[tuple[Sequence[TokenId], int]], num_logit_rows: int = 1
    ) -> ForwardBatch:
        return self._batcher.pack(
            [
                BatchRow(
                    id=RequestId(str(index)),
                    table=self._table(index),
                    token_ids=tokens,
                    drafts=(),
                    start=start,
                    end=len(tokens),
                    sampling=RowSampling(_GREEDY, None, len(tokens)),
                    num_logit_rows=num_logit_rows,
                )
                for index, (tokens, start) in enumerate(sequences)
            ]
        )

    def _table(self, index: int) -> tuple[BlockId, ...]:
        first = index * self._blocks_each
        return tuple(BlockId(first + block) for block in range(self._blocks_each))


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """In float64 and rounded once; rows with unusable logits become NaN quietly."""
    wide = logits.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        wide -= wide.max(axis=-1, keepdims=True)
        wide -= np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return wide.astype(np.float32)


def _speed(runner: _Runner, plan: Plan, count: int, clock: Clock) -> Speed:
    """Prefill `count` sequences in one step, then decode them together.

    What they go on with is given: every backend gets the same tokens, and one that computes NaN has none.
    """
    length = plan.speed_tokens
    sequences = [_filler(plan, index) for index in range(count)]
    prefills: list[float] = []
    decodes: list[float] = []
    while len(prefills) < _REPEATS and sum(prefills) + sum(decodes) < _SECONDS_FOR_REPEATS:
        start = clock()
        runner.step([(tokens[:length], 0) for tokens in sequences])
        middle = clock()
        for done in range(length, length + plan.speed_steps):
            runner.step([(tokens[: done + 1], done) for tokens in sequences])
        prefills.append(middle - start)
        decodes.append(clock() - middle)
    return Speed(
        count,
        prefill=count * plan.speed_tokens / statistics.median(prefills),
        decode=count * plan.speed_steps / statistics.median(decodes),
    )


def _filler(plan: Plan, index: int) -> list[TokenId]:
    """What a sequence is measured with: the prompts' tokens in turn, from another one on for each index."""
    source = [token for prompt in plan.prompts for token in prompt.token_ids]
    length = plan.speed_tokens + plan.speed_steps
    return [source[(index + position) % len(source)] for position in range(length)]


def resident_bytes() -> int | None:
    """Memory of this process that is in use now; None where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")
