"""The whole engine against the naive loop: random scripts of submit, cancel and step on tagged KV.

`run_script` checks after every step K1 to K3, K9, L1 to L4, S10, S11, S14 and the integrity of all parts;
after the drain P2, K9 and L7.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from mvllm.core.config import ResolvedConfig
from mvllm.core.request import Request, SamplingParams
from mvllm.core.types import RequestId
from tests.property.engine_harness import EngineHarness, Script, Step, Submit, resolved_config, run_script
from tests.property.engine_strategies import configs, requests, scripts, siblings


@given(scripts())
def test_every_output_equals_the_naive_loop_whatever_the_arrangement(script: Script) -> None:
    """L7 with K1 to K3, K9, L1 to L5, S10, S11, S14 after every step and P2 after the drain."""
    run_script(script)


@given(scripts(faults=True))
def test_faults_end_only_the_requests_they_hit_and_leave_no_trace(script: Script) -> None:
    """L6: NaN rows, crashing batches and batches that crash once; everyone else equals the naive loop."""
    run_script(script)


@given(scripts(), configs())
def test_another_configuration_changes_no_finished_output(script: Script, other: ResolvedConfig) -> None:
    """L7, metamorphic: block size, pool, budget, rows, caching and admission are not visible in outputs."""
    first = run_script(script)
    second = run_script(replace(script, config=other))
    for id in first.requests.keys() & second.requests.keys():
        one, two = first.heard[id], second.heard[id]
        assert one.end is not None and two.end is not None
        if "cancelled" not in (one.end.reason, two.end.reason):
            assert (one.token_ids, one.text, one.end.reason) == (two.token_ids, two.text, two.end.reason)


@given(requests(0), st.integers(2, 4), st.integers(1, 4))
def test_siblings_compute_the_full_blocks_of_their_prompt_once(
    request: Request, count: int, block_size: int
) -> None:
    """K6 and S15: without eviction, n prompts of p tokens compute p + (n - 1)(p - b((p - 1)//b)) of them."""
    config = resolved_config(
        block_size=block_size, num_kv_blocks=200, max_num_seqs=5, max_num_batched_tokens=64
    )
    harness = run_script(Script(config, tuple(siblings(request, count))))
    length = len(request.prompt_token_ids)
    unshared = length - block_size * ((length - 1) // block_size)
    assert harness.engine.totals.num_prefill_tokens == length + (count - 1) * unshared
    assert harness.engine.totals.num_preemptions == 0


@given(st.integers(1, 9), st.integers(1, 4), st.sampled_from([0.0, 1.0]))
def test_a_prompt_sent_three_times_answers_the_same_and_computes_its_last_token(
    length: int, block_size: int, temperature: float
) -> None:
    """L9 and REQUIREMENTS B4: fully cached prompts, prompts of exactly b * m tokens."""
    config = resolved_config(block_size=block_size, num_kv_blocks=24)
    params = SamplingParams(temperature=temperature, max_tokens=4, seed=5)
    harness = EngineHarness(Script(config, ()))
    for name in "abc":
        harness.submit(Request(RequestId(name), (1,) * length, params, 5, 4))
        harness.drain()
    harness.check_outputs()
    outputs = [harness.heard[RequestId(name)] for name in "abc"]
    assert outputs[0].token_ids == outputs[1].token_ids == outputs[2].token_ids
    expected_hit = block_size * ((length - 1) // block_size)
    assert [heard.num_cached_tokens for heard in outputs] == [0, expected_hit, expected_hit]


def test_random_scripts_reach_preemption_cache_hits_and_single_flight() -> None:
    """The scripts above are worth nothing if these paths are never taken."""
    config = resolved_config(block_size=2, num_kv_blocks=6, max_num_seqs=4, max_num_batched_tokens=4)
    params = SamplingParams(temperature=0.0, max_tokens=7)
    prompt = (0, 1, 0, 1, 1)
    actions = [Submit(Request(RequestId(f"r{i}"), prompt, params, i, 7)) for i in range(4)] + [Step()] * 5
    totals = run_script(Script(config, tuple(actions))).engine.totals
    assert totals.num_preemptions > 0
    assert totals.num_cached_tokens > 0
