"""X1 on a real model: the arrangement of the work changes no bit of anybody's logits or tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from operator import getitem

import numpy as np
import pytest
from numpy.typing import NDArray

from mvllm import LLM, RequestOutput, SamplingParams
from mvllm.backends.registry import create_backend
from mvllm.core.config import EngineConfig, kv_bytes_per_token, resolve
from mvllm.core.engine.engine import Engine
from mvllm.core.load.checkpoint import load_checkpoint
from mvllm.core.request import Request, TokenLogprobs
from mvllm.core.spec.draft_length import DraftLengthPolicy, FixedLength
from mvllm.core.spec.speculation import Speculation
from mvllm.core.step import TokensOut
from mvllm.core.tensor import KvGeometry, Model
from mvllm.core.text.tokenizer import Tokenizer
from mvllm.core.types import RequestId, ceil_div
from tests.conformance.random_models import Row, make_batch
from tests.golden.data import model_path
from tests.models.drafters import (
    Guess,
    RandomLengths,
    ScriptedDrafter,
    guess_randomly,
    know_the_answer,
    mostly,
    repeating,
)

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


@functools.cache
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
    SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.8, seed=42, max_tokens=16, ignore_eos=True, logprobs=0),
    SamplingParams(temperature=1.0, top_k=40, top_p=0.9, seed=7, max_tokens=14, frequency_penalty=0.5),
    SamplingParams(temperature=0, max_tokens=16, repetition_penalty=1.2, logprobs=1),
    SamplingParams(temperature=1.2, min_p=0.05, seed=3, max_tokens=16),
    SamplingParams(temperature=0, max_tokens=12),
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


# --- drafters --------------------------------------------------------------------------------------------

Answer = tuple[tuple[int, ...], tuple[TokenLogprobs, ...]]


class SmolEngine:
    """SmolLM2 under an engine of its own: answers to the prompts above, by request id."""

    def __init__(self, speculation: Speculation | None = None, *, threads: int = 2, **settings: int) -> None:
        checkpoint = load_checkpoint(model_path("smollm2-135m"))
        backend = create_backend("cpu", threads=threads)
        dtype = backend.capabilities.kv_dtypes[0]
        config = resolve(
            EngineConfig(max_model_len=64, check_integrity=True, **settings),  # type: ignore[arg-type]
            model_context=checkpoint.spec.context_length,
            kv_bytes_per_token=kv_bytes_per_token(checkpoint.spec.kv_values_per_token, dtype),
            kv_dtype=dtype,
            speculates=speculation is not None,
        )
        geometry = KvGeometry(
            num_blocks=config.num_kv_blocks,
            block_size=config.block_size,
            max_context=config.max_model_len,
            max_batch_tokens=config.max_num_batched_tokens,
            max_batch_rows=config.max_num_seqs,
            max_logit_rows=config.max_logit_rows,
            dtype=dtype,
        )
        self.tokenizer = Tokenizer.from_assets(checkpoint.text)
        self.engine = Engine(
            backend.load(checkpoint.spec, checkpoint.weights, geometry),
            config,
            vocab_size=checkpoint.spec.vocab_size,
            speculation=speculation,
            clock=iter(float(tick) for tick in range(10**9)).__next__,
        )

    def answers(self, *, together: bool) -> dict[RequestId, Answer]:
        """Tokens and logprobs of every prompt, all at once or one after the other."""
        token_ids: dict[RequestId, list[int]] = {}
        logprobs: dict[RequestId, list[TokenLogprobs]] = {}
        for index, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
            id = RequestId(str(index))
            token_ids[id], logprobs[id] = [], []
            prompt_ids = tuple(self.tokenizer.encode(prompt))
            self.engine.submit(
                Request(id, prompt_ids, params, params.seed or 0, params.max_tokens or 1, frozenset({2}))
            )
            while self.engine.has_work and (not together or index == len(PROMPTS) - 1):
                for event in self.engine.step():
                    if isinstance(event, TokensOut):
                        token_ids[event.id] += event.token_ids
                        logprobs[event.id] += event.logprobs
        return {id: (tuple(token_ids[id]), tuple(logprobs[id])) for id in token_ids}


@pytest.fixture(scope="module")
def undrafted() -> dict[RequestId, Answer]:
    smol = SmolEngine(threads=1, max_num_seqs=1)
    with closing(smol.engine):
        return smol.answers(together=False)


VOCAB_SIZE = 49152


def _knowing(known: dict[RequestId, Answer]) -> Guess:
    return know_the_answer({id: partial(getitem, answer, 0) for id, answer in known.items()})


DRAFTERS: dict[str, Callable[[dict[RequestId, Answer]], ScriptedDrafter]] = {
    "adversarial": lambda known: ScriptedDrafter(guess_randomly(VOCAB_SIZE)),
    "n-gram": lambda known: ScriptedDrafter(repeating),
    "nearly-perfect": lambda known: ScriptedDrafter(mostly(_knowing(known), VOCAB_SIZE)),
}
POLICIES: dict[str, Callable[[], DraftLengthPolicy]] = {
    "random": RandomLengths,
    "fixed-6": lambda: FixedLength(6),
}


@pytest.mark.parametrize(
    ("drafter", "policy", "settings"),
    [
        ("adversarial", "fixed-6", {"threads": 1}),
        ("adversarial", "random", {"block_size": 4, "num_kv_blocks": 24, "max_num_batched_tokens": 64}),
        ("n-gram", "random", {"max_num_batched_tokens": 9, "max_num_seqs": 5}),
        ("nearly-perfect", "random", {"threads": 3, "block_size": 5}),
        ("nearly-perfect", "fixed-6", {"block_size": 4, "num_kv_blocks": 24, "max_num_batched_tokens": 64}),
    ],
)
def test_x1_no_drafter_changes_a_bit_of_any_answer(
    undrafted: dict[RequestId, Answer], drafter: str, policy: str, settings: dict[str, int]
) -> None:
    """V2, V3, REQUIREMENTS L1 and L5: tokens and logprobs, greedy and seeded, batched and preempted."""
    smol = SmolEngine(Speculation(DRAFTERS[drafter](undrafted), POLICIES[policy]()), **settings)
    with closing(smol.engine):
        assert smol.answers(together=True) == undrafted
        totals = smol.engine.totals
    assert totals.speculation is not None and totals.speculation.switched_off is None
    assert (totals.speculation.num_accepted > 0) == (drafter != "adversarial")
    assert totals.speculation.num_proposed >= totals.speculation.num_accepted
    assert totals.num_preemptions > 0 or "num_kv_blocks" not in settings
