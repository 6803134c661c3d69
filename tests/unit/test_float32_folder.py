"""The float32 folder that mlx-lm is measured on holds the very model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mlx.core")

from mvllm.bench.peers.float32_folder import widened, write_folder
from mvllm.core.errors import ConfigError
from mvllm.core.load.checkpoint import load_checkpoint
from tests.tiny_models import write_tiny_hf


@pytest.mark.parametrize("tied", [False, True])
def test_a_written_folder_is_the_model(tmp_path: Path, tied: bool) -> None:
    write_tiny_hf(tmp_path / "given", tied=tied)
    given = load_checkpoint(tmp_path / "given")
    write_folder(tmp_path / "written", given, widened(given.weights))
    written = load_checkpoint(tmp_path / "written")
    assert written.spec.layers == given.spec.layers
    np.testing.assert_allclose(
        written.spec.ropes[0].inverse_frequencies, given.spec.ropes[0].inverse_frequencies, rtol=1e-12
    )
    for ours, theirs in zip(written.weights.layers, given.weights.layers, strict=True):
        for slot, weight in vars(theirs).items():
            if weight is not None:
                assert np.array_equal(getattr(ours, slot).to_float32(), weight.to_float32())
    for slot in ("embedding", "final_norm", "head"):
        expected = getattr(given.weights, slot).to_float32()
        assert np.array_equal(getattr(written.weights, slot).to_float32(), expected)


def test_models_with_more_than_plain_llama_are_refused(tmp_path: Path) -> None:
    write_tiny_hf(tmp_path / "given", "qwen2")
    given = load_checkpoint(tmp_path / "given")
    with pytest.raises(ConfigError, match="only"):
        write_folder(tmp_path / "written", given, widened(given.weights))
