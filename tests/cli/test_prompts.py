"""Prompt files as editors and other programs write them."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import click
import pytest

from mvllm.cli.prompts import PromptInput, read_prompt, read_prompt_file
from mvllm.cli.report import json_lines
from mvllm.core.errors import ConfigError
from mvllm.core.request import CompletionOutput, RequestOutput

BOM = "\ufeff"


def read(path: Path, text: str) -> list[PromptInput]:
    path.write_bytes(text.encode())
    return read_prompt_file(path)


def test_line_ends_of_windows_and_a_byte_order_mark_are_no_part_of_a_prompt(tmp_path: Path) -> None:
    prompts = read(tmp_path / "p.txt", f"{BOM}one\r\n\r\n  \r\ntwo\r\n")
    assert [(prompt.id, prompt.text) for prompt in prompts] == [(0, "one"), (1, "two")]
    [prompt] = read(tmp_path / "p.jsonl", f'{BOM}{{"prompt": "one"}}\r\n')
    assert prompt.text == "one"


@pytest.mark.parametrize("separator", ["\u2028", "\x85", "\x0b", "\x0c", "\x1c"])
def test_only_line_feeds_end_a_line(tmp_path: Path, separator: str) -> None:
    text = f"a{separator}b"
    assert [prompt.text for prompt in read(tmp_path / "p.txt", text)] == [text]
    if separator >= " ":
        line = json.dumps({"prompt": text}, ensure_ascii=False)
        assert [prompt.text for prompt in read(tmp_path / "p.jsonl", line)] == [text]


@pytest.mark.parametrize(
    "line",
    [
        '{"prompt": ' + "[" * 100_000,
        '{"prompt": "a", "id": NaN}',
        '{"prompt": "a", "temperature": -Infinity}',
        '{"prompt_token_ids": [true]}',
        '{"prompt": ' + "1" * 10_000 + "}",
    ],
    ids=lambda line: line[:24],
)
def test_what_is_not_json_or_of_the_wrong_type_is_refused_with_its_line(tmp_path: Path, line: str) -> None:
    with pytest.raises(ConfigError, match="line 2"):
        read(tmp_path / "p.jsonl", f'{{"prompt": "good"}}\n{line}\n')


def test_a_closed_standard_input_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    for argument in ("-", None):
        with pytest.raises(click.UsageError):
            read_prompt(argument)
    with pytest.raises(click.UsageError, match="closed"):
        read_prompt_file(Path("-"))


def test_a_piped_prompt_loses_its_last_line_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(f"{BOM}a\r\nb\r\n".encode())))
    assert read_prompt(None) == "a\r\nb"


def test_half_a_surrogate_pair_in_an_id_comes_back_as_an_escape() -> None:
    answers = (CompletionOutput(0, "text", ()),)
    [line] = json_lines("\ud800", RequestOutput("r", None, (), answers, finished=True))
    assert json.loads(line.encode("utf-8"))["id"] == "\ud800"
