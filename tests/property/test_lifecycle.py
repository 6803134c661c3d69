"""The life cycle of a request: the table's legal moves, and cancellation at every moment."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mvllm.core.batch.sampling_row import SamplingRow
from mvllm.core.engine.request_table import RequestTable
from mvllm.core.errors import InvariantViolation
from mvllm.core.request import Phase, Request, SamplingParams
from mvllm.core.step import Finished, RowDecision
from mvllm.core.types import RequestId
from tests.property.engine_harness import Cancel, EngineHarness, Script, resolved_config

IDS = st.sampled_from(["a", "b", "c"]).map(RequestId)
TERMINAL = (Phase.FINISHED, Phase.CANCELLED, Phase.FAILED)


def make_request(id: str, prompt: tuple[int, ...] = (0, 1, 0), max_tokens: int = 4, **params: Any) -> Request:
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, **params})
    return Request(RequestId(id), prompt, sampling, 7, max_tokens)


class TableMachine(RuleBasedStateMachine):
    """L1: every verb on every request in every phase; the legal ones succeed, the others change nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.table = RequestTable()
        self.model: dict[str, tuple[Phase, int, int]] = {}  # id -> phase, number of tokens, computed

    def attempt(self, verb: Callable[[], object], legal: bool) -> None:
        before = self.snapshot()
        if legal:
            verb()
            return
        with pytest.raises(InvariantViolation):
            verb()
        assert self.snapshot() == before

    def snapshot(self) -> list[tuple[object, ...]]:
        return [
            (state.id, state.phase, tuple(state.token_ids), state.num_computed, state.num_preemptions)
            for state in self.table
        ]

    @rule(id=IDS)
    def submit(self, id: RequestId) -> None:
        request = make_request(id)
        legal = id not in self.model
        self.attempt(lambda: self.table.add(request, SamplingRow.of(request), None), legal)
        if legal:
            self.model[id] = (Phase.WAITING, 3, 0)

    @rule(id=IDS, num_cached=st.integers(-1, 5))
    def admit(self, id: RequestId, num_cached: int) -> None:
        phase, num_tokens, _ = self.model.get(id, (None, 0, 0))
        legal = phase is Phase.WAITING and 0 <= num_cached < num_tokens
        self.attempt(lambda: self.table.admit(id, num_cached), legal)
        if legal:
            self.model[id] = (Phase.RUNNING, num_tokens, num_cached)

    @rule(id=IDS)
    def preempt(self, id: RequestId) -> None:
        phase, num_tokens, _ = self.model.get(id, (None, 0, 0))
        legal = phase is Phase.RUNNING
        self.attempt(lambda: self.table.preempt(id), legal)
        if legal:
            self.model[id] = (Phase.WAITING, num_tokens, 0)

    @rule(id=IDS, num_computed=st.integers(0, 8), num_new=st.integers(0, 1))
    def commit(self, id: RequestId, num_computed: int, num_new: int) -> None:
        phase, num_tokens, computed = self.model.get(id, (None, 0, 0))
        num_tokens += num_new
        legal = phase is Phase.RUNNING and computed <= num_computed < num_tokens <= 6
        decision = RowDecision(id, num_computed, (1,) * num_new)
        self.attempt(lambda: self.table.commit(decision, None), legal)
        if legal:
            self.model[id] = (Phase.RUNNING, num_tokens, num_computed)

    @rule(id=IDS, phase=st.sampled_from(list(Phase)))
    def finish(self, id: RequestId, phase: Phase) -> None:
        now = self.model.get(id, (None, 0, 0))[0]
        legal = now is not None and phase in TERMINAL
        legal = legal and not (now is Phase.WAITING and phase is Phase.FINISHED)
        self.attempt(lambda: self.table.finish(id, phase), legal)
        if legal:
            del self.model[id]

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.table.check_integrity()
        found = {state.id: (state.phase, len(state.token_ids), state.num_computed) for state in self.table}
        assert found == self.model
        arrivals = [state.arrival for state in self.table]
        assert arrivals == sorted(arrivals)


TestRequestTable = TableMachine.TestCase


def harness(**config: Any) -> EngineHarness:
    return EngineHarness(Script(resolved_config(**config), ()))


@given(
    st.integers(0, 14),
    st.integers(0, 2),
    st.booleans(),
    st.integers(1, 4),
    st.booleans(),
)
def test_a_cancel_at_any_step_is_safe_and_ends_the_request_once(
    at_step: int, target: int, during_forward: bool, budget: int, twice: bool
) -> None:
    """L5: waiting, mid-chunk, decoding, preempted, in the drain of its submission, finished, twice."""
    engine = harness(
        block_size=2, num_kv_blocks=7, max_num_seqs=min(3, budget), max_num_batched_tokens=budget
    )
    for index in range(3):
        engine.submit(make_request(f"r{index}", (0, 1, 0, 1, index), max_tokens=6))
    for step in range(40):
        if step == at_step:
            for _ in range(1 + twice):
                engine.cancel(Cancel(target, during_forward))
        if engine.engine.has_work:
            engine.step()
    engine.check_drained()
    engine.check_outputs()
    ends = [heard.end for heard in engine.heard.values()]
    assert all(isinstance(end, Finished) for end in ends)


def test_a_cancel_in_the_drain_of_its_submission_gives_one_event_and_no_step_of_work() -> None:
    """L5."""
    engine = harness()
    engine.submit(make_request("r"))
    engine.cancel(Cancel(0))
    assert engine.step() == (Finished(RequestId("r"), "cancelled"),)
    assert engine.model.num_steps == 0
    engine.check_drained()


def test_cancelling_finished_and_unknown_requests_does_nothing() -> None:
    """L5."""
    engine = harness()
    engine.submit(make_request("r"))
    engine.drain()
    engine.engine.cancel(RequestId("r"))
    engine.engine.cancel(RequestId("nobody"))
    assert not engine.engine.has_work
    assert engine.step() == ()


def test_an_id_can_be_used_again_after_its_request_has_ended() -> None:
    """L2: events of the second request are its own."""
    engine = harness()
    for _ in range(2):
        engine.submit(make_request("r"))
        engine.drain()
        engine.check_outputs()


def test_a_cancelled_preempted_request_leaves_the_waiting_queue() -> None:
    """L5 and L3."""
    engine = harness(block_size=1, num_kv_blocks=8, max_num_seqs=2, max_num_batched_tokens=8)
    engine.submit(make_request("old", (0, 1, 0), max_tokens=6))
    engine.submit(make_request("young", (1, 1, 1), max_tokens=6))
    while engine.engine.totals.num_preemptions == 0:
        engine.step()
    assert [state.id for state in engine.engine._table.waiting] == ["young"]
    engine.cancel(Cancel(1))
    engine.drain()
    assert engine.heard[RequestId("young")].end == Finished(
        RequestId("young"), "cancelled", num_preemptions=1
    )
    engine.check_drained()


def test_submit_and_cancel_from_many_threads_end_every_request_exactly_once() -> None:
    """L2 and L5 with commands that come while steps run."""
    engine = harness(num_kv_blocks=16)

    def client(name: int) -> None:
        for index in range(20):
            request = make_request(f"{name}-{index}", (name % 2, index % 2, 0), max_tokens=3)
            engine.submit(request)
            if index % 3 == 0:
                engine.cancelled.add(request.id)
                engine.engine.cancel(request.id)

    threads = [threading.Thread(target=client, args=(name,)) for name in range(4)]
    heard: list[Finished] = []
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) or engine.engine.has_work:
        heard += [event for event in engine.engine.step() if isinstance(event, Finished)]
    assert sorted(event.id for event in heard) == sorted(engine.requests)
    assert engine.model.violations == []
    engine.check_drained()
