"""The whole engine over the MLX backend, on a tiny model: batches, chunks, cache, speculation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
import pytest

from mvllm.backends.mlx.backend import MlxBackend
from mvllm.backends.mlx.options import MlxOptions
from mvllm.core.config import EngineConfig, kv_bytes_per_token, resolve
from mvllm.core.engine.engine import Engine
from mvllm.core.request import Request, SamplingParams
from mvllm.core.spec.draft_length import FixedLength
from mvllm.core.spec.model_drafter import ModelDrafter, ModelDrafterConfig
from mvllm.core.spec.speculation import Speculation
from mvllm.core.step import TokensOut
from mvllm.core.tensor import KvGeometry
from mvllm.core.types import RequestId
from tests.conformance.random_models import ModelShape, random_model

SHAPE = ModelShape(vocab_size=60)
PROMPTS = [
    np.random.default_rng(i).integers(0, 60, length).tolist()
    for i, length in enumerate((3, 17, 30, 1, 8, 22, 5, 12, 9, 2, 40, 6))
]
MAX_TOKENS = 6


@contextmanager
def engine(options: MlxOptions, speculation: Speculation | None = None, **settings: Any) -> Iterator[Engine]:
    spec, weights = random_model(SHAPE, seed=4)
    asked = EngineConfig(max_model_len=64, num_kv_blocks=80, block_size=4, check_integrity=True, **settings)
    config = resolve(
        asked,
        model_context=spec.context_length,
        kv_bytes_per_token=kv_bytes_per_token(spec.kv_values_per_token, "f32"),
        kv_dtype="f32",
        speculates=speculation is not None,
    )
    geometry = KvGeometry(
        num_blocks=config.num_kv_blocks,
        block_size=config.block_size,
        max_context=config.max_model_len,
        max_batch_tokens=config.max_num_batched_tokens,
        max_batch_rows=config.max_num_seqs,
        max_logit_rows=config.max_logit_rows,
        dtype="f32",
    )
    model = MlxBackend(options).load(spec, weights, geometry)
    running = Engine(model, config, vocab_size=spec.vocab_size, speculation=speculation, clock=lambda: 0.0)
    with closing(running):
        yield running


def answers(running: Engine, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy ids, all prompts submitted at once."""
    ids = [RequestId(str(index)) for index in range(len(prompts))]
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=MAX_TOKENS)
    for id, prompt in zip(ids, prompts, strict=True):
        running.submit(Request(id, tuple(prompt), params, 0, MAX_TOKENS))
    tokens: dict[RequestId, list[int]] = {id: [] for id in ids}
    while running.has_work:
        for event in running.step():
            if isinstance(event, TokensOut):
                tokens[event.id] += event.token_ids
    return [tokens[id] for id in ids]


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """Each prompt's greedy ids with nobody beside it."""
    with engine(MlxOptions(exact=True), enable_prefix_caching=False) as running:
        return [answers(running, [prompt])[0] for prompt in PROMPTS]


@pytest.mark.parametrize("together", [2, 5, 12])
@pytest.mark.parametrize("chunk", [7, 64])
def test_exact_ids_are_the_same_alone_and_in_any_batch_and_chunk(
    together: int, chunk: int, alone: list[list[int]]
) -> None:
    rows = min(together, chunk)
    with engine(MlxOptions(exact=True), max_num_batched_tokens=chunk, max_num_seqs=rows) as running:
        for start in range(0, len(PROMPTS), together):
            assert answers(running, PROMPTS[start : start + together]) == alone[start : start + together]


def test_a_batch_answers_as_the_exact_form_does(alone: list[list[int]]) -> None:
    with engine(MlxOptions(), max_num_batched_tokens=16, max_num_seqs=5) as running:
        assert answers(running, PROMPTS) == alone
        assert answers(running, PROMPTS[:4]) == alone[:4]  # out of the prefix cache


def model_drafter(options: MlxOptions, seed: int) -> ModelDrafter:
    """Drafts with a random model; with the target's seed, almost always its very tokens."""
    spec, weights = random_model(SHAPE, seed=seed)
    config = ModelDrafterConfig(
        num_kv_blocks=80, block_size=4, max_model_len=64, max_num_seqs=5, vocab_size=spec.vocab_size
    )
    return ModelDrafter(MlxBackend(options).load(spec, weights, config.geometry("f32")), config)


@pytest.mark.parametrize("seed", [4, 5])
@pytest.mark.parametrize("exact", [False, True])
def test_mlx_drafts_and_verifies_without_changing_an_answer(
    seed: int, exact: bool, alone: list[list[int]]
) -> None:
    options = MlxOptions(exact=exact)
    speculation = Speculation(model_drafter(options, seed), FixedLength(3))
    with engine(options, speculation, max_num_batched_tokens=32, max_num_seqs=5) as running:
        assert answers(running, PROMPTS) == alone
        totals = running.totals.speculation
        assert totals is not None
        assert totals.num_proposed > 0
