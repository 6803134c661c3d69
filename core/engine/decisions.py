"""What becomes of each planned row: which tokens it gets and whether it ends. Pure.

As in vLLM, a token may end a request by itself (end of sequence, then stop tokens, then the length limit),
and a stop string that its text completes overrides that reason. A token that ends a request counts as
output, but its text is left out unless asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mvllm.core.engine.request_table import RequestState
from mvllm.core.engine.request_text import RequestText
from mvllm.core.request import FinishReason, Logprob, Request, TokenLogprobs
from mvllm.core.step import PlannedRow, RowDecision, RowStatus, StepOutput
from mvllm.core.types import TokenId

_STATUS_MESSAGES = {
    RowStatus.NAN: "the model computed a logit that is not a number",
    RowStatus.INFINITE: "the model computed an infinite logit",
    RowStatus.EMPTY: "no token is left to choose from: every one is banned",
}


@dataclass(frozen=True, slots=True)
class RowOutcome:
    """A decision with what it does to the text of the request."""

    decision: RowDecision
    text: str = ""  # newly certain
    tail: str = ""  # held back until the request ended
    text_after: RequestText | None = None


def decide(
    rows: Sequence[PlannedRow], states: Sequence[RequestState], output: StepOutput
) -> list[RowOutcome]:
    """One outcome per planned row; states[i] belongs to rows[i] and is as it was when the batch was packed.

    An exception in one row's decision fails that row only (INVARIANTS L6).
    """
    tokens, statuses = output.tokens.tolist(), output.status.tolist()
    outcomes = []
    logit_row = 0
    for row, state in zip(rows, states, strict=True):
        if row.end < len(state.token_ids):
            outcomes.append(RowOutcome(RowDecision(row.id, row.end), text_after=state.text))
            continue
        if statuses[logit_row] != RowStatus.OK:
            outcomes.append(failed(row, _STATUS_MESSAGES[RowStatus(statuses[logit_row])]))
        else:
            try:
                logprobs = _logprobs(state, output, logit_row, tokens[logit_row])
                outcomes.append(_decide_token(row, state, tokens[logit_row], logprobs))
            except Exception as error:
                outcomes.append(failed(row, f"{type(error).__name__}: {error}"))
        logit_row += 1
    return outcomes


def failed(row: PlannedRow, message: str) -> RowOutcome:
    """The row's request ends in an error; nothing of the step is kept for it."""
    return RowOutcome(RowDecision(row.id, row.start, finish_reason="error", error=message))


def token_end(
    request: Request, token: TokenId, num_output: int
) -> tuple[FinishReason | None, int | str | None]:
    """Finish reason and stop reason that an output of `num_output` tokens with `token` as its last has,
    its text left aside; (None, None) if it goes on."""
    if token in request.eos_token_ids and not request.params.ignore_eos:
        return "stop", None
    if token in request.params.stop_token_ids:
        return "stop", token
    return ("length" if num_output == request.max_tokens else None), None


def _decide_token(
    row: PlannedRow, state: RequestState, token: TokenId, logprobs: tuple[TokenLogprobs, ...]
) -> RowOutcome:
    request = state.request
    num_output = state.num_output_tokens + 1
    reason, stop_reason = token_end(request, token, num_output)
    text, tail, after, matched = "", "", state.text, None
    if after is not None:
        # As in vLLM, a stop string counts only once there are more than min_tokens tokens.
        search = request.params.min_tokens == 0 or num_output > request.params.min_tokens
        if reason != "stop" or request.params.include_stop_str_in_output:
            step = after.advance(token, search=search)
            text, after, matched = step.text, step.after, step.matched_stop
        if reason is not None and matched is None:
            tail, matched = after.finish(search=search)
    if matched is not None:
        reason, stop_reason = "stop", matched
    decision = RowDecision(row.id, row.end, (token,), logprobs, reason, stop_reason)
    return RowOutcome(decision, text, tail, after)


def _logprobs(
    state: RequestState, output: StepOutput, logit_row: int, token: TokenId
) -> tuple[TokenLogprobs, ...]:
    """Chosen token first, then the `num_logprobs` most likely ones; empty if none were asked for."""
    wanted = state.sampling.num_logprobs
    if wanted < 0:
        return ()
    by_token = {token: Logprob(float(output.logprob[logit_row]), int(output.rank[logit_row]))}
    top = output.top_tokens[logit_row, :wanted].tolist()
    values = output.top_logprobs[logit_row, :wanted].tolist()
    for rank, (other, logprob) in enumerate(zip(top, values, strict=True), start=1):
        if other >= 0:  # -1 fills up a vocabulary smaller than what was asked for
            by_token.setdefault(other, Logprob(logprob, rank))
    return (TokenLogprobs(token, by_token),)
