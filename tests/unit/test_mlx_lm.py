"""The comparison with mlx-lm: what is refused, and what ends it."""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner

pytest.importorskip("mlx.core")

from mvllm.bench.peers.float32_folder import widened
from mvllm.bench.peers.mlx_lm import Ours, Peer, main
from mvllm.core.load.checkpoint import load_checkpoint
from mvllm.core.load.weights import DenseWeight
from tests.tiny_models import write_tiny_hf


@pytest.mark.parametrize(
    "option", [("--sequences", "0"), ("--sequences", "1,,8"), ("--sequences", "many"), ("--pairs", "0")]
)
def test_counts_below_one_are_refused(tmp_path: Path, option: tuple[str, str]) -> None:
    model = tmp_path / "model.gguf"
    model.touch()
    result = CliRunner().invoke(main, [str(model), "--peer-python", sys.executable, *option])
    assert result.exit_code == 2
    assert f"Invalid value for '{option[0]}'" in result.stderr


def test_a_model_that_yields_nan_ends_the_measurement(tmp_path: Path) -> None:
    write_tiny_hf(tmp_path)
    weights = widened(load_checkpoint(tmp_path).weights)
    weights = replace(weights, final_norm=DenseWeight("norm", "F32", np.full(64, np.nan, np.float32)))
    with (
        closing(Ours(str(tmp_path), weights, max_model_len=16)) as ours,
        pytest.raises(click.ClickException, match="ended a sequence early"),
    ):
        ours.decode([[5, 6]], steps=2)


def test_a_peer_that_ends_at_once_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(click.ClickException, match="the mlx-lm process ended"):
        Peer(sys.executable, tmp_path / "no-model")
