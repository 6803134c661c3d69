"""Golden data of real models, and teacher-forced runs that are compared with it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from mvllm.backends.registry import create_backend
from mvllm.core.load.catalog import DEFAULT_MODEL, ModelStore
from mvllm.core.load.checkpoint import load_checkpoint
from mvllm.core.tensor import KvGeometry, Model
from mvllm.core.types import ceil_div
from mvllm.llm import default_cache_dir
from tests.conformance.random_models import Row, make_batch
from tests.paths import MODELS, SHARED

BLOCK_SIZE = 16
CHUNK = 256

NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
"""Whether there is time for all of the data; otherwise a selection that takes seconds."""


@dataclass(frozen=True)
class GoldenPrompt:
    name: str
    token_ids: list[int]
    greedy: list[int]
    gap: list[float]  # between the two best logits at each greedy token
    top: list[list[tuple[int, float]]]  # of the first tokens: the best (id, logprob)

    def cut(self, length: int) -> GoldenPrompt:
        """The same with that many greedy tokens."""
        return replace(self, greedy=self.greedy[:length], gap=self.gap[:length])


def model_path(name: str) -> Path:
    """SmolLM2 from the catalog, others from the folder of larger models."""
    if name == "smollm2-135m":
        return ModelStore(default_cache_dir()).resolve(DEFAULT_MODEL)
    if MODELS is None or not (MODELS / f"{name}.gguf").exists():
        pytest.skip(f"{name}.gguf is not in the folder that MVLLM_TEST_MODELS names")
    return MODELS / f"{name}.gguf"


def golden_prompts(name: str) -> list[GoldenPrompt]:
    if SHARED is None or not (SHARED / "golden" / f"{name}.json").exists():
        pytest.skip("golden data is kept beside the repository and is not here")
    data = json.loads((SHARED / "golden" / f"{name}.json").read_text())
    return [
        GoldenPrompt(
            p["name"], p["token_ids"], p["greedy"], p["gap"], [[(t, lp) for t, lp in row] for row in p["top"]]
        )
        for p in data["prompts"]
    ]


@contextmanager
def loaded(name: str, backend: str) -> Iterator[Model]:
    checkpoint = load_checkpoint(model_path(name))
    device = create_backend(backend)
    geometry = KvGeometry(
        num_blocks=64,
        block_size=BLOCK_SIZE,
        max_context=1024,
        max_batch_tokens=CHUNK,
        max_batch_rows=1,
        max_logit_rows=64,
        dtype=device.capabilities.kv_dtypes[0],
    )
    with closing(device.load(checkpoint.spec, checkpoint.weights, geometry)) as model:
        yield model


def forced_logprobs(model: Model, prompt: GoldenPrompt) -> NDArray[np.float64]:
    """Log-probabilities [len(greedy), vocab] where the golden greedy tokens are fed as they are."""
    tokens = [*prompt.token_ids, *prompt.greedy[:-1]]
    table = list(range(ceil_div(len(tokens), BLOCK_SIZE)))
    first_logit = len(prompt.token_ids) - 1
    parts = []
    for start in range(0, len(tokens), CHUNK):
        stop = min(start + CHUNK, len(tokens))
        num_logits = max(0, stop - max(start, first_logit))
        batch = make_batch([Row(tokens, start, stop, table, num_logits)], BLOCK_SIZE)
        parts.append(model.logits(batch).astype(np.float64))
    logits = np.concatenate(parts)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
