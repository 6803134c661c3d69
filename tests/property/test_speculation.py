"""Speculation in the whole engine: any drafter and any policy change time, and nothing else.

`run_script` checks after every step what stands in `test_engine.py`, K4 and K5 (rejected drafts leave nothing
in tables or cache), L3 and L4 for drafter and policy, V1, V4 and V7; after the drain that each output is the
naive loop's, logprobs bit for bit (V2, V3, V5).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mvllm.core.request import Request, SamplingParams
from mvllm.core.types import RequestId
from tests.property.engine_harness import Heard, Script, Step, Submit, resolved_config, run_script
from tests.property.engine_speculation import GUESSES, Drafting
from tests.property.engine_strategies import draftings, model_draftings, scripts


@given(scripts(drafts=True))
def test_any_drafter_and_policy_leave_every_output_as_the_naive_loop_has_it(script: Script) -> None:
    """L7 with V1 to V5 and V7, M10, K1, K4, K5, L1 to L5, S1, S3."""
    run_script(script)


@given(scripts(drafts=True, faults=True))
def test_broken_drafters_and_failing_steps_with_drafts_harm_nobody(script: Script) -> None:
    """L6: drafting is switched off; NaN rows past a mismatch don't count; a failed batch is rerun without."""
    run_script(script)


@given(scripts(drafts=True, drafter=model_draftings()))
def test_a_draft_model_with_little_room_leaves_every_output_and_its_own_cache_right(script: Script) -> None:
    """V6: K1, K4, K9, L3 and L4 of the draft model's cache after every step; L7 and V4 besides."""
    run_script(script)


@given(scripts(drafts=True, faults=True, drafter=model_draftings()))
def test_a_draft_model_beside_failing_steps_keeps_its_own_cache_right(script: Script) -> None:
    """V6 and L6."""
    run_script(script)


@given(scripts(drafts=False), draftings())
def test_switching_speculation_on_changes_no_event_of_a_finished_request(
    script: Script, drafting: Drafting
) -> None:
    """V2 and V3, metamorphic: tokens, text, logprobs, reasons, cancellations left aside."""
    without, with_drafts = run_script(script), run_script(replace(script, drafting=drafting))
    assert without.requests == with_drafts.requests
    for id, one in without.heard.items():
        two = with_drafts.heard[id]
        assert one.end is not None and two.end is not None
        if "cancelled" not in (one.end.reason, two.end.reason):
            assert _told(one) == _told(two)


def _told(heard: Heard) -> tuple[object, ...]:
    assert heard.end is not None
    return heard.token_ids, heard.text, heard.logprobs, heard.end.reason, heard.end.stop_reason


def _long_script(drafting: Drafting | None, num_requests: int = 2) -> Script:
    params = SamplingParams(temperature=0.8, max_tokens=20)
    config = resolved_config(num_kv_blocks=60, max_num_batched_tokens=32, max_step_drafts=16)
    requests = [Request(RequestId(f"r{i}"), (0, 1, i), params, i, 20) for i in range(num_requests)]
    return Script(config, (*map(Submit, requests), Step()), drafting)


@given(st.integers(1, 6))
def test_a_perfect_drafter_saves_a_pass_for_each_of_its_drafts(length: int) -> None:
    """V4: every draft is accepted, so 19 tokens after the first take ceil(19 / (length + 1)) passes."""
    totals = run_script(_long_script(Drafting("perfect", f"fixed-{length}"), 1)).engine.totals
    assert totals.speculation is not None
    assert totals.speculation.num_accepted == totals.speculation.num_proposed
    assert totals.speculation.num_passes == -(-19 // (length + 1))


@pytest.mark.parametrize("guess", [name for name in GUESSES if name != "nothing"])
def test_the_drafters_of_these_scripts_are_accepted_and_rejected(guess: str) -> None:
    """The scripts above are worth nothing if no draft is ever accepted, or none ever refused."""
    totals = run_script(_long_script(Drafting(guess, "fixed-4"))).engine.totals.speculation
    assert totals is not None
    assert totals.num_accepted > 0
    assert (totals.num_accepted < totals.num_proposed) == (guess != "perfect")
