"""`mvllm generate --trace` and `mvllm profile`, from the file to the table."""

from __future__ import annotations

import json
import re
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


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_traced_run_gives_the_same_answer_and_every_stage_of_every_step(
    backend: str, model: Path, tmp_path: Path
) -> None:
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=4, ignore_eos=True, logprobs=3)
    file = tmp_path / "trace.json"
    answers = []
    for trace in (None, file):
        with LLM(model, backend=backend, threads=2, trace=trace) as llm:
            [answer] = llm.generate("the other engine", params)[0].outputs
            answers.append((answer.token_ids, answer.logprobs))
    assert answers[0] == answers[1]
    steps = list(read_steps(json.loads(file.read_text())["traceEvents"]))
    assert [step.num_tokens for step in steps][1:] == [1, 1, 1]
    for step in steps:
        assert list(step.stages) == STAGES
        assert sum(step.stages.values()) <= step.duration * 1.001


def spans_by_track(file: Path) -> dict[str, list[dict[str, Any]]]:
    events = json.loads(file.read_text())["traceEvents"]
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans: dict[str, list[dict[str, Any]]] = {name: [] for name in tracks.values()}
    for event in events:
        if event["ph"] == "X":
            spans[tracks[event["tid"]]].append(event)
    return spans


def inside(span: dict[str, Any], outer: dict[str, Any]) -> bool:
    slack = 0.0011  # times are written in thousandths of a microsecond
    ends = span["ts"] + span["dur"], outer["ts"] + outer["dur"]
    return bool(outer["ts"] - slack <= span["ts"] and ends[0] <= ends[1] + slack)


@pytest.fixture(scope="module")
def cpu_trace(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("trace") / "trace.json"
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    with LLM(model, backend="cpu", threads=2, trace=file) as llm:
        llm.generate("the other engine", params)
    return file


def test_instructions_of_the_cpu_backend_lie_within_their_step_one_after_the_other(cpu_trace: Path) -> None:
    tracks = spans_by_track(cpu_trace)
    assert sorted(tracks) == ["engine", "model", "thread 0", "thread 1"]
    forwards = [span for span in tracks["engine"] if span["name"] == "forward"]
    runs = [span for span in tracks["model"] if span["name"] == "run"]
    assert len(forwards) == len(runs) == 3
    assert all(inside(run, forward) for run, forward in zip(runs, forwards, strict=True))
    for thread in ("thread 0", "thread 1"):
        for run in runs:
            spans = sorted((s for s in tracks[thread] if inside(s, run)), key=lambda s: float(s["ts"]))
            kinds = [span["cat"] for span in spans if span["cat"] != "wait"]
            assert kinds[0] == "embed"
            assert kinds[-1] == "sample"
            assert kinds.count("attend") == 2, "one per layer"
            ends = [span["ts"] + span["dur"] for span in spans]
            starts = [span["ts"] for span in spans]
            assert all(start >= end - 0.0021 for end, start in zip(ends, starts[1:], strict=False))
        assert all(any(inside(span, run) for run in runs) for span in tracks[thread])


def test_products_say_what_they_multiply_and_how_many_bytes_they_read(cpu_trace: Path) -> None:
    spans = spans_by_track(cpu_trace)["thread 0"]
    [query, *_] = [span for span in spans if span["name"] == "blk.0.attn_q.weight"]
    assert query["cat"] == "linear"
    assert query["args"]["shape"].endswith("Q8_0")
    assert query["args"]["bytes"] > 0


def test_the_profile_of_a_cpu_run_has_its_instructions_and_their_rates(
    cpu_trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where another process holds a core, waiting takes nearly all of a step.
    monkeypatch.setattr("mvllm.cli.profile._FEWEST_PERCENT", 0.0)
    status, output = invoke("profile", "--names", str(cpu_trace))
    assert status == 0
    decode, prompt = output.split("with prompt tokens: 1 steps")
    assert decode.startswith("decode: 2 steps of 1.0 tokens")
    assert prompt
    table = decode[decode.index("  instruction ") : decode.index("  name ")]
    assert table.splitlines()[0].split() == ["instruction", "ms/step", "share", "GB/s"]
    [linear] = [line for line in table.splitlines() if line.startswith("  linear ")]
    assert float(linear.split()[3]) >= 0
    assert re.search(r"\n  blk\.\*\.attn_q\.weight ", decode)


def test_steps_with_drafts_are_told_apart_from_those_with_prompt_tokens(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(model, drafter="ngram", draft_policy="fixed", draft_length=2, trace=file) as llm:
        llm.generate("the other engine and the other engine and the other", params)
        drafted = llm.engine.totals.speculation
    assert drafted is not None
    status, output = invoke("profile", str(file))
    assert status == 0
    assert "with prompt tokens: 1 steps" in output
    num_with_drafts = drafted.num_passes - drafted.proposed_lengths.get(0, 0)
    assert f"decode with drafts: {num_with_drafts} steps of" in output
    assert num_with_drafts > 0


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
