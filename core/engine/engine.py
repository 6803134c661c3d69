"""The engine: requests in, one step at a time, events out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from mvllm.core.batch.batcher import Batcher
from mvllm.core.batch.sampling_row import SamplingRow
from mvllm.core.config import ResolvedConfig
from mvllm.core.engine.decisions import Drafts, RowOutcome
from mvllm.core.engine.forward import ForwardRunner
from mvllm.core.engine.inbox import Inbox, Submit
from mvllm.core.engine.intake import check_request, start_text
from mvllm.core.engine.request_table import RequestState, RequestTable
from mvllm.core.engine.request_text import TextDecoderFor
from mvllm.core.engine.speculator import Speculator
from mvllm.core.engine.statistics import IDLE_STEP, EngineTotals
from mvllm.core.engine.view import NO_DRAFTS, scheduler_view
from mvllm.core.errors import EngineClosed, InvariantViolation
from mvllm.core.kv.kv_manager import KvManager
from mvllm.core.request import FinishReason, Phase, Request
from mvllm.core.sched.scheduler import Scheduler
from mvllm.core.spec.speculation import Speculation
from mvllm.core.step import (
    Event,
    Finished,
    KvCommit,
    KvGrant,
    RowDecision,
    SchedulerView,
    StepPlan,
    StepStats,
    TokensOut,
)
from mvllm.core.tensor import Model
from mvllm.core.trace import NO_TRACE, Trace
from mvllm.core.types import RequestId


class Engine:
    """Runs requests on a model, all of them together, one step per call.

    Owns the request table, the KV manager, the scheduler, the model and, if it speculates, the drafter; does
    not own threads, tokenizers or callers. `submit` and `cancel` may be called from any thread: they only
    leave a command, which the next step boundary applies. Everything else belongs to the one thread that
    calls `step`.

    Args:
        model: loaded with a KV pool of `config`'s shape; closed with the engine.
        config: complete settings.
        vocab_size: token ids are checked against it.
        text: makes the text decoder of a request; None: events carry token ids only, and stop strings
            are refused.
        speculation: who drafts tokens, and how many; closed with the engine. None: nothing is drafted.
        trace: is told of steps and their stages; not closed with the engine.
        clock: seconds, monotonic; read for `totals` and for the draft length policy. No token and no other
            decision depends on it.
    """

    def __init__(
        self,
        model: Model,
        config: ResolvedConfig,
        *,
        vocab_size: int,
        text: TextDecoderFor | None = None,
        speculation: Speculation | None = None,
        trace: Trace = NO_TRACE,
        clock: Callable[[], float],
    ) -> None:
        self._model = model
        self._config = config
        self._vocab_size = vocab_size
        self._text = text
        self._trace = trace
        self._clock = clock
        self._table = RequestTable()
        self._kv = KvManager(
            config.num_kv_blocks, config.block_size, enable_prefix_caching=config.enable_prefix_caching
        )
        self._scheduler = Scheduler(
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            block_size=config.block_size,
            num_blocks=config.num_kv_blocks,
            admission=config.admission,
            policy=config.policy,
            max_step_drafts=config.max_step_drafts,
        )
        self._speculator: Speculator | None = None
        if speculation is not None:
            self._speculator = Speculator(
                speculation,
                vocab_size=vocab_size,
                max_step_drafts=config.max_step_drafts,
                clock=clock,
            )
        self._forward = ForwardRunner(model, self._kv, Batcher(config.block_size), trace)
        self._inbox = Inbox()
        self._last_step = IDLE_STEP
        self._totals = EngineTotals()

    # --- commands, from any thread -----------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request; its events come out of later steps.

        Raises:
            ConfigError: a token id outside the vocabulary, an id that is in use, or stop strings without
                a text decoder.
            RequestRejected: the prompt is empty, or request and limits can never fit.
            EngineClosed: the engine takes no more requests.
        """
        check_request(request, self._vocab_size, self._config.max_model_len, has_text=self._text is not None)
        refusal = self._scheduler.refusal(len(request.prompt_token_ids), request.total_limit)
        if refusal is not None:
            raise refusal
        self._inbox.submit(Submit(request, SamplingRow.of(request), start_text(request, self._text)))

    def cancel(self, id: RequestId) -> None:
        """Ask for the end of a request. Safe at any time and any number of times; unknown ids are ignored.

        The request's only further event is the terminal one, unless a step about to return ends it first.
        """
        self._inbox.cancel(id)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return len(self._inbox) > 0

    # --- the step ----------------------------------------------------------------------------------------

    def step(self) -> tuple[Event, ...]:
        """Compute one batch; () if there is nothing to do.

        Returns:
            Token events, each request's in order, and exactly one terminal event per request.

        Raises:
            EngineClosed: the engine was closed, or closed itself in an earlier step.
        """
        if self._inbox.closed:
            raise EngineClosed("the engine is closed")
        started = self._clock()
        self._trace.start_step()
        stage = self._trace.stage
        events: list[Event] = []
        stage("commands")
        self._apply_commands(events)
        stage("view")
        view = self._view()
        stage("plan")
        plan = self._scheduler.plan(view)
        stage("grant")
        states, grant = self._begin(plan)
        stage("draft")
        drafts = self._draft(plan, states, grant)
        result = self._forward.run(plan.rows, states, grant, drafts)
        stage("commit")
        self._apply_commands(events)  # a cancel that came during the forward still counts
        decisions = self._commit(result.outcomes, events)
        num_drafts = 0
        if self._speculator is not None:
            self._speculator.observe(plan.rows, drafts, decisions, together=result.together)
            num_drafts = sum(map(len, drafts)) if result.together else 0
        stage("events")
        self._finish(result.outcomes, events)
        self._record(plan, states, decisions, num_drafts, self._clock() - started)
        if result.error is not None:
            error = result.error
            events += self._shut_down(f"every row of a step failed: {type(error).__name__}: {error}")
        elif self._config.check_integrity:
            self.check_integrity()
        last = self._last_step
        self._trace.end_step(last.num_rows, last.num_tokens, last.num_drafts)
        return tuple(events)

    def _apply_commands(self, events: list[Event]) -> None:
        for command in self._inbox.take():
            if isinstance(command, Submit):
                self._table.add(command.request, command.sampling, command.text)
            elif self._table.get(command.id) is not None:
                events.append(self._end(command.id, Phase.CANCELLED, "cancelled"))

    def _view(self) -> SchedulerView:
        wishes = NO_DRAFTS if self._speculator is None else self._speculator.wishes(self._table.running)
        return scheduler_view(self._table, self._kv, self._config.max_num_seqs, wishes)

    def _begin(self, plan: StepPlan) -> tuple[list[RequestState], KvGrant]:
        """Give out the plan's blocks, then record its preempts and admits; all-or-nothing."""
        states = [self._state(row.id) for row in plan.rows]
        admitted = [self._state(admission.id) for admission in plan.admits]
        salts = {state.id: state.request.params.cache_salt for state in admitted}
        grant = self._kv.grant(plan, salts)
        for id in plan.preempts:
            self._table.preempt(id)
            if self._speculator is not None:
                self._speculator.release(id)
        for admission in plan.admits:
            self._table.admit(admission.id, len(admission.hit_block_ids) * self._config.block_size)
        return states, grant

    def _draft(self, plan: StepPlan, states: Sequence[RequestState], grant: KvGrant) -> Drafts:
        """Tokens to verify beside each planned row."""
        if self._speculator is None:
            return [()] * len(plan.rows)
        try:
            return self._speculator.propose(plan.rows, states)
        except BaseException:  # an interrupt must leave the blocks as they were
            self._kv.rollback(grant)
            raise

    def _commit(self, outcomes: Sequence[RowOutcome], events: list[Event]) -> list[RowDecision]:
        """Make the step's results the state, and tell the world; returns the decisions that took effect."""
        commits: list[KvCommit] = []
        decisions: list[RowDecision] = []
        for outcome in outcomes:
            decision = outcome.decision
            # Without a state it was cancelled during the forward.
            if decision.error is None and self._table.get(decision.id) is not None:
                state = self._table.commit(decision, outcome.text_after)
                commits.append(KvCommit(decision.id, state.token_ids, decision.num_computed))
                decisions.append(decision)
                if decision.new_token_ids:
                    events.append(_tokens_out(state, outcome))
        self._kv.commit(commits)
        return decisions

    def _finish(self, outcomes: Sequence[RowOutcome], events: list[Event]) -> None:
        """End the requests whose rows' decisions say so."""
        for outcome in outcomes:
            decision = outcome.decision
            if decision.finish_reason is None or self._table.get(decision.id) is None:
                continue
            phase = Phase.FINISHED if decision.error is None else Phase.FAILED
            events.append(
                self._end(
                    decision.id,
                    phase,
                    decision.finish_reason,
                    stop_reason=decision.stop_reason,
                    text=outcome.tail,
                    error=decision.error,
                )
            )

    def _end(
        self,
        id: RequestId,
        phase: Phase,
        reason: FinishReason,
        *,
        stop_reason: int | str | None = None,
        text: str = "",
        error: str | None = None,
    ) -> Finished:
        """Take a live request out of everything; returns its terminal event."""
        if self._state(id).phase is Phase.RUNNING:
            self._kv.release(id)
        if self._speculator is not None:
            self._speculator.release(id)
        state = self._table.finish(id, phase)
        self._inbox.free_id(id)
        self._totals = self._totals.with_end(reason)
        return Finished(id, reason, stop_reason, text, error, state.num_preemptions)

    def _state(self, id: RequestId) -> RequestState:
        state = self._table.get(id)
        if state is None:
            raise InvariantViolation(f"request {id!r} is planned, but not live")
        return state

    # --- end ---------------------------------------------------------------------------------------------

    def close(self) -> tuple[Event, ...]:
        """Fail every live request and release the models. Idempotent; call it from the stepping thread.

        Returns:
            The terminal events of the requests that were still live.
        """
        return () if self._inbox.closed else self._shut_down("the engine was closed")

    def abort(self) -> None:
        """Release model and drafter and leave the requests as they are: for an error in the middle of a
        change, when the state can't be trusted even for ending them."""
        self._inbox.close()
        self._release_models()

    def _shut_down(self, error: str) -> tuple[Event, ...]:
        self._inbox.close()
        events: list[Event] = []
        self._apply_commands(events)
        for id in [state.id for state in self._table]:
            events.append(self._end(id, Phase.FAILED, "error", error=error))
        self._release_models()
        return tuple(events)

    def _release_models(self) -> None:
        if self._speculator is not None:
            self._speculator.close()
        self._model.close()

    # --- what can be seen from outside -------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return len(self._table.running)

    @property
    def num_waiting(self) -> int:
        """Waiting requests, those that no step has seen yet included."""
        return len(self._inbox) - len(self._table.running)

    @property
    def num_free_blocks(self) -> int:
        return self._kv.num_free

    @property
    def num_used_blocks(self) -> int:
        """KV blocks that live requests hold."""
        return self._kv.num_blocks - self._kv.num_free - self._kv.num_idle

    @property
    def num_idle_blocks(self) -> int:
        return self._kv.num_idle

    @property
    def last_step(self) -> StepStats:
        """Counts of the last step; zeros before the first."""
        return self._last_step

    @property
    def totals(self) -> EngineTotals:
        """Counts since the engine was made."""
        if self._speculator is None:
            return self._totals
        return replace(self._totals, speculation=self._speculator.totals)

    def clear_cache(self) -> int:
        """Forget every cached prefix that no request uses; returns how many blocks became free."""
        return self._kv.clear_cache()

    def check_integrity(self) -> None:
        """Recompute what must hold of and between the parts.

        Raises:
            InvariantViolation: a bug in this project.
        """
        self._table.check_integrity()
        self._kv.check_integrity()
        running = frozenset([state.id for state in self._table.running])
        if self._kv.live_ids() != running:
            raise InvariantViolation(
                f"running: {sorted(running)}; with blocks: {sorted(self._kv.live_ids())}"
            )
        if self._speculator is not None:
            self._speculator.check_integrity(running)

    def _record(
        self,
        plan: StepPlan,
        states: Sequence[RequestState],
        decisions: Sequence[RowDecision],
        num_drafts: int,
        seconds: float,
    ) -> None:
        prefill = [
            min(row.end, state.num_prompt_tokens) - row.start
            for row, state in zip(plan.rows, states, strict=True)
            if row.start < state.num_prompt_tokens
        ]
        num_hit_blocks = sum([len(admission.hit_block_ids) for admission in plan.admits])
        self._last_step = StepStats(
            num_tokens=sum([row.count for row in plan.rows]) + num_drafts,
            num_rows=len(plan.rows),
            num_prefill_tokens=sum(prefill),
            num_output_tokens=sum([len(decision.new_token_ids) for decision in decisions]),
            num_drafts=num_drafts,
            num_accepted=sum([decision.num_accepted for decision in decisions]),
            num_cached_tokens=num_hit_blocks * self._config.block_size,
            num_preemptions=len(plan.preempts),
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            num_free_blocks=self._kv.num_free,
            num_idle_blocks=self._kv.num_idle,
        )
        self._totals = self._totals.with_step(self._last_step, seconds)


def _tokens_out(state: RequestState, outcome: RowOutcome) -> TokensOut:
    decision = outcome.decision
    return TokensOut(
        decision.id, decision.new_token_ids, outcome.text, decision.logprobs, state.num_cached_tokens or 0
    )
