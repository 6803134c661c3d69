"""Stop rules: what ends a request, with which reason, and which text is shown."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mvllm.core.batch.sampling_row import SamplingRow
from mvllm.core.engine.decisions import RowOutcome, decide
from mvllm.core.engine.intake import start_text
from mvllm.core.engine.request_table import RequestState, RequestTable
from mvllm.core.request import Logprob, Request, SamplingParams, TokenLogprobs
from mvllm.core.step import PlannedRow, RowDecision, RowStatus, StepOutput
from mvllm.core.types import RequestId
from tests.models.toy_text import PIECES, ToyDecoder

PROMPT = (0, 1)
TOKEN = {piece: token for token, piece in enumerate(PIECES)}
A, B, AB, SPACE = TOKEN[b"a"], TOKEN[b"b"], TOKEN[b"ab"], TOKEN[b" "]
HALF, OTHER_HALF = TOKEN[b"\xc3"], TOKEN[b"\xa9"]


def running(*, eos: tuple[int, ...] = (), **params: Any) -> tuple[RequestTable, RequestState]:
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **params})
    request = Request(RequestId("r"), PROMPT, sampling, 0, sampling.max_tokens or 1, frozenset(eos))
    table = RequestTable()
    text = start_text(request, lambda params: ToyDecoder())
    state = table.add(request, SamplingRow.of(request), text)
    table.admit(request.id, 0)
    return table, state


def step_output(token: int, status: RowStatus = RowStatus.OK) -> StepOutput:
    return StepOutput(
        tokens=np.array([token], np.int32),
        status=np.array([status], np.int32),
        logprob=np.array([-0.5], np.float32),
        rank=np.array([2], np.int32),
        target_logprob=np.zeros(1, np.float32),
        top_tokens=np.array([[4, token, -1]], np.int32),
        top_logprobs=np.array([[-0.25, -0.5, 0.0]], np.float32),
    )


def next_outcome(state: RequestState, token: int, status: RowStatus = RowStatus.OK) -> RowOutcome:
    row = PlannedRow(state.id, state.num_computed, len(state.token_ids) - state.num_computed)
    (outcome,) = decide([row], [state], [()], step_output(token, status))
    return outcome


def generate(tokens: list[int], **params: Any) -> tuple[list[str], RowOutcome]:
    """Feed tokens until one ends the request; the texts shown and the last outcome."""
    table, state = running(**params)
    texts = []
    for token in tokens:
        outcome = next_outcome(state, token)
        texts.append(outcome.text)
        if outcome.decision.finish_reason is not None:
            texts.append(outcome.tail)
            return texts, outcome
        table.commit(outcome.decision, outcome.text_after)
    return texts, outcome


def test_a_chunk_short_of_the_last_token_only_moves_the_computed_count() -> None:
    _, state = running()
    (outcome,) = decide([PlannedRow(state.id, 0, 1)], [state], [()], step_output(A))
    assert outcome.decision == RowDecision(RequestId("r"), 1)


def test_a_token_moves_the_computed_count_to_the_end_of_what_was_known_before_it() -> None:
    """K3: the newest token is not in the cache."""
    _, state = running()
    assert next_outcome(state, A).decision == RowDecision(RequestId("r"), 2, (A,))


def test_the_length_limit_ends_by_length() -> None:
    texts, outcome = generate([A, B], max_tokens=2)
    assert texts == ["a", "b", ""]
    assert (outcome.decision.finish_reason, outcome.decision.stop_reason) == ("length", None)


@pytest.mark.parametrize(("include", "shown"), [(False, "a"), (True, "ab")])
def test_the_text_of_an_ending_token_is_left_out_unless_asked_for(include: bool, shown: str) -> None:
    """REQUIREMENTS G3."""
    texts, outcome = generate([A, B], stop_token_ids=(B,), include_stop_str_in_output=include)
    assert "".join(texts) == shown
    assert outcome.decision.new_token_ids == (B,)
    assert (outcome.decision.finish_reason, outcome.decision.stop_reason) == ("stop", B)


def test_end_of_sequence_goes_before_an_equal_stop_token() -> None:
    _, outcome = generate([B], eos=(B,), stop_token_ids=(B,))
    assert (outcome.decision.finish_reason, outcome.decision.stop_reason) == ("stop", None)


def test_a_stop_string_over_several_tokens_shows_nothing_of_itself() -> None:
    """REQUIREMENTS G1, L8."""
    texts, outcome = generate([A, B, SPACE, AB, A], stop=["b a"])
    assert texts == ["a", "", "", "", ""]
    assert (outcome.decision.finish_reason, outcome.decision.stop_reason) == ("stop", "b a")


def test_a_stop_string_that_completes_at_the_length_limit_is_the_reason() -> None:
    _, outcome = generate([A, B], stop=["ab"], max_tokens=2)
    assert (outcome.decision.finish_reason, outcome.decision.stop_reason) == ("stop", "ab")


def test_text_held_back_for_a_stop_string_is_shown_when_the_length_ends_the_request() -> None:
    texts, outcome = generate([A, B], stop=["b a"], max_tokens=2)
    assert (texts, outcome.tail) == (["a", "", "b"], "b")


def test_text_held_back_is_shown_when_end_of_sequence_ends_the_request() -> None:
    texts, _ = generate([A, B, SPACE], stop=["b a"], eos=(SPACE,))
    assert "".join(texts) == "ab"


def test_half_a_character_waits_for_its_other_half_and_becomes_a_replacement_character_at_the_end() -> None:
    """REQUIREMENTS H1."""
    assert generate([HALF, OTHER_HALF, A])[0] == ["", "é", "a"]
    assert generate([A, HALF], max_tokens=2)[0] == ["a", "", "\ufffd"]


def test_stop_strings_do_not_count_up_to_min_tokens() -> None:
    texts, outcome = generate([A, B, A, B], stop=["b"], min_tokens=2)
    assert "".join(texts) == "aba"
    assert outcome.decision.stop_reason == "b"


@pytest.mark.parametrize(
    ("status", "message"),
    [(RowStatus.NAN, "not a number"), (RowStatus.INFINITE, "infinite"), (RowStatus.EMPTY, "banned")],
)
def test_a_bad_status_fails_the_row_and_keeps_nothing_of_the_step(status: RowStatus, message: str) -> None:
    """L6."""
    _, state = running()
    decision = next_outcome(state, A, status).decision
    assert (decision.num_computed, decision.new_token_ids, decision.finish_reason) == (0, (), "error")
    assert message in (decision.error or "")


def test_logprobs_name_the_chosen_token_first_and_then_the_most_likely_ones() -> None:
    _, state = running(logprobs=3)
    (entry,) = next_outcome(state, A).decision.logprobs
    assert entry == TokenLogprobs(A, {A: Logprob(-0.5, 2), 4: Logprob(-0.25, 1)})
    assert list(entry.by_token) == [A, 4]


@pytest.mark.parametrize(("asked", "tokens"), [(None, None), (0, [A]), (1, [A, 4])])
def test_as_many_logprobs_as_asked_for(asked: int | None, tokens: list[int] | None) -> None:
    _, state = running(logprobs=asked)
    logprobs = next_outcome(state, A).decision.logprobs
    assert [list(entry.by_token) for entry in logprobs] == ([tokens] if tokens else [])


def test_deciding_changes_nothing() -> None:
    _, state = running(stop=["ab"])
    before = (list(state.token_ids), state.num_computed, state.text)
    assert next_outcome(state, A) == next_outcome(state, A)
    assert (list(state.token_ids), state.num_computed, state.text) == before


# --- drafts ----------------------------------------------------------------------------------------------


def decide_block(
    state: RequestState, drafts: tuple[int, ...], chosen: list[int], statuses: list[RowStatus] | None = None
) -> RowOutcome:
    """One step in which the target chose `chosen`: after the last token, and after each draft."""
    count = len(chosen)
    output = StepOutput(
        tokens=np.array(chosen, np.int32),
        status=np.array(statuses or [RowStatus.OK] * count, np.int32),
        logprob=np.arange(count, dtype=np.float32),
        rank=np.arange(1, count + 1, dtype=np.int32),
        target_logprob=np.zeros(count, np.float32),
        top_tokens=np.zeros((count, 0), np.int32),
        top_logprobs=np.zeros((count, 0), np.float32),
    )
    row = PlannedRow(state.id, state.num_computed, len(state.token_ids) - state.num_computed, len(drafts))
    (outcome,) = decide([row], [state], [drafts], output)
    return outcome


def kept(outcome: RowOutcome) -> tuple[tuple[int, ...], int, int, int]:
    """Tokens, computed positions, drafts computed and accepted."""
    decision = outcome.decision
    return decision.new_token_ids, decision.num_computed, decision.num_drafts, decision.num_accepted


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ([A, B, AB, A], ((A, B, AB, A), 5, 3, 3)),  # all, and one more
        ([A, B, SPACE, A], ((A, B, SPACE), 4, 3, 2)),  # up to the target's own choice
        ([B, B, AB, A], ((B,), 2, 3, 0)),  # equal ones past the first mismatch don't count
    ],
)
def test_accepted_drafts_are_followed_by_one_token_of_the_target(
    chosen: list[int], expected: tuple[object, ...]
) -> None:
    """V1; c(r) ends before the newest token (K3, K5)."""
    _, state = running()
    assert kept(decide_block(state, (A, B, AB), chosen)) == expected


def test_drafts_of_several_rows_are_matched_with_their_own_logit_rows() -> None:
    table, first = running()
    request = Request(RequestId("second"), PROMPT, SamplingParams(), 0, 8)
    second = table.add(request, SamplingRow.of(request), None)
    table.admit(request.id, 0)
    rows = [PlannedRow(state.id, 0, 2, 2) for state in (first, second)]
    output = StepOutput(
        *(np.array([A, B, A, SPACE], np.int32), np.zeros(4, np.int32)),
        *(np.zeros(4, np.float32), np.zeros(4, np.int32), np.zeros(4, np.float32)),
        *(np.zeros((4, 0), np.int32), np.zeros((4, 0), np.float32)),
    )
    outcomes = decide(rows, [first, second], [(A,), (A,)], output)
    assert [kept(outcome) for outcome in outcomes] == [((A, B), 3, 1, 1), ((A, SPACE), 3, 1, 1)]


@pytest.mark.parametrize(
    ("params", "tokens", "reason", "stop_reason"),
    [
        ({"eos": (B,)}, (A, B), "stop", None),
        ({"stop_token_ids": (B,)}, (A, B), "stop", B),
        ({"max_tokens": 2}, (A, B), "length", None),
        ({"stop": ["b "]}, (A, B, SPACE), "stop", "b "),
        ({"eos": (B,), "min_tokens": 3, "stop": ["a"]}, (A, B), "stop", None),
    ],
)
def test_whatever_ends_a_request_ends_it_inside_accepted_drafts(
    params: dict[str, Any], tokens: tuple[int, ...], reason: str, stop_reason: object
) -> None:
    """V5: the drafts after it leave no trace, though the target agrees with them."""
    _, state = running(**params)
    outcome = decide_block(state, (A, B, SPACE, A), [A, B, SPACE, A, B])
    assert kept(outcome) == (tokens, 1 + len(tokens), 4, len(tokens))
    assert (outcome.decision.finish_reason, outcome.decision.stop_reason) == (reason, stop_reason)


def test_the_text_of_accepted_drafts_is_that_of_one_token_after_the_other() -> None:
    """L8: a stop string over accepted drafts shows nothing of itself; half a character waits."""
    _, state = running(stop=["b a"])
    outcome = decide_block(state, (A, HALF, OTHER_HALF, B, SPACE), [A, HALF, OTHER_HALF, B, SPACE, AB])
    assert (outcome.text, outcome.tail) == ("aé", "")
    assert outcome.decision.stop_reason == "b a"


def test_each_accepted_token_has_its_own_logprobs() -> None:
    """REQUIREMENTS L5."""
    _, state = running(logprobs=0)
    entries = decide_block(state, (A, B), [A, B, AB]).decision.logprobs
    assert [entry.by_token for entry in entries] == [
        {A: Logprob(0.0, 1)},
        {B: Logprob(1.0, 2)},
        {AB: Logprob(2.0, 3)},
    ]


def test_bad_logits_past_the_first_mismatch_do_not_exist() -> None:
    """L6: without speculation nobody would have computed them."""
    _, state = running()
    statuses = [RowStatus.OK, RowStatus.OK, RowStatus.NAN]
    outcome = decide_block(state, (A, AB), [A, B, A], statuses)
    assert kept(outcome) == ((A, B), 3, 2, 1)
    assert outcome.decision.error is None


def test_bad_logits_after_an_accepted_draft_end_the_step_before_them() -> None:
    """L6: the tokens up to there stand; the next step meets the same logits first and fails there."""
    table, state = running()
    outcome = decide_block(state, (A, B), [A, 0, 0], [RowStatus.OK, RowStatus.NAN, RowStatus.OK])
    assert kept(outcome) == ((A,), 2, 2, 1)
    assert outcome.decision.finish_reason is None
    table.commit(outcome.decision, outcome.text_after)
    assert next_outcome(state, 0, RowStatus.NAN).decision.finish_reason == "error"


def test_text_that_can_not_be_decoded_ends_the_step_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """L6."""
    _, state = running()
    advance = ToyDecoder.advance

    def failing(self: ToyDecoder, decoder_state: bytes, token: int) -> tuple[bytes, str]:
        if token == B:
            raise ValueError("broken vocabulary")
        return advance(self, decoder_state, token)

    monkeypatch.setattr(ToyDecoder, "advance", failing)
    outcome = decide_block(state, (A, B), [A, B, A])
    assert (kept(outcome), outcome.text) == (((A,), 2, 2, 1), "a")
    assert decide_block(state, (B,), [B, A]).decision.error == "ValueError: broken vocabulary"
