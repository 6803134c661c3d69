"""Gathers the events of one prompt's siblings into what the caller gets back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from mvllm.core.request import (
    CompletionOutput,
    Logprob,
    Request,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
)
from mvllm.core.step import Event, Finished, TokensOut
from mvllm.core.types import RequestId, TokenId


@dataclass
class _Sibling:
    """What one sibling has produced so far."""

    index: int
    wants_logprobs: bool
    text: list[str] = field(default_factory=list)
    token_ids: list[TokenId] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finished: Finished | None = None

    def output(self) -> CompletionOutput:
        end = self.finished
        chosen = [entry.by_token[entry.token_id].logprob for entry in self.logprobs]
        return CompletionOutput(
            index=self.index,
            text="".join(self.text),
            token_ids=tuple(self.token_ids),
            finish_reason=end.reason if end else None,
            stop_reason=end.stop_reason if end else None,
            cumulative_logprob=sum(chosen) if self.wants_logprobs else None,
            logprobs=tuple(self.logprobs) if self.wants_logprobs else None,
            error=end.error if end else None,
        )


class OutputCollector:
    """Owns the growing output of one prompt. `token_bytes` spells tokens in logprobs, if given."""

    def __init__(
        self,
        group_id: str,
        prompt: str | None,
        requests: tuple[Request, ...],
        *,
        clock: Callable[[], float],
        token_bytes: Callable[[TokenId], bytes] | None = None,
    ) -> None:
        self.group_id = group_id
        self._prompt = prompt
        self._prompt_token_ids = requests[0].prompt_token_ids
        self._siblings: dict[RequestId, _Sibling] = {
            request.id: _Sibling(index, request.params.logprobs is not None)
            for index, request in enumerate(requests)
        }
        self._first_id = requests[0].id
        self._clock = clock
        self._start = clock()
        self._token_bytes = token_bytes
        self._num_cached_tokens = 0
        self._num_preemptions = 0
        self._first_token_time: float | None = None
        self._last_time = self._start

    @property
    def request_ids(self) -> tuple[RequestId, ...]:
        return tuple(self._siblings)

    @property
    def finished(self) -> bool:
        return all(sibling.finished for sibling in self._siblings.values())

    def index_of(self, id: RequestId) -> int:
        """Which of the `n` answers an event belongs to."""
        return self._siblings[id].index

    def apply(self, event: Event) -> None:
        """Add one event of one of the siblings."""
        sibling = self._siblings[event.id]
        self._last_time = self._clock()
        sibling.text.append(event.text)
        if isinstance(event, TokensOut):
            self._apply_tokens(sibling, event)
        else:
            sibling.finished = event
            self._num_preemptions += event.num_preemptions

    def cancel(self) -> None:
        """Record that every sibling without an end was cancelled: no event of it will come any more."""
        for id, sibling in self._siblings.items():
            if sibling.finished is None:
                sibling.finished = Finished(id, "cancelled")

    def _apply_tokens(self, sibling: _Sibling, event: TokensOut) -> None:
        sibling.token_ids.extend(event.token_ids)
        sibling.logprobs.extend(self._spell_tokens(entry) for entry in event.logprobs)
        if self._first_token_time is None and event.token_ids:
            self._first_token_time = self._last_time
        if event.id == self._first_id:
            self._num_cached_tokens = max(self._num_cached_tokens, event.num_cached_tokens)

    def _spell_tokens(self, entry: TokenLogprobs) -> TokenLogprobs:
        if self._token_bytes is None:
            return entry
        spelled: dict[TokenId, Logprob] = {}
        for token, value in entry.by_token.items():
            data = self._token_bytes(token)
            spelled[token] = replace(value, decoded_token=data.decode("utf-8", "replace"), token_bytes=data)
        return replace(entry, by_token=spelled)

    def output(self) -> RequestOutput:
        """Everything so far, as a value."""
        first = self._first_token_time
        return RequestOutput(
            request_id=self.group_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=tuple(sibling.output() for sibling in self._siblings.values()),
            finished=self.finished,
            num_cached_tokens=self._num_cached_tokens,
            metrics=RequestMetrics(
                time_to_first_token=None if first is None else first - self._start,
                total_time=self._last_time - self._start,
                num_preemptions=self._num_preemptions,
            ),
        )
