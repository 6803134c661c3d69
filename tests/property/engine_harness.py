"""Runs scripts of submit, cancel and step on an engine over the fake backend and checks all that must hold.

A script is a value, so that a failing one can be printed and shrunk.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from mvllm.backends.fake.model import FakeModel, Faults
from mvllm.backends.fake.tags import ROOT_TAG, extend_tag
from mvllm.core.config import AdmissionPolicy, PrefillPolicy, ResolvedConfig
from mvllm.core.engine.engine import Engine
from mvllm.core.errors import RequestRejected
from mvllm.core.request import Phase, Request
from mvllm.core.step import Event, Finished, ForwardBatch, TokensOut
from mvllm.core.types import RequestId, ceil_div
from tests.models.naive_loop import NaiveOutput, naive_generate
from tests.models.toy_text import PIECES, ToyDecoder
from tests.property.engine_speculation import Drafting, SpeculationWatch, check_indexed_blocks

VOCAB_SIZE = len(PIECES)
MAX_MODEL_LEN = 24

LEGAL_MOVES = {
    (None, Phase.WAITING),
    (None, Phase.RUNNING),  # submitted and admitted by one step
    (Phase.WAITING, Phase.WAITING),
    (Phase.WAITING, Phase.RUNNING),
    (Phase.RUNNING, Phase.RUNNING),
    (Phase.RUNNING, Phase.WAITING),
}


@dataclass(frozen=True)
class Submit:
    """`num_siblings` requests that share everything but their seeds are separate actions with one prompt."""

    request: Request


@dataclass(frozen=True)
class Cancel:
    """Cancel the request submitted as number `index` (which may not exist)."""

    index: int
    during_forward: bool = False  # within the next step, while the model runs


@dataclass(frozen=True)
class Step:
    pass


Action = Submit | Cancel | Step


@dataclass(frozen=True)
class Script:
    config: ResolvedConfig
    actions: tuple[Action, ...]
    drafting: Drafting | None = None
    nan_tokens: frozenset[int] = frozenset()
    crash_tokens: frozenset[int] = frozenset()
    flaky_every: int = 0  # every so many batches of several rows, the first attempt raises


def resolved_config(
    *,
    block_size: int = 2,
    num_kv_blocks: int = 12,
    max_num_batched_tokens: int = 12,
    max_num_seqs: int = 4,
    enable_prefix_caching: bool = True,
    admission: AdmissionPolicy = "optimistic",
    policy: PrefillPolicy = "fcfs",
    max_model_len: int = MAX_MODEL_LEN,
    max_step_drafts: int = 8,
) -> ResolvedConfig:
    return ResolvedConfig(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
        num_kv_blocks=num_kv_blocks,
        kv_dtype="f32",
        enable_prefix_caching=enable_prefix_caching,
        admission=admission,
        policy=policy,
        max_step_drafts=max_step_drafts,
        check_integrity=True,
    )


@dataclass
class Heard:
    """What the events told about one request."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    num_cached_tokens: int | None = None
    end: Finished | None = None


class EngineHarness:
    """An engine, what was asked of it and what it answered."""

    def __init__(self, script: Script) -> None:
        config = script.config
        self.script = script
        self.config = config
        faults = Faults(script.nan_tokens, script.crash_tokens, self._on_forward)
        self.model = FakeModel(VOCAB_SIZE, config.num_kv_blocks, config.block_size, faults=faults)
        self.requests: dict[RequestId, Request] = {}
        self.watch: SpeculationWatch | None = None
        if script.drafting is not None:
            self.watch = SpeculationWatch(script.drafting, config, VOCAB_SIZE, self._answer)
        self.engine = Engine(
            self.model,
            config,
            vocab_size=VOCAB_SIZE,
            text=lambda params: ToyDecoder(),
            speculation=self.watch.speculation if self.watch else None,
            clock=itertools.count().__next__,
        )
        self.heard: dict[RequestId, Heard] = {}
        self.cancelled: set[RequestId] = set()
        self._cancel_in_forward: list[RequestId] = []
        self._phases: dict[RequestId, Phase] = {}
        self._num_forwards = 0

    # --- actions -----------------------------------------------------------------------------------------

    def perform(self, action: Action) -> None:
        if isinstance(action, Submit):
            self.submit(action.request)
        elif isinstance(action, Cancel):
            self.cancel(action)
        elif not self.closed:
            self.step()

    @property
    def closed(self) -> bool:
        return self.engine._inbox.closed

    def submit(self, request: Request) -> None:
        servable = request.total_limit <= self.config.max_model_len and (
            ceil_div(request.total_limit - 1, self.config.block_size) <= self.config.num_kv_blocks
        )
        if self.closed:
            return
        try:
            self.engine.submit(request)
        except RequestRejected as rejection:
            assert not servable, f"a servable request was rejected: {rejection}"
            assert rejection.needed is not None and rejection.available is not None
            return
        assert servable, "a request that can never fit was accepted (S11)"
        self.requests[request.id] = request
        self.heard[request.id] = Heard()

    def cancel(self, action: Cancel) -> None:
        ids = list(self.requests)
        id = ids[action.index] if action.index < len(ids) else RequestId("unknown")
        self.cancelled.add(id)
        if action.during_forward:
            self._cancel_in_forward.append(id)
        else:
            self.engine.cancel(id)

    def step(self) -> tuple[Event, ...]:
        num_tokens_before = {id: len(heard.token_ids) for id, heard in self.heard.items()}
        cancelled_now = set(self._cancel_in_forward)
        oldest = next(iter(self.engine._table), None)
        before = (len(oldest.token_ids), oldest.num_computed) if oldest else (0, 0)
        was_running = oldest is not None and oldest.phase is Phase.RUNNING
        num_forwards = self.model.num_steps
        if self.watch:
            self.watch.begin_step()
        events = self.engine.step()
        if self.watch:
            self.watch.end_step(self.engine, events, together=self.model.num_steps <= num_forwards + 1)
        for event in events:
            self._hear(event)
        for id in cancelled_now - set(self._cancel_in_forward):
            if id in self.heard:
                assert len(self.heard[id].token_ids) == num_tokens_before[id], "in-flight token emitted (L5)"
        # With reservations a former follower may wait for a younger row that passed it (core/sched).
        must_advance = was_running or self.config.admission == "optimistic"
        if oldest is not None and must_advance and not oldest.phase.terminal:
            assert (len(oldest.token_ids), oldest.num_computed) > before, "the oldest stood still (S10)"
        self.check()
        return events

    def drain(self) -> None:
        """Step until nothing is left; the number of steps is bounded (S10)."""
        bound = sum(request.total_limit for request in self.requests.values()) + 1
        while self.engine.has_work and not self.closed:
            assert bound > 0, "no progress: more steps than all tokens together (S10)"
            bound -= 1
            self.step()

    def _answer(self, id: RequestId) -> tuple[int, ...]:
        return naive_generate(self.requests[id], VOCAB_SIZE, nan_tokens=self.script.nan_tokens).token_ids

    def _on_forward(self, batch: ForwardBatch) -> bool:
        assert batch.num_tokens <= self.config.max_num_batched_tokens, "over the budget (S1)"
        assert len(batch.logit_rows) <= self.config.max_logit_rows, "more logits than there is room for"
        while self._cancel_in_forward:
            self.engine.cancel(self._cancel_in_forward.pop())
        if batch.num_rows < 2 or not self.script.flaky_every:
            return False
        self._num_forwards += 1
        return self._num_forwards % self.script.flaky_every == 0

    def _hear(self, event: Event) -> None:
        heard = self.heard[event.id]
        assert heard.end is None, f"{event} after {heard.end} (L2)"
        heard.text += event.text
        if isinstance(event, Finished):
            heard.end = event
            return
        assert isinstance(event, TokensOut) and event.token_ids
        heard.token_ids += event.token_ids
        heard.logprobs += [
            tuple((token, entry.logprob) for token, entry in logprobs.by_token.items())
            for logprobs in event.logprobs
        ]
        assert heard.num_cached_tokens in (None, event.num_cached_tokens)
        heard.num_cached_tokens = event.num_cached_tokens

    # --- what must hold after every step -------------------------------------------------------------------

    def check(self) -> None:
        assert self.model.violations == [], self.model.violations
        if self.closed:
            self._check_closed()
            return
        self.engine.check_integrity()
        table, kv = self.engine._table, self.engine._kv
        live = {state.id for state in table}
        assert live == {id for id, heard in self.heard.items() if heard.end is None}, (
            "live and ended (L2, L3)"
        )
        assert set(kv.live_ids()) <= live
        phases = {state.id: state.phase for state in table}
        for id, phase in phases.items():
            assert (self._phases.get(id), phase) in LEGAL_MOVES, f"{self._phases.get(id)} -> {phase} (L1)"
        self._phases = phases
        for state in table.running:
            self._check_tags(state.id, state.token_ids, state.num_computed)
            held = len(kv.table(state.id))
            assert held == ceil_div(state.num_computed, self.config.block_size), "blocks held (K3)"
            assert state.num_computed <= state.request.total_limit - 1, "last token cached (K3)"
        check_indexed_blocks(kv, self.model)
        distinct = {block for state in table for block in kv.table(state.id)}
        assert len(distinct) + kv.num_free + kv.num_idle == self.config.num_kv_blocks, "conservation (K9)"
        assert len(table.running) <= self.config.max_num_seqs
        stats = self.engine.last_step
        assert stats.num_tokens <= self.config.max_num_batched_tokens
        assert self.config.admission == "optimistic" or stats.num_preemptions == 0, "preempted (S14)"

    def _check_tags(self, id: RequestId, token_ids: Sequence[int], num_computed: int) -> None:
        """K1: every computed position holds the tag of its whole prefix."""
        table, size = self.engine._kv.table(id), self.config.block_size
        tag = ROOT_TAG
        for position, token in enumerate(token_ids[:num_computed]):
            tag = extend_tag(tag, token)
            found = self.model.tag_at(table[position // size] * size + position % size)
            assert found == tag, f"{id} position {position} (K1)"

    def _check_closed(self) -> None:
        assert all(heard.end is not None for heard in self.heard.values()), "a request without an end (L2)"
        assert len(self.engine._table) == 0 and not self.engine._kv.live_ids()

    # --- what must hold at the end -------------------------------------------------------------------------

    def check_drained(self) -> None:
        """P2, K9 and T1: nothing is left behind but the prefix cache, and that can be emptied."""
        engine = self.engine
        assert engine.num_running == engine.num_waiting == len(engine._table) == 0
        assert engine.num_free_blocks + engine.num_idle_blocks == self.config.num_kv_blocks
        assert engine.num_idle_blocks == 0 or self.config.enable_prefix_caching
        engine.clear_cache()
        assert engine.num_free_blocks == self.config.num_kv_blocks
        engine.check_integrity()
        if self.watch:
            self.watch.check_drained(engine)

    def check_outputs(self) -> None:
        """L7: what was heard of each request is what the naive loop says, or a beginning of it."""
        for id, request in self.requests.items():
            heard = self.heard[id]
            expected = naive_generate(request, VOCAB_SIZE, nan_tokens=self.script.nan_tokens)
            assert heard.end is not None, f"{id} never ended (L2)"
            self._check_cached(request, heard)
            if heard.end.reason == "cancelled":
                assert id in self.cancelled
                self._check_beginning(heard, expected)
            elif heard.end.reason == "error" and self.script.crash_tokens:
                self._check_beginning(heard, expected)
                faulty = self.script.crash_tokens | self.script.nan_tokens
                seen = {*request.prompt_token_ids, *heard.token_ids}
                # An engine of which every row fails closes itself and takes everybody along.
                assert faulty & seen or self.closed, f"{id} failed for another's fault (L6)"
            else:
                self._check_whole(heard, expected)

    def _check_whole(self, heard: Heard, expected: NaiveOutput) -> None:
        assert heard.end is not None
        assert tuple(heard.token_ids) == expected.token_ids
        assert (heard.end.reason, heard.end.stop_reason) == (expected.reason, expected.stop_reason)
        assert heard.text == expected.text or expected.reason == "error"
        assert tuple(heard.logprobs) == (expected.logprobs or ())

    def _check_beginning(self, heard: Heard, expected: NaiveOutput) -> None:
        assert tuple(heard.token_ids) == expected.token_ids[: len(heard.token_ids)]
        assert expected.text.startswith(heard.text)

    def _check_cached(self, request: Request, heard: Heard) -> None:
        cached = heard.num_cached_tokens or 0
        assert cached < len(request.prompt_token_ids) and cached % self.config.block_size == 0
        assert cached == 0 or self.config.enable_prefix_caching


def run_script(script: Script) -> EngineHarness:
    """Perform all actions, drain, check everything."""
    harness = EngineHarness(script)
    for action in script.actions:
        harness.perform(action)
    harness.drain()
    if not harness.closed:
        harness.check_drained()
    harness.check_outputs()
    harness.engine.close()
    if harness.watch:
        assert harness.watch.drafter.closed, "the drafter is left open"
    return harness
