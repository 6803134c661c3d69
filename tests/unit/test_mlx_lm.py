"""The comparison with mlx-lm: what is refused, and a peer that can't start."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

pytest.importorskip("mlx.core")

from mvllm.bench.peers.mlx_lm import Peer, main


@pytest.mark.parametrize(
    "option", [("--sequences", "0"), ("--sequences", "1,,8"), ("--sequences", "many"), ("--pairs", "0")]
)
def test_counts_below_one_are_refused(tmp_path: Path, option: tuple[str, str]) -> None:
    model = tmp_path / "model.gguf"
    model.touch()
    result = CliRunner().invoke(main, [str(model), "--peer-python", sys.executable, *option])
    assert result.exit_code == 2
    assert f"Invalid value for '{option[0]}'" in result.stderr


def test_a_peer_that_ends_at_once_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(click.ClickException, match="the mlx-lm process ended"):
        Peer(sys.executable, tmp_path / "no-model")
