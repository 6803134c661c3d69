"""Real checkpoints through the MLX backend, with short prompts: its CPU device is slow."""

from __future__ import annotations

from contextlib import closing
from importlib.util import find_spec

import numpy as np
import pytest
from numpy.typing import NDArray

from mvllm import LLM, SamplingParams
from mvllm.backends.mlx.options import MlxOptions
from mvllm.backends.registry import create_backend
from mvllm.core.load.checkpoint import load_checkpoint
from mvllm.core.tensor import Backend
from tests.conformance.random_models import Row, geometry, make_batch
from tests.golden.data import NIGHTLY, model_path

pytestmark = pytest.mark.skipif(find_spec("mlx") is None, reason="needs MLX")

BLOCK_SIZE = 4
PROMPT = [504, 3575, 282]
FIRST_TOKEN_TOLERANCE = 2e-3
REENCODED_TOLERANCE = 0.05
"""Of a log-probability above `LIKELY`, where Q6_K is rounded to 8 bits."""

LIKELY = np.log(1e-3)
PROMPTS = ["def add(a, b):", "Dear"]


def first_logprobs(name: str, backend: Backend) -> NDArray[np.float64]:
    """Log-probabilities [vocab] of the first token after the prompt, with float32 KV."""
    checkpoint = load_checkpoint(model_path(name))
    size = geometry(num_blocks=4, block_size=BLOCK_SIZE)
    batch = make_batch([Row(PROMPT, 0, len(PROMPT), [2, 0])], BLOCK_SIZE)
    with closing(backend.load(checkpoint.spec, checkpoint.weights, size)) as model:
        logits = model.logits(batch)[0].astype(np.float64)
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def test_smollm2_whose_formats_mlx_has_equals_the_reference() -> None:
    expected = first_logprobs("smollm2-135m", create_backend("reference"))
    ours = first_logprobs("smollm2-135m", create_backend("mlx"))
    assert np.abs(ours - expected).max() <= FIRST_TOKEN_TOLERANCE


@pytest.mark.skipif(not NIGHTLY, reason="belongs to the nightly profile")
def test_qwen_equals_the_reference_and_re_encoded_is_near_it() -> None:
    name = "qwen2.5-coder-0.5b"
    expected = first_logprobs(name, create_backend("reference"))
    dense = first_logprobs(name, create_backend("mlx", mlx=MlxOptions(dense=True)))
    assert np.abs(dense - expected).max() <= FIRST_TOKEN_TOLERANCE
    re_encoded = first_logprobs(name, create_backend("mlx"))
    difference = np.abs(re_encoded - expected)[expected > LIKELY].max()
    assert FIRST_TOKEN_TOLERANCE < difference <= REENCODED_TOLERANCE


def test_smollm2_answers_through_the_whole_engine() -> None:
    params = SamplingParams(temperature=0, max_tokens=1)
    with LLM(model_path("smollm2-135m"), backend="mlx", max_model_len=64) as llm:
        [output] = llm.generate("The capital of France is", params)
    assert output.outputs[0].text.startswith(" Paris")


def exact_answers(prompts: list[str], *, chunk: int) -> list[tuple[int, ...]]:
    """Greedy ids of prompts in one batch, computed exactly with at most `chunk` tokens per step."""
    backend = create_backend("mlx", mlx=MlxOptions(exact=True))
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    with LLM(
        model_path("smollm2-135m"),
        backend=backend,
        max_model_len=32,
        max_num_seqs=2,
        max_num_batched_tokens=chunk,
        enable_prefix_caching=False,
    ) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


def test_exact_answers_depend_neither_on_the_batch_nor_on_chunks() -> None:
    together = exact_answers(PROMPTS, chunk=64)
    assert exact_answers(PROMPTS, chunk=4) == together
    assert exact_answers(PROMPTS[:1], chunk=64) == together[:1]
