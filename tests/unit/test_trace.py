"""Traces of steps: what the file holds, and that it is whole whatever happens."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mvllm.core import trace as trace_module
from mvllm.core.errors import ConfigError
from mvllm.core.trace import NO_TRACE, STAGE, STEP, FileTrace


class Clock:
    """Goes on by a microsecond with every look at it."""

    def __init__(self) -> None:
        self.now = 5_000_000

    def __call__(self) -> int:
        self.now += 1000
        return self.now


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.json"


@pytest.fixture
def trace(path: Path) -> Iterator[FileTrace]:
    opened = FileTrace(path, Clock())
    yield opened
    opened.close()


def events_in(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


def spans_in(path: Path, category: str) -> list[dict[str, Any]]:
    return [event for event in events_in(path) if event.get("cat") == category]


def run_step(trace: FileTrace, *stages: str, rows: int = 1, tokens: int = 1) -> None:
    trace.start_step()
    for stage in stages:
        trace.stage(stage)
    trace.end_step(rows, tokens, 0)


def test_stages_follow_each_other_without_a_gap_inside_their_step(trace: FileTrace, path: Path) -> None:
    run_step(trace, "plan", "forward", "commit", rows=2, tokens=7)
    run_step(trace, "plan")
    trace.close()
    first, second = spans_in(path, STEP)
    stages = spans_in(path, STAGE)
    assert (first["name"], first["args"]) == ("step 1", {"rows": 2, "tokens": 7, "drafts": 0})
    assert [stage["name"] for stage in stages] == ["plan", "forward", "commit", "plan"]
    ends = [stage["ts"] + stage["dur"] for stage in stages]
    assert [stage["ts"] for stage in stages[1:3]] == pytest.approx(ends[:2])
    assert stages[0]["ts"] >= first["ts"]
    assert ends[2] == pytest.approx(first["ts"] + first["dur"])
    assert second["ts"] >= first["ts"] + first["dur"]


def test_other_spans_have_tracks_of_their_own_and_stand_behind_their_step(
    trace: FileTrace, path: Path
) -> None:
    trace.start_step()
    trace.stage("forward")
    now = trace._clock_ns()
    trace.spans(
        "thread 0",
        ['linear "q"', "wait"],
        ["linear", "wait"],
        [now, now + 500],
        [now + 500, now + 700],
        [(("shape", "[2, 3]"), ("bytes", 6)), ()],
    )
    trace.end_step(1, 1, 0)
    trace.close()
    names = [event["name"] for event in events_in(path) if event["ph"] == "X"]
    assert names == ["step 1", "forward", 'linear "q"', "wait"]
    tracks = {e["args"]["name"]: e["tid"] for e in events_in(path) if e["name"] == "thread_name"}
    linear, wait = spans_in(path, "linear")[0], spans_in(path, "wait")[0]
    assert linear["tid"] == wait["tid"] == tracks["thread 0"] != tracks["engine"]
    assert linear["dur"] == 0.5
    assert linear["args"] == {"shape": "[2, 3]", "bytes": 6}
    assert "args" not in wait
    forward = spans_in(path, STAGE)[0]
    assert forward["ts"] <= linear["ts"]
    assert wait["ts"] + wait["dur"] <= forward["ts"] + forward["dur"]


def test_work_left_to_the_end_of_a_step_shows_in_none_of_its_spans(trace: FileTrace, path: Path) -> None:
    ends: list[int] = []

    def tell() -> None:
        ends.append(trace._clock_ns())
        trace.spans("thread 0", ["norm"], ["norm"], [ends[0] - 100], [ends[0]])

    trace.start_step()
    trace.stage("forward")
    trace.when_done(tell)
    trace.end_step(1, 1, 0)
    run_step(trace, "forward")
    trace.close()
    assert len(ends) == 1
    [norm] = spans_in(path, "norm")
    step = spans_in(path, STEP)[0]
    assert norm["ts"] + norm["dur"] > step["ts"] + step["dur"]


def test_the_file_is_whole_after_every_write(
    trace: FileTrace, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_module, "_FLUSH_BYTES", 1)
    assert [event["ph"] for event in events_in(path)] == ["M"]
    for number in range(1, 4):
        run_step(trace, "plan")
        assert len(spans_in(path, STEP)) == number


def test_events_wait_in_bounded_memory(trace: FileTrace, path: Path) -> None:
    for _ in range(3000):
        run_step(trace, "plan", "forward")
        assert trace._file._waiting_bytes < trace_module._FLUSH_BYTES
    assert len(spans_in(path, STEP)) > 1000
    trace.close()
    assert len(spans_in(path, STEP)) == 3000


def test_a_step_that_an_exception_left_open_is_marked(trace: FileTrace, path: Path) -> None:
    trace.start_step()
    trace.stage("plan")
    run_step(trace, "plan")
    trace.start_step()
    trace.close()
    assert [step["args"].get("failed", False) for step in spans_in(path, STEP)] == [True, False, True]


def test_a_file_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be written"):
        FileTrace(tmp_path / "missing" / "trace.json", Clock())


def test_a_file_that_is_lost_later_costs_the_trace_not_the_run(
    trace: FileTrace, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_step(trace, "plan")
    path.unlink()
    with caplog.at_level(logging.WARNING, "mvllm"):
        trace.close()
    assert "part of the trace is lost" in caplog.text
    run_step(trace, "plan")


def test_without_a_trace_nothing_is_kept() -> None:
    NO_TRACE.start_step()
    NO_TRACE.stage("plan")
    NO_TRACE.when_done(lambda: pytest.fail("nobody is told"))
    NO_TRACE.spans("thread 0", ["linear"], ["linear"], [0], [1], [(("bytes", 1),)])
    NO_TRACE.end_step(1, 1, 0)
    NO_TRACE.close()
    assert not NO_TRACE.enabled
    assert vars(NO_TRACE) == {}


def test_a_forked_child_leaves_its_parents_file_alone(
    trace: FileTrace, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_step(trace, "plan")
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        trace.close()
    assert spans_in(path, STEP) == []
