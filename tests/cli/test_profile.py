"""`mvllm generate --trace` and `mvllm profile`, from the file to the table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mvllm import LLM, SamplingParams
from mvllm.cli.main import cli
from mvllm.cli.profile import read_steps
from tests.tiny_models import write_tiny_gguf

STAGES = ["commands", "view", "plan", "grant", "draft", "pack", "forward", "decide", "commit", "events"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_tiny_gguf(path, architecture="llama", tensor_type="Q8_0", seed=1)
    return path


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli, arguments)
    return result.exit_code, result.output


@pytest.mark.parametrize("backend", ["reference"])
def test_a_traced_run_gives_the_same_tokens_and_every_stage_of_every_step(
    backend: str, model: Path, tmp_path: Path
) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM(model, backend=backend, threads=2) as llm:
        expected = llm.generate("the other engine", params)[0].outputs[0].token_ids
    file = tmp_path / "trace.json"
    with LLM(model, backend=backend, threads=2, trace=file) as llm:
        assert llm.generate("the other engine", params)[0].outputs[0].token_ids == expected
    steps = list(read_steps(json.loads(file.read_text())["traceEvents"]))
    assert [step.num_tokens for step in steps][1:] == [1, 1, 1]
    for step in steps:
        assert list(step.stages) == STAGES
        assert sum(step.stages.values()) <= step.duration * 1.001


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"traceEvents": [{"ph": "X"}]}'])
def test_other_files_are_refused(content: str, tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    file.write_text(content)
    status, output = invoke("profile", str(file))
    assert status == 1
    assert "no trace of mvllm" in output


def test_a_step_without_rows_belongs_to_no_table(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "tid": 0, "name": "thread_name", "args": {"name": "engine"}},
        {
            "ph": "X",
            "pid": 1,
            "tid": 0,
            "name": "step 1",
            "cat": "step",
            "ts": 0,
            "dur": 3,
            "args": {"rows": 0},
        },
    ]
    file = tmp_path / "idle.json"
    file.write_text(json.dumps({"traceEvents": events}))
    assert invoke("profile", str(file)) == (0, "")
