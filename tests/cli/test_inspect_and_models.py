"""`mvllm inspect` and `mvllm models`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from mvllm.cli.main import cli
from mvllm.core.load.catalog import CATALOG, DEFAULT_MODEL
from tests.tiny_models import write_tiny_gguf


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, architecture="qwen2", tensor_type="Q4_0", seed=2)
    return path


def test_inspect_shows_dimensions_types_and_memory(model: Path) -> None:
    result = CliRunner().invoke(cli, ["inspect", str(model), "--context", "100"])
    assert result.exit_code == 0, result.output
    for word in ("qwen2", "Q4_0", "weights", "kv cache f16", "at 100 tokens"):
        assert word in result.output


def test_inspect_as_json_holds_every_tensor(model: Path) -> None:
    result = CliRunner().invoke(cli, ["inspect", str(model), "--tensors", "--json"])
    facts = json.loads(result.output)
    assert facts["architecture"] == "qwen2"
    assert sum(t["bytes"] for t in facts["tensors"]) == facts["weights_bytes"]


def test_inspect_lists_the_program(model: Path) -> None:
    result = CliRunner().invoke(cli, ["inspect", str(model), "--program"])
    assert result.exit_code == 0, result.output
    assert "attend" in result.output


def test_models_list_marks_what_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MVLLM_CACHE", str(tmp_path))
    before = CliRunner().invoke(cli, ["models", "list"]).output
    assert all(name in before for name in CATALOG)
    (tmp_path / "models").mkdir()
    file = tmp_path / "models" / CATALOG[DEFAULT_MODEL].filename
    file.write_bytes(b"cut short")
    assert CliRunner().invoke(cli, ["models", "list"]).output == before
    os.truncate(file, CATALOG[DEFAULT_MODEL].file_bytes)
    assert f"* {DEFAULT_MODEL}" in CliRunner().invoke(cli, ["models", "list"]).output
    assert f"* {DEFAULT_MODEL}" not in before


def test_models_path_never_fetches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MVLLM_CACHE", str(tmp_path))
    monkeypatch.setattr("subprocess.Popen", None)
    result = CliRunner().invoke(cli, ["models", "path", DEFAULT_MODEL])
    assert result.exit_code == 1
    assert "mvllm models pull" in result.output
