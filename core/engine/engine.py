"""The engine: requests in, one step at a time, events out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mvllm.core.config import ResolvedConfig
from mvllm.core.engine.batcher import Batcher
from mvllm.core.engine.decisions import RowOutcome
from mvllm.core.engine.forward import ForwardRunner
from mvllm.core.engine.inbox import Inbox, Submit
from mvllm.core.engine.intake import check_request, start_text
from mvllm.core.engine.request_table import RequestState, RequestTable
from mvllm.core.engine.request_text import TextDecoderFor
from mvllm.core.engine.sampling_row import SamplingRow
from mvllm.core.engine.statistics import IDLE_STEP, EngineTotals
from mvllm.core.engine.view import scheduler_view
from mvllm.core.errors import EngineClosed, InvariantViolation
from mvllm.core.kv.kv_manager import KvManager
from mvllm.core.request import FinishReason, Phase, Request
from mvllm.core.sched.scheduler import Scheduler
from mvllm.core.step import (
    Event,
    Finished,
    KvCommit,
    KvGrant,
    StepPlan,
    StepStats,
    TokensOut,
)
from mvllm.core.tensor import Model
from mvllm.core.types import RequestId


class Engine:
    """Runs requests on a model, all of them together, one step per call.

    Owns the request table, the KV manager, the scheduler and the model; does not own threads, tokenizers or
    callers. `submit` and `cancel` may be called from any thread: they only leave a command, which the
    next step boundary applies. Everything else belongs to the one thread that calls `step`.

    Args:
        model: loaded with a KV pool of `config`'s shape; closed with the engine.
        config: complete settings.
        vocab_size: token ids are checked against it.
        text: makes the text decoder of a request; None: events carry token ids only, and stop strings
            are refused.
        clock: seconds, monotonic; read for `totals` alone, no decision depends on it.
    """

    def __init__(
        self,
        model: Model,
        config: ResolvedConfig,
        *,
        vocab_size: int,
        text: TextDecoderFor | None = None,
        clock: Callable[[], float],
    ) -> None:
        self._model = model
        self._config = config
        self._vocab_size = vocab_size
        self._text = text
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
        )
        self._forward = ForwardRunner(model, self._kv, Batcher(config.block_size))
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
        events: list[Event] = []
        self._apply_commands(events)
        plan = self._scheduler.plan(scheduler_view(self._table, self._kv, self._config.max_num_seqs))
        states, grant = self._begin(plan)
        outcomes, broken = self._forward.run(plan.rows, states, grant)
        self._apply_commands(events)  # a cancel that came during the forward still counts
        num_output_tokens = self._commit(outcomes, events)
        self._record(plan, states, num_output_tokens, self._clock() - started)
        if broken is not None:
            events += self._shut_down(f"every row of a step failed: {type(broken).__name__}: {broken}")
        elif self._config.check_integrity:
            self.check_integrity()
        return tuple(events)

    def _apply_commands(self, events: list[Event]) -> None:
        for command in self._inbox.take():
            if isinstance(command, Submit):
                self._table.add(command.request, command.sampling, command.text)
            elif self._table.get(command.id) is not None:
                events.append(self._end(command.id, Phase.CANCELLED, "cancelled"))

    def _begin(self, plan: StepPlan) -> tuple[list[RequestState], KvGrant]:
        """Give out the plan's blocks, then record its preempts and admits; all-or-nothing."""
        states = [self._state(row.id) for row in plan.rows]
        salts = {state.id: state.request.params.cache_salt for state in states}
        grant = self._kv.grant(plan, salts)
        for id in plan.preempts:
            self._table.preempt(id)
        for admission in plan.admits:
            self._table.admit(admission.id, len(admission.hit_block_ids) * self._config.block_size)
        return states, grant

    def _commit(self, outcomes: Sequence[RowOutcome], events: list[Event]) -> int:
        """Make the step's results the state, and tell the world; returns the number of new tokens."""
        commits: list[KvCommit] = []
        ended: list[RowOutcome] = []
        num_output_tokens = 0
        for outcome in outcomes:
            decision = outcome.decision
            if self._table.get(decision.id) is None:  # cancelled during the forward
                continue
            if decision.error is None:
                state = self._table.commit(decision, outcome.text_after)
                commits.append(KvCommit(decision.id, state.token_ids, decision.num_computed))
                if decision.new_token_ids:
                    num_output_tokens += len(decision.new_token_ids)
                    events.append(_tokens_out(state, outcome))
            if decision.finish_reason is not None:
                ended.append(outcome)
        self._kv.commit(commits)
        events += [self._finish(outcome) for outcome in ended]
        return num_output_tokens

    def _finish(self, outcome: RowOutcome) -> Finished:
        """End a request as its row's decision says."""
        decision = outcome.decision
        assert decision.finish_reason is not None
        return self._end(
            decision.id,
            Phase.FINISHED if decision.error is None else Phase.FAILED,
            decision.finish_reason,
            stop_reason=decision.stop_reason,
            text=outcome.tail,
            error=decision.error,
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
        """Fail every live request and release the model. Idempotent; call it from the stepping thread.

        Returns:
            The terminal events of the requests that were still live.
        """
        return () if self._inbox.closed else self._shut_down("the engine was closed")

    def abort(self) -> None:
        """Release the model and leave the requests as they are: for an error in the middle of a change, when
        the state can't be trusted even for ending them."""
        self._inbox.close()
        self._model.close()

    def _shut_down(self, error: str) -> tuple[Event, ...]:
        self._inbox.close()
        events: list[Event] = []
        self._apply_commands(events)
        for id in [state.id for state in self._table]:
            events.append(self._end(id, Phase.FAILED, "error", error=error))
        self._model.close()
        return tuple(events)

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
        return self._totals

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
        running = {state.id for state in self._table.running}
        if self._kv.live_ids() != running:
            raise InvariantViolation(
                f"running: {sorted(running)}; with blocks: {sorted(self._kv.live_ids())}"
            )

    def _record(
        self, plan: StepPlan, states: Sequence[RequestState], num_output_tokens: int, seconds: float
    ) -> None:
        prefill = [
            max(0, min(row.end, state.num_prompt_tokens) - row.start)
            for row, state in zip(plan.rows, states, strict=True)
        ]
        num_hit_blocks = sum([len(admission.hit_block_ids) for admission in plan.admits])
        self._last_step = StepStats(
            num_tokens=sum([row.count for row in plan.rows]),
            num_rows=len(plan.rows),
            num_prefill_tokens=sum(prefill),
            num_output_tokens=num_output_tokens,
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
