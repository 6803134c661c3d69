"""`mvllm generate` as a user meets it: bytes on standard output, exit status, standard input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from mvllm import LLM, SamplingParams
from mvllm.cli.main import cli
from tests.tiny_models import write_tiny_gguf

PROMPT = "the other engine"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_tiny_gguf(path, architecture="llama", tensor_type="Q8_0", seed=1)
    return path


def run(
    model: Path, *arguments: str, stdin: str | int | None = subprocess.DEVNULL, **extra: object
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mvllm.cli", "generate", "--model", str(model), *arguments]
    source = {"input": stdin} if isinstance(stdin, str) else {"stdin": stdin}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **source, **extra)  # type: ignore[call-overload,no-any-return]


def run_here(model: Path, *arguments: str) -> Result:
    """The same within this process: quick, and enough where a usage error is all there is to see."""
    return CliRunner().invoke(cli, ["generate", "--model", str(model), *arguments])


SHORT = ("--raw", "--max-tokens", "8", "--ignore-eos", "--backend", "reference")


@pytest.fixture(scope="module")
def expected(model: Path) -> str:
    with LLM(model, backend="reference") as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        return llm.generate(PROMPT, params)[0].outputs[0].text


def test_standard_output_is_the_answer_and_nothing_else(model: Path, expected: str) -> None:
    result = run(model, PROMPT, *SHORT)
    assert (result.returncode, result.stdout) == (0, expected + "\n")


@pytest.mark.parametrize("argument", ["-", None])
def test_the_prompt_may_come_from_standard_input(model: Path, expected: str, argument: str | None) -> None:
    arguments = ([argument] if argument else []) + list(SHORT)
    result = run(model, *arguments, stdin=PROMPT + "\n")
    assert (result.returncode, result.stdout) == (0, expected + "\n")


@pytest.mark.parametrize("stdin", ["", "\n\n"])
def test_an_empty_standard_input_is_a_usage_error(model: Path, stdin: str) -> None:
    result = run(model, stdin=stdin)
    assert (result.returncode, result.stdout) == (2, "")
    assert "no prompt" in result.stderr


def test_a_prompt_argument_never_waits_for_standard_input(model: Path) -> None:
    read_end, write_end = os.pipe()  # an open pipe on which nothing ever comes
    try:
        assert run(model, PROMPT, *SHORT, stdin=read_end).returncode == 0
    finally:
        os.close(read_end)
        os.close(write_end)


def test_json_lines_hold_text_ids_reason_usage_and_timings(model: Path, expected: str) -> None:
    result = run(model, PROMPT, *SHORT, "--json", "--logprobs", "2", "-n", "2")
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["index"] for line in lines] == [0, 1]
    for line in lines:
        assert line["text"] == expected
        assert line["finish_reason"] == "length"
        assert len(line["token_ids"]) == line["usage"]["completion_tokens"] == 8
        assert line["timings"]["time_to_first_token_s"] > 0
        assert len(line["logprobs"]) == 8
        assert all(len(entry["top"]) in (2, 3) for entry in line["logprobs"])


def test_a_file_of_lines_is_answered_in_order(model: Path, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text(f"the fox\n\n{PROMPT}\n")
    result = run(model, "--prompts", str(path), *SHORT, "--json")
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["id"] for line in lines] == [0, 1]
    assert lines[1]["text"] == expected
    assert "\r" not in result.stderr and "generating" not in result.stderr


def test_json_lines_of_prompts_may_override_sampling(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    records = [
        {"id": "short", "prompt": PROMPT, "max_tokens": 3},
        {"id": "ids", "prompt_token_ids": [5, 6, 7], "stop_token_ids": [0]},
        {"id": "banned", "prompt": PROMPT, "logit_bias": {"5": -100}},
    ]
    path.write_text("\n".join(json.dumps(record) for record in records))
    result = run(model, "--prompts", str(path), *SHORT, "--json")
    assert result.returncode == 0, result.stderr
    lines = {line["id"]: line for line in map(json.loads, result.stdout.splitlines())}
    assert len(lines["short"]["token_ids"]) == 3
    assert set(lines) == {"short", "ids", "banned"}


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ('{"prompt": 5}', "line 1"),
        ('{"prompt": "a", "messages": []}', "exactly one"),
        ('{"prompt": "a", "colour": 1}', "colour"),
        ('{"prompt": "a"', "not JSON"),
    ],
)
def test_a_bad_line_is_named(model: Path, tmp_path: Path, line: str, named: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(line)
    result = run_here(model, "--prompts", str(path), *SHORT)
    assert result.exit_code == 2
    assert named in result.stderr


def test_a_refused_prompt_of_a_file_keeps_nobody_else_from_being_answered(
    model: Path, expected: str, tmp_path: Path
) -> None:
    path = tmp_path / "prompts.jsonl"
    records = [
        {"id": "cold", "prompt": PROMPT, "temperature": -1},
        {"id": "long", "prompt": PROMPT * 200},
        {"id": "fine", "prompt": PROMPT},
        {"id": "outside", "prompt_token_ids": [10**6]},
    ]
    path.write_text("\n".join(json.dumps(record) for record in records))
    result = run(model, "--prompts", str(path), *SHORT, "--json")
    assert result.returncode == 1
    lines = {line["id"]: line for line in map(json.loads, result.stdout.splitlines())}
    assert list(lines) == ["cold", "long", "fine", "outside"]
    assert lines["fine"]["text"] == expected
    for id, named in (("cold", "temperature"), ("long", "context"), ("outside", "vocabulary")):
        assert named in lines[id]["error"]
        assert f"prompt {id}: " in result.stderr


def test_an_answer_cut_by_the_default_limit_is_said_to_be(model: Path) -> None:
    cut = run(model, PROMPT, "--raw", "--ignore-eos", "--backend", "reference", "--max-model-len", "40")
    assert "--max-tokens" in cut.stderr
    assert "--max-tokens" not in run(model, PROMPT, *SHORT).stderr


@pytest.mark.parametrize(
    ("arguments", "status", "named"),
    [
        (["--temperature", "-1"], 2, "temperature"),
        (["--top-p", "2"], 2, "top_p"),
        (["--logit-bias", "nonsense"], 2, "logit-bias"),
        (["--stop-token-id", "99999"], 2, "99999"),
        (["--max-model-len", "999999"], 2, "context"),
        (["--max-num-seqs", "9", "--max-num-batched-tokens", "4"], 2, "max_num_seqs"),
        (["--logprobs", "3"], 2, "--json"),
        (["--backend", "quantum"], 2, "quantum"),
        (["--system", "be brief", "--raw"], 2, "--system"),
    ],
)
def test_bad_options_are_explained(model: Path, arguments: list[str], status: int, named: str) -> None:
    result = run_here(model, PROMPT, *arguments)
    assert (result.exit_code, result.stdout) == (status, "")
    assert named in result.stderr


def test_a_missing_model_is_one_clear_line() -> None:
    result = run(Path("/nowhere/absent.gguf"), PROMPT)
    assert result.returncode == 1
    assert "absent.gguf" in result.stderr
    assert "Traceback" not in result.stderr


def test_too_large_max_tokens_is_lowered_and_said(model: Path) -> None:
    result = run(
        model, PROMPT, "--raw", "--max-tokens", "10000", "--max-model-len", "32", "--backend", "reference"
    )
    assert result.returncode == 0
    assert "lowered" in result.stderr


def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(model: Path) -> None:
    result = run(model, PROMPT * 20, "--raw", "--max-model-len", "16", "--backend", "reference")
    assert result.returncode == 1
    assert "16" in result.stderr and "tokens" in result.stderr


def test_statistics_go_to_standard_error(model: Path, expected: str) -> None:
    result = run(model, PROMPT, *SHORT, "--stats")
    assert result.stdout == expected + "\n"
    for word in ("time to first token", "prefill", "decode", "prefix cache", "preemptions"):
        assert word in result.stderr


def test_interrupting_keeps_the_text_so_far_and_exits_with_130(model: Path) -> None:
    command = [sys.executable, "-u", "-m", "mvllm.cli", "generate", "--model", str(model), PROMPT, "--raw"]
    command += ["--ignore-eos", "--max-tokens", "1000", "--backend", "reference"]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert first
    assert rest.endswith(b"\n")
    assert b"Traceback" not in errors


def test_a_reader_that_goes_away_ends_the_command_quietly(model: Path) -> None:
    command = f"{sys.executable} -m mvllm.cli generate --model {model} '{PROMPT}' --raw --ignore-eos"
    command += " --max-tokens 500 --backend reference | head -c 1"
    result = subprocess.run(command, shell=True, capture_output=True, timeout=120, stdin=subprocess.DEVNULL)
    assert b"Traceback" not in result.stderr


def test_interrupting_a_batch_prints_the_answers_so_far(model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the fox\nthe dog\n")
    command = [sys.executable, "-c", _INTERRUPTED, "generate", "--model", str(model), "--raw", "--json"]
    command += ["--prompts", str(prompts), "--ignore-eos", "--max-tokens", "400", "--backend", "reference"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    assert result.returncode == 130, result.stderr
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    assert [answer["id"] for answer in answers] == [0, 1]
    assert all(answer["token_ids"] and answer["finish_reason"] == "cancelled" for answer in answers)


_INTERRUPTED = """
import signal
from mvllm.cli.main import main
from mvllm.core.engine.engine import Engine

step, steps = Engine.step, []

def interrupted_step(engine):
    steps.append(1)
    if len(steps) == 5:
        signal.raise_signal(signal.SIGINT)
    return step(engine)

Engine.step = interrupted_step
main()
"""
"""The command, with Ctrl-C at the fifth step."""


def test_files_and_pipes_get_utf8_whatever_the_locale(model: Path) -> None:
    half = "é".encode()[:1]
    with LLM(model, backend="reference") as llm:
        token = next(id for id in range(320) if llm.tokenizer.token_bytes(id) == half)
    line = json.dumps({"prompt": "a", "max_tokens": 1, "logit_bias": {str(token): 100}, "logprobs": 0})
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    result = run(model, "--prompts", "-", "--json", *SHORT, stdin=line, env=environment, encoding="utf-8")
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    assert answer["text"] == "\ufffd"
    assert answer["logprobs"][0]["bytes"] == list(half)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_an_answer_that_can_not_be_written_is_one_clear_line(model: Path) -> None:
    command = f"{sys.executable} -m mvllm.cli generate --model {model} {' '.join(SHORT)} '{PROMPT}'"
    for redirection, reason in ((">/dev/full", "No space left"), (">&-", "closed")):
        result = subprocess.run(
            f"{command} {redirection}", shell=True, capture_output=True, text=True, timeout=120
        )
        assert result.returncode == 1
        assert reason in result.stderr and len(result.stderr.strip().splitlines()) == 1


def test_a_small_pool_lowers_the_default_output_limit_and_refuses_nothing(model: Path) -> None:
    result = run(
        model, PROMPT, "--raw", "--num-kv-blocks", "2", "--ignore-eos", "--json", "--backend", "reference"
    )
    assert result.returncode == 0, result.stderr
    usage = json.loads(result.stdout)["usage"]
    assert usage["prompt_tokens"] + usage["completion_tokens"] == 32


def test_a_file_without_a_known_pretokenizer_needs_the_callers_consent(tmp_path: Path, expected: str) -> None:
    path = tmp_path / "unnamed.gguf"
    write_tiny_gguf(path, tensor_type="Q8_0", seed=1, metadata={"tokenizer.ggml.pre": None})
    refused = run(path, PROMPT, *SHORT)
    assert refused.returncode == 1
    assert "--allow-unknown-pretokenizer" in refused.stderr
    assert run(path, PROMPT, *SHORT, "--allow-unknown-pretokenizer").returncode == 0
