"""What becomes of each planned row: which tokens it gets and whether it ends. Pure.

As in vLLM, a token may end a request by itself (end of sequence, then stop tokens, then the length limit),
and a stop string that its text completes overrides that reason. A token that ends a request counts as
output, but its text is left out unless asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mvllm.core.engine.request_table import RequestState
from mvllm.core.engine.request_text import RequestText
from mvllm.core.request import FinishReason, Logprob, Request, TokenLogprobs
from mvllm.core.spec.verifier import accepted_length
from mvllm.core.step import PlannedRow, RowDecision, RowStatus, StepOutput
from mvllm.core.types import TokenId

Drafts = Sequence[tuple[TokenId, ...]]
"""Drafted tokens of each row of a step; () for rows without any."""

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
    rows: Sequence[PlannedRow], states: Sequence[RequestState], drafts: Drafts, output: StepOutput
) -> list[RowOutcome]:
    """One outcome per planned row; states[i] and drafts[i] belong to rows[i] and are as they were when the
    batch was packed. A row that reached its last token has a logit row there and one at each draft.

    An exception in one row's decision fails that row only (INVARIANTS L6).
    """
    results = _Results(output.tokens.tolist(), output.status.tolist(), output)
    outcomes = []
    logit_row = 0
    for row, state, row_drafts in zip(rows, states, drafts, strict=True):
        if row.end < len(state.token_ids):
            outcomes.append(RowOutcome(RowDecision(row.id, row.end), text_after=state.text))
            continue
        if row_drafts:
            outcomes.append(_decide_drafts(row, state, row_drafts, results, logit_row))
        else:
            outcomes.append(_decide_token(row, state, results, logit_row))
        logit_row += 1 + len(row_drafts)
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


class _Results(NamedTuple):
    """A `StepOutput`, its short columns as lists, which are quicker to read one by one."""

    tokens: list[TokenId]
    statuses: list[int]
    output: StepOutput


def _decide_token(row: PlannedRow, state: RequestState, results: _Results, logit_row: int) -> RowOutcome:
    """Outcome of a row that drew one token."""
    try:
        entries, step = _next_token(state, 0, state.text, results, logit_row)
    except Exception as error:
        return failed(row, _message(error))
    token = results.tokens[logit_row]
    decision = RowDecision(row.id, row.end, (token,), 0, 0, entries, step.finish_reason, step.stop_reason)
    return RowOutcome(decision, step.text, step.tail, step.text_after)


def _decide_drafts(
    row: PlannedRow, state: RequestState, drafts: Sequence[TokenId], results: _Results, first: int
) -> RowOutcome:
    """Outcome of a row whose logit rows begin at `first`: the drafts that stand, and one more token.

    The token that ends the request is the last one. So is the last one before a token that can't be had,
    for bad logits or text that can't be decoded: the next step meets that one again, with nothing before
    it, and fails there as it would have without drafts.
    """
    num_standing = accepted_length(drafts, results.tokens[first : first + len(drafts)])
    token_ids: list[TokenId] = []
    logprobs: list[TokenLogprobs] = []
    text = ""
    step = TokenOutcome("", "", state.text)
    for logit_row in range(first, first + num_standing + 1):
        try:
            entries, step = _next_token(state, len(token_ids), step.text_after, results, logit_row)
        except Exception as error:
            if not token_ids:
                return failed(row, _message(error))
            break
        token_ids.append(results.tokens[logit_row])
        logprobs += entries
        text += step.text
        if step.finish_reason is not None:
            break
    decision = RowDecision(
        row.id,
        row.end + len(token_ids) - 1,
        tuple(token_ids),
        num_drafts=len(drafts),
        num_accepted=min(num_standing, len(token_ids)),
        logprobs=tuple(logprobs),
        finish_reason=step.finish_reason,
        stop_reason=step.stop_reason,
    )
    return RowOutcome(decision, text, step.tail, step.text_after)


def _next_token(
    state: RequestState, num_new: int, text: RequestText | None, results: _Results, logit_row: int
) -> tuple[tuple[TokenLogprobs, ...], TokenOutcome]:
    """Logprobs and outcome of the token drawn at `logit_row`, after `num_new` tokens of the same step."""
    if results.statuses[logit_row] != RowStatus.OK:
        raise _UnusableLogits(_STATUS_MESSAGES[RowStatus(results.statuses[logit_row])])
    token = results.tokens[logit_row]
    entries = _logprobs(state, results.output, logit_row, token)
    return entries, add_token(state.request, state.num_output_tokens + num_new + 1, token, text)


class _UnusableLogits(Exception):
    """The message says what is wrong with a logit row."""


def _message(error: Exception) -> str:
    return str(error) if isinstance(error, _UnusableLogits) else f"{type(error).__name__}: {error}"


class TokenOutcome(NamedTuple):
    """What one more token does to a request."""

    text: str  # newly certain
    tail: str  # held back until the request ended
    text_after: RequestText | None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


def add_token(request: Request, num_output: int, token: TokenId, text: RequestText | None) -> TokenOutcome:
    """Stop rules for an output of `num_output` tokens with `token` as its last; `text` is that before it."""
    reason, stop_reason = token_end(request, token, num_output)
    shown, tail, matched = "", "", None
    if text is not None:
        # As in vLLM, a stop string counts only once there are more than min_tokens tokens.
        search = request.params.min_tokens == 0 or num_output > request.params.min_tokens
        if reason != "stop" or request.params.include_stop_str_in_output:
            step = text.advance(token, search=search)
            shown, text, matched = step.text, step.after, step.matched_stop
        if reason is not None and matched is None:
            tail, matched = text.finish(search=search)
    if matched is not None:
        reason, stop_reason = "stop", matched
    return TokenOutcome(shown, tail, text, reason, stop_reason)


def _logprobs(
    state: RequestState, output: StepOutput, logit_row: int, token: TokenId
) -> tuple[TokenLogprobs, ...]:
    """Chosen token first, then the `num_logprobs` most likely ones; empty if none were asked for."""
    wanted = state.sampling.row.num_logprobs
    if wanted < 0:
        return ()
    by_token = {token: Logprob(float(output.logprob[logit_row]), int(output.rank[logit_row]))}
    top = output.top_tokens[logit_row, :wanted].tolist()
    values = output.top_logprobs[logit_row, :wanted].tolist()
    for rank, (other, logprob) in enumerate(zip(top, values, strict=True), start=1):
        if other >= 0:  # -1 fills up a vocabulary smaller than what was asked for
            by_token.setdefault(other, Logprob(logprob, rank))
    return (TokenLogprobs(token, by_token),)
