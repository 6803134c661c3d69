"""Small random checkpoints in many formats against float64 results computed elsewhere."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from mvllm.backends.registry import create_backend
from mvllm.core.load.checkpoint import load_checkpoint
from mvllm.core.tensor import KvGeometry, Model
from mvllm.core.types import ceil_div
from tests.conformance.random_models import Row, make_batch
from tests.paths import SHARED

TINY = SHARED / "golden" / "tiny" if SHARED else Path("absent")
FOLDERS = ["llama-mha", "llama-gqa-tied", "llama-rope-llama3", "llama-rope-linear", "llama-bf16"]
FOLDERS += ["llama-f16", "llama-sharded", "llama-bias", "qwen2-untied", "qwen3-gqa", "mistral-window"]
MLX_FOLDERS = ["mlx-4bit-g64-llama-gqa-tied", "mlx-4bit-g64-qwen2-untied"]
MLX_FOLDERS += ["mlx-8bit-g32-llama-gqa-tied", "mlx-8bit-g32-qwen2-untied"]
GGUF_FOLDERS = ["gguf-llama-gqa-tied", "gguf-qwen2-untied", "gguf-llama-gqa-tied-256"]

FLOAT32_LIMIT = 1e-3
"""Largest absolute logit difference of float32 arithmetic on exact weights."""

EIGHT_BIT_LIMIT = 0.1
"""Largest relative rms difference when activations are rounded to 8 bits (quantized weights on cpu)."""

pytestmark = pytest.mark.skipif(SHARED is None, reason="golden data is kept beside the repository")


def _cases() -> list[tuple[str, Path, Path]]:
    """(id, checkpoint, expected arrays)."""
    cases = [(name, TINY / name, TINY / name / "expected.npz") for name in FOLDERS + MLX_FOLDERS]
    for name in GGUF_FOLDERS:
        for path in sorted((TINY / name).glob("*.gguf")):
            cases.append((f"{name}-{path.stem}", path, path.with_suffix(".expected.npz")))
    return cases


@pytest.fixture(params=_cases(), ids=lambda case: case[0])
def case(request: pytest.FixtureRequest) -> tuple[str, Path, Path]:
    return request.param


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_logits_and_greedy_tokens_equal_the_expected_ones(case: tuple[str, Path, Path], backend: str) -> None:
    _, path, expected_path = case
    expected = np.load(expected_path)
    checkpoint = load_checkpoint(path)
    dense = all(format_name in ("F32", "F16", "BF16") for _, format_name, _, _ in checkpoint.tensors)
    exact = backend == "reference" or dense
    device = create_backend(backend, threads=2)
    with closing(device.load(checkpoint.spec, checkpoint.weights, _geometry())) as model:
        for i in range(3):
            ids = [int(token) for token in expected[f"ids{i}"]]
            logits = _all_logits(model, ids)
            ours, theirs = logits[expected[f"pos{i}"]], expected[f"logits{i}"]
            if not exact:
                assert np.std(ours - theirs) / np.std(theirs) <= EIGHT_BIT_LIMIT
                continue
            assert np.abs(ours - theirs).max() <= FLOAT32_LIMIT
            assert np.array_equal(logits.argmax(axis=-1), expected[f"top1_{i}"])
            if f"greedy{i}" in expected:
                continued = [*ids, *(int(token) for token in expected[f"greedy{i}"])]
                best = _all_logits(model, continued).argmax(axis=-1)[len(ids) - 1 : -1]
                assert np.array_equal(best, expected[f"greedy{i}"])


@pytest.mark.parametrize("name", FOLDERS)
def test_both_spellings_of_a_config_mean_the_same_model(name: str, tmp_path: Path) -> None:
    shutil.copytree(TINY / name, tmp_path / "model")
    shutil.copyfile(TINY / name / "config_alt.json", tmp_path / "model" / "config.json")
    assert json.loads((TINY / name / "config.json").read_text()) != json.loads(
        (tmp_path / "model" / "config.json").read_text()
    )
    assert load_checkpoint(tmp_path / "model").spec == load_checkpoint(TINY / name).spec


def _geometry() -> KvGeometry:
    return KvGeometry(
        num_blocks=64,
        block_size=16,
        max_context=1024,
        max_batch_tokens=128,
        max_batch_rows=1,
        max_logit_rows=128,
        dtype="f32",
    )


def _all_logits(model: Model, ids: list[int]) -> np.ndarray:
    """Logits at every position, [len(ids), vocab]."""
    table = list(range(ceil_div(len(ids), 16)))
    parts = []
    for start in range(0, len(ids), 128):
        stop = min(start + 128, len(ids))
        parts.append(model.logits(make_batch([Row(ids, start, stop, table, stop - start)], 16)))
    return np.concatenate(parts)
