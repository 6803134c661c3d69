"""The engine by example, on the fake backend: ends, limits, failures, closing."""

from __future__ import annotations

from typing import Any

import pytest

from mvllm.backends.fake.model import Faults
from mvllm.core.engine.engine import Engine
from mvllm.core.engine.statistics import SpeculationTotals
from mvllm.core.errors import ConfigError, EngineClosed, RequestRejected
from mvllm.core.request import Request, SamplingParams
from mvllm.core.step import Finished, ForwardBatch, TokensOut
from mvllm.core.types import RequestId
from tests.models.drafters import FAULTS
from tests.models.naive_loop import naive_generate
from tests.models.toy_text import ToyDecoder
from tests.property.engine_harness import VOCAB_SIZE, Cancel, EngineHarness, Script, resolved_config
from tests.property.engine_speculation import Drafting


def harness(drafting: Drafting | None = None, **config: Any) -> EngineHarness:
    return EngineHarness(Script(resolved_config(**config), (), drafting))


def make_request(
    id: str = "r", prompt: tuple[int, ...] = (0, 1, 0), *, eos: tuple[int, ...] = (), **params: Any
) -> Request:
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 4, **params})
    return Request(RequestId(id), prompt, sampling, 7, sampling.max_tokens or 1, frozenset(eos))


def first_tokens(prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    return naive_generate(make_request(prompt=prompt, max_tokens=count), VOCAB_SIZE).token_ids


def finish(engine: EngineHarness, request: Request) -> Finished:
    engine.submit(request)
    engine.drain()
    engine.check_outputs()
    end = engine.heard[request.id].end
    assert end is not None
    return end


def test_one_new_token_ends_by_length_after_one_step_over_the_prompt() -> None:
    """L9: max_new = 1; the generated token is never cached (K3)."""
    engine = harness()
    assert finish(engine, make_request(max_tokens=1)) == Finished(RequestId("r"), "length")
    assert engine.model.num_steps == 1


def test_end_of_sequence_as_the_first_token_counts_as_output_and_shows_no_text() -> None:
    """L9, L8, REQUIREMENTS G3: stop_reason of end of sequence is None."""
    (token,) = first_tokens((0, 1, 0), 1)
    engine = harness()
    assert finish(engine, make_request(eos=(token,))) == Finished(RequestId("r"), "stop")
    heard = engine.heard[RequestId("r")]
    assert (heard.token_ids, heard.text) == ([token], "")


def test_ignore_eos_switches_off_every_end_of_sequence_but_no_stop_token() -> None:
    """REQUIREMENTS G4."""
    tokens = first_tokens((0, 1, 0), 4)
    ignoring = make_request(eos=tokens, ignore_eos=True)
    assert finish(harness(), ignoring).reason == "length"
    stopping = make_request(eos=tokens, ignore_eos=True, stop_token_ids=(tokens[1],))
    assert finish(harness(), stopping) == Finished(RequestId("r"), "stop", tokens[1])


def test_a_stop_token_takes_precedence_over_the_length_it_completes() -> None:
    """L8."""
    tokens = first_tokens((0, 1, 0), 4)
    last_only = next(token for token in reversed(tokens) if tokens.count(token) == 1)
    limit = tokens.index(last_only) + 1
    end = finish(harness(), make_request(stop_token_ids=(last_only,), max_tokens=limit))
    assert (end.reason, end.stop_reason) == ("stop", last_only)


def test_penalties_after_a_preemption_still_tell_prompt_from_output() -> None:
    """REQUIREMENTS D1: same tokens as in a pool that never preempts."""
    params: dict[str, Any] = {
        "presence_penalty": 1.5,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.5,
        "max_tokens": 12,
        "temperature": 1.0,
    }
    small = harness(block_size=2, num_kv_blocks=10, max_num_seqs=3)
    for index in range(3):
        small.submit(make_request(f"r{index}", (0, 1, index, 1, 0), **params))
    small.drain()
    small.check_outputs()
    assert small.engine.totals.num_preemptions > 0


def test_preemptions_are_counted_per_request_and_cached_tokens_are_those_of_the_first_admission() -> None:
    engine = harness(block_size=1, num_kv_blocks=8, max_num_seqs=2)
    engine.submit(make_request("old", (0, 1, 0), max_tokens=6))
    engine.submit(make_request("young", (1, 1, 1), max_tokens=6))
    engine.drain()
    young = engine.heard[RequestId("young")]
    assert young.end is not None and young.end.num_preemptions >= 1
    assert young.num_cached_tokens == 0


@pytest.mark.parametrize("length", [24, 30])
def test_a_prompt_longer_than_the_context_is_rejected_with_both_numbers(length: int) -> None:
    """REQUIREMENTS F1."""
    with pytest.raises(RequestRejected, match=rf"{length} tokens.*context of 24") as caught:
        harness(num_kv_blocks=50).engine.submit(make_request(prompt=(1,) * length))
    assert (caught.value.needed, caught.value.available) == (length + 1, 24)


def test_more_new_tokens_than_the_context_has_left_are_refused_with_the_largest_possible_number() -> None:
    """REQUIREMENTS F1: never clamped in silence."""
    with pytest.raises(RequestRejected, match="max_tokens to at most 4"):
        harness(num_kv_blocks=50).engine.submit(make_request(prompt=(1,) * 20, max_tokens=5))


def test_exactly_the_whole_pool_is_served_and_one_block_more_is_rejected() -> None:
    """S11, REQUIREMENTS E1: the engine lives and serves the others."""
    engine = harness(block_size=2, num_kv_blocks=5)
    with pytest.raises(RequestRejected) as caught:
        engine.engine.submit(make_request("large", (1,) * 8, max_tokens=4))
    assert (caught.value.needed, caught.value.available) == (6, 5)
    assert finish(engine, make_request("exact", (1,) * 8, max_tokens=3)).reason == "length"


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (make_request(prompt=(0, VOCAB_SIZE)), "the prompt has token id 12"),
        (make_request(prompt=(-1,)), "the prompt has token id -1"),
        (make_request(logit_bias={99: 1.0}), "logit_bias has token id 99"),
        (make_request(stop_token_ids=(99,)), "stop_token_ids has token id 99"),
        (make_request(eos=(99,)), "eos_token_ids has token id 99"),
        (make_request(n=2), "n=2"),
    ],
)
def test_what_no_step_could_digest_is_refused_at_submission(request_: Request, message: str) -> None:
    """REQUIREMENTS R4, J9."""
    with pytest.raises(ConfigError, match=message):
        harness().engine.submit(request_)


def test_an_empty_prompt_and_a_used_id_are_refused() -> None:
    """REQUIREMENTS R4."""
    engine = harness().engine
    with pytest.raises(RequestRejected, match="no tokens"):
        engine.submit(make_request(prompt=()))
    engine.submit(make_request("r"))
    with pytest.raises(ConfigError, match="'r' is in use"):
        engine.submit(make_request("r"))


def test_a_row_without_a_usable_logit_fails_alone() -> None:
    """L6."""
    engine = harness()
    engine.model.faults = Faults(nan_tokens=frozenset({9}))
    engine.submit(make_request("bad", (0, 9)))
    engine.submit(make_request("good", (0, 1), logit_bias={9: -100.0}))
    engine.drain()
    bad, good = engine.heard[RequestId("bad")].end, engine.heard[RequestId("good")].end
    assert bad is not None and good is not None
    assert bad.reason == "error" and "not a number" in (bad.error or "")
    assert good.reason == "length"
    engine.check_drained()


def test_a_failed_step_is_repeated_row_by_row_and_only_the_guilty_row_fails() -> None:
    """L6."""
    engine = harness()
    engine.model.faults = Faults(crash_tokens=frozenset({9}))
    engine.submit(make_request("good", (0, 1)))
    engine.submit(make_request("bad", (0, 9)))
    engine.step()
    assert engine.model.num_steps == 3
    bad = engine.heard[RequestId("bad")].end
    assert bad is not None and bad.reason == "error" and "InjectedFault" in (bad.error or "")
    assert len(engine.heard[RequestId("good")].token_ids) == 1


def test_if_every_row_fails_alone_too_all_requests_fail_and_the_engine_closes() -> None:
    """L6: no endless retry; waiting requests get their terminal event as well."""
    engine = harness(max_num_seqs=2)
    engine.model.faults = Faults(crash_if=lambda batch: True)
    for index in range(4):
        engine.submit(make_request(f"r{index}", (index, 1, 0)))
    events = engine.step()
    assert sorted(event.id for event in events) == ["r0", "r1", "r2", "r3"]
    assert all(isinstance(event, Finished) and event.reason == "error" for event in events)
    assert engine.model.num_steps == 3
    with pytest.raises(EngineClosed):
        engine.engine.step()
    with pytest.raises(EngineClosed):
        engine.engine.submit(make_request("late"))


def test_an_interrupt_in_the_forward_leaves_every_request_where_it_was() -> None:
    """L6: fresh blocks go back; the next step simply does the work."""
    engine = harness(block_size=1)
    engine.submit(make_request())
    engine.step()
    free = engine.engine.num_free_blocks

    def interrupt(batch: ForwardBatch) -> bool:
        raise KeyboardInterrupt

    engine.model.faults = Faults(crash_if=interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.engine.step()
    assert engine.engine.num_free_blocks == free
    engine.model.faults = Faults()
    engine.drain()
    engine.check_outputs()


def test_an_error_in_one_rows_text_fails_that_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """L6."""
    engine = harness()
    engine.submit(make_request("good", (0, 1)))
    engine.submit(make_request("bad", (0, 0)))
    bad_first = first_tokens((0, 0), 1)[0]
    advance = ToyDecoder.advance

    def failing(self: ToyDecoder, state: bytes, token: int) -> tuple[bytes, str]:
        if token == bad_first:
            raise ValueError("broken vocabulary")
        return advance(self, state, token)

    monkeypatch.setattr(ToyDecoder, "advance", failing)
    assert bad_first not in first_tokens((0, 1), 4)
    engine.drain()
    bad, good = engine.heard[RequestId("bad")].end, engine.heard[RequestId("good")].end
    assert bad is not None and bad.error == "ValueError: broken vocabulary"
    assert good is not None and good.reason == "length"


def test_closing_fails_what_is_live_once_and_is_idempotent() -> None:
    engine = harness(max_num_seqs=1)
    for index in range(3):
        engine.submit(make_request(f"r{index}"))
    engine.step()
    events = engine.engine.close()
    assert [(event.id, event.reason) for event in events if isinstance(event, Finished)] == [
        ("r0", "error"),
        ("r1", "error"),
        ("r2", "error"),
    ]
    assert engine.engine.close() == ()
    assert not engine.engine.has_work


def test_an_engine_without_text_runs_and_refuses_stop_strings() -> None:
    model = harness().model
    engine = Engine(model, resolved_config(), vocab_size=VOCAB_SIZE, clock=lambda: 0.0)
    with pytest.raises(ConfigError, match="stop strings need a tokenizer"):
        engine.submit(make_request(stop="x"))
    engine.submit(make_request())
    events = [event for _ in range(4) for event in engine.step()]
    assert [event.text for event in events] == [""] * 5


def test_statistics_add_up() -> None:
    engine = harness(block_size=2)
    assert finish(engine, make_request("a", (0, 1, 0, 1, 0))).reason == "length"
    assert finish(engine, make_request("b", (0, 1, 0, 1, 0))).reason == "length"
    totals = engine.engine.totals
    assert totals.num_output_tokens == 8
    assert totals.num_cached_tokens == 4
    assert totals.num_prefill_tokens == 5 + 1
    assert totals.num_tokens == totals.num_prefill_tokens + 6
    assert totals.num_ended == {"length": 2}


def test_nothing_of_a_request_is_left_after_its_end() -> None:
    """REQUIREMENTS T1 and C3: unique prompts, logprobs, cancels; tables are empty, blocks reclaimable."""
    engine = harness(num_kv_blocks=16)
    for index in range(300):
        prompt = tuple((index >> bit) & 1 for bit in range(9))
        engine.engine.submit(make_request(f"r{index}", prompt, logprobs=3, presence_penalty=1.0))
        if index % 5 == 0:
            engine.engine.cancel(RequestId(f"r{index}"))
        engine.engine.step()
    while engine.engine.has_work:
        engine.engine.step()
    engine.check_drained()
    assert len(engine.engine._inbox) == 0
    assert len(engine.engine._forward._batcher._packed) <= 4


# --- speculation -----------------------------------------------------------------------------------------

PERFECT = Drafting("perfect", "fixed-3")


def speculation(engine: EngineHarness) -> SpeculationTotals:
    totals = engine.engine.totals.speculation
    assert totals is not None
    return totals


def test_accepted_drafts_come_in_one_event_and_count_as_output() -> None:
    engine = harness(PERFECT)
    engine.submit(make_request(max_tokens=6, logprobs=1))
    events = [engine.step() for _ in range(3)]
    engine.check_outputs()
    sizes = [[len(event.token_ids) for event in step if isinstance(event, TokensOut)] for step in events]
    assert sizes == [[1], [4], [1]]  # no draft in the last step: the target's own token is the last one
    assert speculation(engine).accepted_lengths == {3: 1}
    stats = engine.engine.last_step
    assert (stats.num_drafts, stats.num_accepted, stats.num_output_tokens) == (0, 0, 1)


def test_a_step_with_drafts_counts_them_among_its_tokens() -> None:
    engine = harness(PERFECT)
    engine.submit(make_request(max_tokens=6))
    engine.step()
    engine.step()
    stats = engine.engine.last_step
    assert (stats.num_tokens, stats.num_drafts, stats.num_accepted, stats.num_output_tokens) == (4, 3, 3, 4)


def test_without_speculation_the_totals_say_so() -> None:
    engine = harness()
    finish(engine, make_request())
    assert engine.engine.totals.speculation is None
    assert engine.engine.last_step.num_drafts == 0


def test_end_of_sequence_inside_accepted_drafts_is_the_last_token() -> None:
    """V5, L9."""
    tokens = first_tokens((0, 1, 0), 6)
    end = next(index for index in range(2, 6) if tokens[index] not in tokens[:index])
    engine = harness(Drafting("perfect", "fixed-5"))
    assert finish(engine, make_request(max_tokens=6, eos=(tokens[end],))).reason == "stop"
    assert engine.heard[RequestId("r")].token_ids == list(tokens[: end + 1])
    assert speculation(engine).num_accepted == end


def test_a_cancel_in_the_forward_drops_the_accepted_drafts_too() -> None:
    """L5: nothing of the step in flight is emitted or counted, and the drafter forgets the row."""
    engine = harness(PERFECT)
    engine.submit(make_request(max_tokens=8))
    engine.step()
    engine.cancel(Cancel(0, during_forward=True))
    assert engine.step() == (Finished(RequestId("r"), "cancelled"),)
    assert (speculation(engine).num_proposed, speculation(engine).num_accepted) == (0, 0)
    engine.check_drained()


def test_a_batch_that_fails_for_its_drafts_is_rerun_without_them() -> None:
    """L6: the drafter's token breaks the model, the requests go on."""
    engine = harness(PERFECT)
    tokens = first_tokens((0, 1, 0), 3)
    engine.submit(make_request(max_tokens=8))
    engine.step()
    engine.model.faults = Faults(crash_if=lambda batch: batch.num_tokens > 1)
    engine.step()
    assert engine.model.num_steps == 3
    assert engine.heard[RequestId("r")].token_ids == list(tokens[:2])
    assert (speculation(engine).num_proposed, speculation(engine).switched_off) == (0, None)
    engine.model.faults = Faults()
    engine.drain()
    engine.check_outputs()


def test_an_interrupt_in_the_drafter_leaves_every_request_where_it_was() -> None:
    """L6: blocks granted for the step go back."""
    engine = harness(PERFECT, block_size=1)
    engine.submit(make_request(max_tokens=8))
    engine.step()
    free = engine.engine.num_free_blocks
    assert engine.watch is not None

    def interrupt(rows: object) -> list[tuple[int, ...]]:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.watch.drafter, "propose", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.engine.step()
    assert engine.engine.num_free_blocks == free
    engine.drain()
    engine.check_outputs()


def test_closing_and_aborting_close_the_drafter() -> None:
    for end in (Engine.close, Engine.abort):
        engine = harness(PERFECT)
        engine.submit(make_request(max_tokens=8))
        engine.step()
        end(engine.engine)
        assert engine.watch is not None and engine.watch.drafter.closed


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_drafter_is_switched_off_and_the_answer_stays_the_same(fault: str) -> None:
    """L6."""
    engine = harness(Drafting("perfect", "fixed-3", fault=fault, good_calls=1))
    assert finish(engine, make_request(max_tokens=12)).reason == "length"
    assert speculation(engine).switched_off is not None
    assert speculation(engine).num_accepted == 3


@pytest.mark.parametrize("limit", [0, 1, 5])
def test_drafts_of_a_step_are_bounded_over_all_rows(limit: int) -> None:
    engine = harness(Drafting("perfect", "fixed-4"), max_step_drafts=limit, max_num_batched_tokens=32)
    for index in range(3):
        engine.submit(make_request(f"r{index}", (0, 1, index), max_tokens=8))
    most = 0
    while engine.engine.has_work:
        engine.step()
        most = max(most, engine.engine.last_step.num_drafts)
    assert most == limit
    engine.check_outputs()
