"""The options of `mvllm generate` that make it draft."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from mvllm.cli.main import cli
from tests.tiny_models import write_tiny_gguf

PROMPT = "the other engine the other engine the"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_tiny_gguf(path, architecture="llama", tensor_type="Q8_0", seed=1)
    return path


def run(model: Path, *arguments: str) -> Result:
    options = ["--raw", "--max-tokens", "24", "--ignore-eos", "--backend", "reference"]
    return CliRunner().invoke(cli, ["generate", PROMPT, "--model", str(model), *options, *arguments])


def test_the_answer_is_the_same_and_the_statistics_say_what_drafting_did(model: Path) -> None:
    plain = run(model, "--stats")
    assert plain.exit_code == 0, plain.stderr
    assert "draft" not in plain.stderr
    drafting = ["--draft-model", str(model), "--draft-policy", "fixed", "--draft-length", "2"]
    drafted = run(model, "--drafter", "model", *drafting, "--stats")
    assert (drafted.exit_code, drafted.stdout) == (0, plain.stdout), drafted.stderr
    lines = dict(line.split(maxsplit=1) for line in drafted.stderr.splitlines() if " " in line)
    assert "100.0%" in lines["acceptance"]
    for row in ("drafts", "tokens per pass", "draft lengths", "accepted lengths", "drafting", "verifying"):
        assert f"\n{row} " in drafted.stderr


def test_ngram_drafts_need_no_model(model: Path) -> None:
    result = run(model, "--drafter", "ngram", "--stats")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == run(model).stdout
    assert "\ndrafts " in result.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--draft-length", "3"], "needs a drafter"),
        (["--draft-policy", "fixed"], "needs a drafter"),
        (["--drafter", "ngram", "--draft-backend", "cpu"], "needs draft_model"),
        (["--drafter", "model"], "--draft-model"),
        (["--drafter", "ngram", "--draft-length", "0"], "draft_length"),
        (["--drafter", "ngram", "--draft-model", "x"], "not both"),
        (["--drafter", "oracle"], "oracle"),
    ],
)
def test_options_that_contradict_each_other_are_explained(
    model: Path, arguments: list[str], named: str
) -> None:
    result = run(model, *arguments)
    assert result.exit_code == 2
    assert named in result.stderr
    assert result.stdout == ""
