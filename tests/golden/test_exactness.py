"""X1 on a real model: the arrangement of the work changes no bit of anybody's logits or tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

import numpy as np
import pytest
from numpy.typing import NDArray

from mvllm import LLM, RequestOutput, SamplingParams
from mvllm.backends.registry import create_backend
from mvllm.core.load.checkpoint import load_checkpoint
from mvllm.core.tensor import KvGeometry, Model
from mvllm.core.types import ceil_div
from tests.conformance.random_models import Row, make_batch
from tests.golden.data import model_path

NUM_BLOCKS = 256


@contextmanager
def cpu_model(*, threads: int, block_size: int) -> Iterator[Model]:
    checkpoint = load_checkpoint(model_path("smollm2-135m"))
    backend = create_backend("cpu", threads=threads)
    geometry = KvGeometry(
        num_blocks=NUM_BLOCKS,
        block_size=block_size,
        max_context=512,
        max_batch_tokens=256,
        max_batch_rows=16,
        max_logit_rows=16,
        dtype=backend.capabilities.kv_dtypes[0],
    )
    with closing(backend.load(checkpoint.spec, checkpoint.weights, geometry)) as model:
        yield model


def _sequences() -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, 49152, length).tolist() for length in (1, 2, 15, 16, 17, 33, 70, 129)]


def _alone() -> list[NDArray[np.float32]]:
    """Logits of each last position: one sequence per forward, one thread."""
    with cpu_model(threads=1, block_size=16) as model:
        return [
            model.logits(make_batch([Row(s, 0, len(s), list(range(ceil_div(len(s), 16))))], 16))[0]
            for s in _sequences()
        ]


@pytest.mark.parametrize(
    ("threads", "block_size", "seed"), [(1, 16, 0), (2, 16, 1), (3, 5, 2), (4, 64, 3), (2, 1, 4)]
)
def test_x1_logits_are_the_same_in_any_arrangement(threads: int, block_size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    sequences = _sequences()
    blocks = rng.permutation(NUM_BLOCKS if block_size > 1 else NUM_BLOCKS + 100).tolist()
    if block_size == 1:
        sequences = sequences[:6]  # a pool of single positions holds no more
        blocks = rng.permutation(NUM_BLOCKS).tolist()
    tables = []
    for sequence in sequences:
        count = ceil_div(len(sequence), block_size)
        tables.append([blocks.pop() for _ in range(count)])
    done = [0] * len(sequences)
    found: dict[int, NDArray[np.float32]] = {}
    with cpu_model(threads=threads, block_size=block_size) as model:
        while any(done[i] < len(s) for i, s in enumerate(sequences)):
            waiting = [i for i, s in enumerate(sequences) if done[i] < len(s)]
            chosen = rng.permutation(waiting)[: rng.integers(1, len(waiting) + 1)].tolist()
            rows = []
            for i in chosen:
                stop = min(len(sequences[i]), done[i] + int(rng.integers(1, 48)))
                ends = stop == len(sequences[i])
                rows.append(Row(sequences[i], done[i], stop, tables[i], num_logits=int(ends)))
                done[i] = stop
            logits = model.logits(make_batch(rows, block_size))
            ended = [i for i, row in zip(chosen, rows, strict=True) if row.num_logits]
            found.update(zip(ended, logits, strict=True))
    for i, expected in enumerate(_alone()[: len(sequences)]):
        assert np.array_equal(found[i], expected), f"sequence {i}"


PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):",
    "The capital of Germany is",
    "Once upon a time, in a small village by the sea, there lived",
    "1, 1, 2, 3, 5, 8,",
    "The capital of France is Paris. The capital of Germany is",
]

PARAMS = [
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.8, seed=42, max_tokens=24, ignore_eos=True, logprobs=0),
    SamplingParams(temperature=1.0, top_k=40, top_p=0.9, seed=7, max_tokens=20, frequency_penalty=0.5),
    SamplingParams(temperature=0, max_tokens=24, repetition_penalty=1.2, logprobs=1),
    SamplingParams(temperature=1.2, min_p=0.05, seed=3, max_tokens=24),
    SamplingParams(temperature=0, max_tokens=16),
]


def _answers(outputs: list[RequestOutput]) -> list[object]:
    """Everything of the outputs that must not depend on the arrangement."""
    return [(o.outputs[0].token_ids, o.outputs[0].text, o.outputs[0].logprobs) for o in outputs]


@pytest.fixture(scope="module")
def expected() -> list[object]:
    with LLM(model_path("smollm2-135m"), threads=1, max_num_seqs=1, enable_prefix_caching=False) as llm:
        return _answers([llm.generate(p, s)[0] for p, s in zip(PROMPTS, PARAMS, strict=True)])


@pytest.mark.parametrize(
    "settings",
    [
        {"threads": 2},
        {"threads": 2, "max_num_batched_tokens": 7, "max_num_seqs": 5},
        {
            "threads": 3,
            "block_size": 4,
            "num_kv_blocks": 24,
            "max_model_len": 64,
            "max_num_batched_tokens": 64,
        },
        {"threads": 2, "admission": "reserve", "num_kv_blocks": 8, "max_model_len": 64},
    ],
    ids=["plain", "chunks", "preemption", "reserve"],
)
def test_x1_answers_are_the_same_alone_batched_chunked_preempted_and_cached(
    expected: list[object], settings: dict[str, object]
) -> None:
    order = np.random.default_rng(len(settings)).permutation(len(PROMPTS)).tolist()
    with LLM(model_path("smollm2-135m"), check_integrity=True, **settings) as llm:  # type: ignore[arg-type]
        for _ in range(2):  # the second round finds the first one's prefixes
            outputs = llm.generate([PROMPTS[i] for i in order], [PARAMS[i] for i in order])
            assert _answers(outputs) == [expected[i] for i in order]
        if settings.get("num_kv_blocks") == 24:
            assert llm.engine.totals.num_preemptions > 0
