"""Ctrl-C at the worst moments: held back until the change is whole, and nothing wrong afterwards."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mvllm import LLM, EngineClosed, SamplingParams
from mvllm.core.interrupts import HoldInterrupts
from mvllm.core.kv.kv_manager import KvManager
from tests.tiny_models import write_tiny_gguf

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = ["the fox", " the other engine"]


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[LLM]:
    write_tiny_gguf(tmp_path / "tiny.gguf", tensor_type="F16", seed=4)
    with LLM(tmp_path / "tiny.gguf", backend="reference", block_size=4, max_model_len=64) as llm:
        yield llm


def raise_once(
    monkeypatch: pytest.MonkeyPatch, name: str, interrupt: Callable[[], None], *, before: bool
) -> None:
    """Let the next call of a method of `KvManager` be interrupted before or after its work."""
    original = getattr(KvManager, name)

    def interrupted(self: KvManager, *arguments: object) -> object:
        monkeypatch.setattr(KvManager, name, original)
        if before:
            interrupt()
        result = original(self, *arguments)
        if not before:
            interrupt()
        return result

    monkeypatch.setattr(KvManager, name, interrupted)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("method", ["grant", "commit", "release"])
def test_an_interrupted_step_is_finished_first(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, method: str, before: bool
) -> None:
    expected = [output.outputs for output in llm.generate(PROMPTS, GREEDY)]
    raise_once(monkeypatch, method, lambda: signal.raise_signal(signal.SIGINT), before=before)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY)
    llm.engine.check_integrity()
    assert [output.outputs for output in llm.generate(PROMPTS, GREEDY)] == expected
    assert llm.engine.num_running == llm.engine.num_waiting == llm.engine.num_used_blocks == 0


def test_an_interrupt_during_submission_leaves_no_request_behind(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = llm.engine.submit

    def interrupted(request: object) -> None:
        original(request)  # type: ignore[arg-type]
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(llm.engine, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY)
    with pytest.raises(KeyboardInterrupt):
        llm.stream(PROMPTS[0], GREEDY)
    monkeypatch.undo()
    llm.generate("the", GREEDY)
    assert llm.engine.num_running == llm.engine.num_waiting == 0


def test_an_error_in_the_middle_of_a_step_closes_the_engine(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = llm.stream(PROMPTS[0], GREEDY)

    def fail() -> None:
        raise ZeroDivisionError

    raise_once(monkeypatch, "commit", fail, before=True)
    with pytest.raises(ZeroDivisionError):
        llm.generate(PROMPTS, GREEDY)
    for use in (lambda: llm.generate(PROMPTS, GREEDY), lambda: next(stream)):
        with pytest.raises(EngineClosed):
            use()
    llm.close()


def test_handlers_run_at_the_end_in_order_even_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append("interrupt"))
    try:
        with pytest.raises(ZeroDivisionError), HoldInterrupts():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            seen.append("body")
            raise ZeroDivisionError
        assert seen == ["body", "interrupt", "interrupt"]
        signal.raise_signal(signal.SIGINT)
        assert seen[3:] == ["interrupt"]
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_and_ignored_signals_are_left_alone() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with HoldInterrupts():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)

    def hold() -> None:
        with HoldInterrupts():
            seen.append(signal.getsignal(signal.SIGINT))

    seen: list[object] = []
    thread = threading.Thread(target=hold)
    thread.start()
    thread.join()
    assert seen == [before]
