"""`RequestTable`: the live requests, their progress and their phase."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from mvllm.core.batch.row_sampling import RowSampling
from mvllm.core.batch.sampling_row import SamplingRow
from mvllm.core.batch.token_counts import TokenCounts
from mvllm.core.engine.request_text import RequestText
from mvllm.core.errors import InvariantViolation
from mvllm.core.request import Phase, Request
from mvllm.core.step import RowDecision
from mvllm.core.types import RequestId, TokenId

_BY_AGE = attrgetter("arrival")


@dataclass(slots=True, eq=False)
class RequestState:
    """One live request. `RequestTable` alone writes it; everyone else reads."""

    request: Request
    arrival: int  # position in the order of submission
    sampling: RowSampling  # with the counts of its tokens so far, if it has penalties
    token_ids: list[TokenId]  # prompt and output
    waiting_token_ids: tuple[TokenId, ...]  # the tokens it waits with; of no meaning while it runs
    text: RequestText | None
    phase: Phase = Phase.WAITING
    num_computed: int = 0
    num_cached_tokens: int | None = None  # of the first admission; None before it
    num_preemptions: int = 0

    @property
    def id(self) -> RequestId:
        return self.request.id

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_token_ids)


class RequestTable:
    """Owns the state of every live request; does not own KV blocks, plan or speak to callers.

    A request that reaches a terminal phase leaves the table, so memory does not grow with the requests
    served. Every method that raises leaves the table as it was.
    """

    def __init__(self) -> None:
        self._live: dict[RequestId, RequestState] = {}
        self._waiting: list[RequestState] = []  # by age
        self._running: list[RequestState] = []  # by age
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[RequestState]:
        """Live requests in order of submission."""
        return iter(self._live.values())

    @property
    def waiting(self) -> Sequence[RequestState]:
        """Oldest first. A view: do not keep it over a change."""
        return self._waiting

    @property
    def running(self) -> Sequence[RequestState]:
        """Oldest first. A view: do not keep it over a change."""
        return self._running

    def get(self, id: RequestId) -> RequestState | None:
        return self._live.get(id)

    def add(self, request: Request, sampling: SamplingRow, text: RequestText | None) -> RequestState:
        """SUBMITTED -> WAITING, as the youngest.

        Raises:
            InvariantViolation: the id is live already.
        """
        if request.id in self._live:
            raise InvariantViolation(f"request {request.id!r} is live already")
        state = RequestState(
            request=request,
            arrival=self._arrivals,
            sampling=RowSampling(
                sampling,
                TokenCounts(request.prompt_token_ids) if sampling.has_penalties else None,
                len(request.prompt_token_ids),
            ),
            token_ids=list(request.prompt_token_ids),
            waiting_token_ids=request.prompt_token_ids,
            text=text,
        )
        self._arrivals += 1
        self._live[request.id] = state
        self._waiting.append(state)
        return state

    def admit(self, id: RequestId, num_cached_tokens: int) -> None:
        """WAITING -> RUNNING with the KV of `num_cached_tokens` positions in the cache already.

        Raises:
            InvariantViolation: the request does not wait, or no token would be left to compute.
        """
        state = self._in_phase(id, Phase.WAITING)
        if not 0 <= num_cached_tokens < len(state.token_ids):
            raise InvariantViolation(
                f"request {id!r} has {len(state.token_ids)} tokens, admitted with {num_cached_tokens} cached"
            )
        self._move(state, self._waiting, self._running, Phase.RUNNING)
        state.num_computed = num_cached_tokens
        if state.num_cached_tokens is None:
            state.num_cached_tokens = min(num_cached_tokens, state.num_prompt_tokens)

    def preempt(self, id: RequestId) -> None:
        """RUNNING -> WAITING; its tokens stay, its KV is to be computed anew.

        Raises:
            InvariantViolation: the request does not run.
        """
        state = self._in_phase(id, Phase.RUNNING)
        self._move(state, self._running, self._waiting, Phase.WAITING)
        state.waiting_token_ids = tuple(state.token_ids)
        state.num_computed = 0
        state.num_preemptions += 1

    def commit(self, decision: RowDecision, text: RequestText | None) -> RequestState:
        """Record what a step computed and chose for a running request.

        Raises:
            InvariantViolation: the request does not run, goes back, claims KV of its newest token (which
                is never in the cache), or exceeds its limit.
        """
        state = self._in_phase(decision.id, Phase.RUNNING)
        num_tokens = len(state.token_ids) + len(decision.new_token_ids)
        if not state.num_computed <= decision.num_computed < num_tokens:
            raise InvariantViolation(
                f"request {decision.id!r} with {num_tokens} tokens goes from {state.num_computed} computed "
                f"positions to {decision.num_computed}"
            )
        if num_tokens > state.request.total_limit:
            raise InvariantViolation(
                f"request {decision.id!r} has {num_tokens} tokens; its limit is {state.request.total_limit}"
            )
        state.num_computed = decision.num_computed
        state.token_ids.extend(decision.new_token_ids)
        state.text = text
        if state.sampling.counts is not None:
            state.sampling.counts.add_output(decision.new_token_ids)
        return state

    def finish(self, id: RequestId, phase: Phase) -> RequestState:
        """Move a live request to a terminal phase and out of the table; returns its last state.

        Raises:
            InvariantViolation: the request is not live, the phase is not terminal, or a waiting request
                is said to have finished.
        """
        state = self._live.get(id)
        if state is None or not phase.terminal or (phase is Phase.FINISHED and state.phase is Phase.WAITING):
            found = "not live" if state is None else state.phase.value
            raise InvariantViolation(f"request {id!r} is {found}; it can't become {phase.value}")
        queue = self._waiting if state.phase is Phase.WAITING else self._running
        del queue[bisect_left(queue, state.arrival, key=_BY_AGE)]
        del self._live[id]
        state.phase = phase
        return state

    def check_integrity(self) -> None:
        """Recompute what must hold from scratch.

        Raises:
            InvariantViolation: the queues and the table disagree, or a request's numbers do.
        """
        for queue, phase in ((self._waiting, Phase.WAITING), (self._running, Phase.RUNNING)):
            expected = [state for state in self._live.values() if state.phase is phase]
            if queue != expected:
                raise InvariantViolation(
                    f"{phase.value}: queue holds {[state.id for state in queue]}, "
                    f"phases say {[state.id for state in expected]}"
                )
        for state in self._live.values():
            self._check_state(state)

    @staticmethod
    def _check_state(state: RequestState) -> None:
        num_tokens = len(state.token_ids)
        output = state.token_ids[state.num_prompt_tokens :]
        ok = state.num_computed < num_tokens <= state.request.total_limit
        ok = ok and state.num_output_tokens < state.request.max_tokens
        ok = ok and (state.phase is Phase.RUNNING or state.num_computed == 0)
        ok = ok and tuple(state.token_ids[: state.num_prompt_tokens]) == state.request.prompt_token_ids
        counts = state.sampling.counts
        ok = ok and (counts is None or counts.matches(state.request.prompt_token_ids, output))
        if not ok:
            raise InvariantViolation(f"the state of request {state.id!r} is inconsistent: {state}")

    def _in_phase(self, id: RequestId, phase: Phase) -> RequestState:
        state = self._live.get(id)
        if state is None or state.phase is not phase:
            found = "not live" if state is None else state.phase.value
            raise InvariantViolation(f"request {id!r} is {found}; expected {phase.value}")
        return state

    @staticmethod
    def _move(
        state: RequestState, source: list[RequestState], target: list[RequestState], phase: Phase
    ) -> None:
        del source[bisect_left(source, state.arrival, key=_BY_AGE)]
        insort(target, state, key=_BY_AGE)
        state.phase = phase
