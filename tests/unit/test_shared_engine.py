"""What a forked child may do with an engine that it inherits (REQUIREMENTS Q2)."""

from __future__ import annotations

import multiprocessing
import threading
from typing import Any

import pytest

from mvllm.core.engine.shared_engine import SharedEngine
from mvllm.core.errors import EngineClosed

pytestmark = [
    pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork here"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
]


class SlowEngine:
    """An engine whose steps last until they are let go."""

    def __init__(self) -> None:
        self.started, self.may_end = threading.Event(), threading.Event()

    def step(self) -> tuple[()]:
        self.started.set()
        assert self.may_end.wait(30)
        return ()


class Unfinished:
    """Stands for a collector that waits for events."""

    finished = False


def advance(shared: SharedEngine) -> None:
    shared.advance([Unfinished()])  # type: ignore[list-item]


def _advance_in_child(shared: SharedEngine, results: Any) -> None:
    try:
        advance(shared)
    except EngineClosed as error:
        shared.close()
        results.put(str(error))
    else:
        results.put("done")


def result_in_child(shared: SharedEngine) -> str:
    fork = multiprocessing.get_context("fork")
    results = fork.SimpleQueue()
    child = fork.Process(target=_advance_in_child, args=(shared, results))
    child.start()
    child.join(30)
    assert child.exitcode == 0
    answer: str = results.get()
    return answer


def test_a_child_goes_on_with_an_engine_that_was_idle() -> None:
    engine = SlowEngine()
    engine.may_end.set()
    shared = SharedEngine(engine)  # type: ignore[arg-type]
    assert result_in_child(shared) == "done"
    advance(shared)


def test_a_child_of_a_process_in_the_middle_of_a_step_is_told_so_and_does_not_hang() -> None:
    engine = SlowEngine()
    shared = SharedEngine(engine)  # type: ignore[arg-type]
    stepping = threading.Thread(target=advance, args=(shared,))
    stepping.start()
    try:
        assert engine.started.wait(30)
        assert "spawn" in result_in_child(shared)
    finally:
        engine.may_end.set()
        stepping.join()
    advance(shared)
