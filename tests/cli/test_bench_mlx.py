"""`mvllm bench crossover --backend mlx` on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("mlx.core")

from mvllm.cli.main import cli
from mvllm.core.errors import ConfigError
from tests.tiny_models import write_tiny_hf


def test_every_product_and_a_recommendation_are_printed(tmp_path: Path) -> None:
    write_tiny_hf(tmp_path)
    arguments = ["bench", "crossover", str(tmp_path), "--backend", "mlx"]
    result = CliRunner().invoke(cli, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    fields = json.loads(result.stdout)
    assert type(fields["rows_apart"]) is int
    assert all(set(kind["whole"]) == set(kind["apart"]) for kind in fields["products"])
    assert "--mlx-rows-apart" in CliRunner().invoke(cli, arguments).stdout


@pytest.mark.parametrize(
    "options", [("--shape", "Q4_0:32x32"), ("model", "--seconds", "1"), ("model", "--threads", "1")]
)
def test_options_of_the_cpu_backend_are_refused(options: tuple[str, ...]) -> None:
    result = CliRunner().invoke(cli, ["bench", "crossover", "--backend", "mlx", *options])
    assert result.exit_code != 0
    assert isinstance(result.exception, ConfigError) or "nothing else" in result.output
