"""Random engine scripts. Prompts come from few tokens and few stems, so that prefixes collide often."""

from __future__ import annotations

from hypothesis import strategies as st

from mvllm.core.config import ResolvedConfig
from mvllm.core.request import Request, SamplingParams
from mvllm.core.sampling.keyed_noise import sibling_seed
from mvllm.core.types import RequestId, ceil_div
from tests.models.drafters import FAULTS
from tests.property.engine_harness import (
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    Action,
    Cancel,
    Script,
    Step,
    Submit,
    resolved_config,
)
from tests.property.engine_speculation import GUESSES, Drafting, DraftMemory

STEMS = ((0, 1, 0, 1, 0, 1, 0, 1), (0, 1, 0, 0, 1, 1), (1, 1, 1, 1, 1))
token_ids = st.integers(0, VOCAB_SIZE - 1)
STOPS = ("b", "ab", "ba", "é", "aab", "a b", "bb")


@st.composite
def configs(draw: st.DrawFn) -> ResolvedConfig:
    """Small pools and budgets: everything runs short often."""
    max_num_seqs = 5 - draw(st.integers(0, 4))
    block_size = draw(st.integers(1, 4))
    return resolved_config(
        block_size=block_size,
        num_kv_blocks=max(4, min(12, ceil_div(draw(st.integers(8, 24)), block_size))),
        max_num_batched_tokens=draw(st.integers(max_num_seqs, 12)),
        max_num_seqs=max_num_seqs,
        enable_prefix_caching=draw(st.sampled_from([True, True, False])),
        admission=draw(st.sampled_from(["optimistic", "optimistic", "reserve"])),
        policy=draw(st.sampled_from(["fcfs", "shortest-prefill", "round-robin"])),
        max_step_drafts=draw(st.sampled_from([8, 8, 3, 0])),
    )


POLICIES = ("random", "adaptive", "acceptance-rate", "accepted-length", *(f"fixed-{k}" for k in range(1, 7)))


@st.composite
def draftings(draw: st.DrawFn, *, faults: bool = False) -> Drafting:
    """Any drafter with any policy."""
    return Drafting(
        guess=draw(st.sampled_from(GUESSES)),
        policy=draw(st.sampled_from(POLICIES)),
        seed=draw(st.integers(0, 9)),
        limit=draw(st.sampled_from([None, None, 4])),
        fault=draw(st.sampled_from([None, None, *FAULTS])) if faults else None,
        good_calls=draw(st.integers(0, 3)) if faults else 0,
    )


@st.composite
def model_draftings(draw: st.DrawFn) -> Drafting:
    """A draft model with little room of its own; half of them see all that the target sees."""
    equal = draw(st.booleans())
    memory = DraftMemory(
        num_kv_blocks=draw(st.integers(2, 12)),
        block_size=draw(st.integers(1, 4)),
        max_context=MAX_MODEL_LEN if equal else draw(st.integers(6, 16)),
        first_tokens=None if equal else draw(st.sampled_from([None, 2, 3, 6])),
        spare_budget=draw(st.integers(0, 6)),
        num_missing_tokens=0 if equal else draw(st.sampled_from([0, 0, 4])),
        enable_prefix_caching=draw(st.sampled_from([True, True, False])),
    )
    # What was wrong shows when a row goes on without drafts for a while, as "random" often has it.
    policy = draw(st.sampled_from(["random"] * 3 + ["adaptive", "fixed-4"]))
    return Drafting(policy=policy, seed=draw(st.integers(0, 9)), memory=memory)


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    max_tokens = draw(st.integers(1, 12))
    plain = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    if draw(st.booleans()):
        return plain
    temperature = draw(st.sampled_from([0.0, 0.7, 2.0]))
    return SamplingParams(
        temperature=temperature,
        top_p=draw(st.sampled_from([1.0, 0.9])),
        top_k=draw(st.sampled_from([0, 3])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3])),
        presence_penalty=draw(st.sampled_from([0.0, 1.5])),
        frequency_penalty=draw(st.sampled_from([0.0, -0.5])),
        logit_bias=draw(
            st.dictionaries(st.integers(0, VOCAB_SIZE - 1), st.sampled_from([-100, 3]), max_size=2)
        ),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)),
        ignore_eos=draw(st.booleans()),
        stop=draw(st.lists(st.sampled_from(STOPS), max_size=2, unique=True)),
        stop_token_ids=draw(st.lists(token_ids, max_size=2)),
        include_stop_str_in_output=draw(st.booleans()),
        logprobs=draw(st.sampled_from([None, 0, 2, 20])),
        cache_salt=draw(st.sampled_from(["", "", "other"])),
    )


prompts = st.one_of(
    st.builds(
        lambda stem, length, tail: (*stem[:length], *tail),
        st.sampled_from(STEMS),
        st.sampled_from([1, 2, 3, 4, 6, 8]),
        st.lists(st.integers(0, 3), max_size=2),
    ),
    st.lists(token_ids, min_size=1, max_size=10).map(tuple),
)


@st.composite
def requests(draw: st.DrawFn, index: int) -> Request:
    params = draw(sampling_params())
    return Request(
        id=RequestId(f"r{index}"),
        prompt_token_ids=draw(prompts),
        params=params,
        seed=draw(st.sampled_from([0, 7, 2**64 - 1])),
        max_tokens=params.max_tokens or 1,
        eos_token_ids=frozenset(draw(st.sampled_from([(), (2,), (2, 8)]))),
    )


def siblings(request: Request, count: int) -> list[Action]:
    """`n > 1`: one prompt, seeds f(seed, index) (K6)."""
    return [
        Submit(
            Request(
                id=RequestId(f"{request.id}/{index}"),
                prompt_token_ids=request.prompt_token_ids,
                params=request.params,
                seed=sibling_seed(request.seed, index),
                max_tokens=request.max_tokens,
                eos_token_ids=request.eos_token_ids,
            )
        )
        for index in range(count)
    ]


@st.composite
def scripts(
    draw: st.DrawFn,
    *,
    faults: bool = False,
    drafts: bool | None = None,
    drafter: st.SearchStrategy[Drafting] | None = None,
) -> Script:
    """Scripts that speculate or not as `drafts` says; None: half of them do.

    `drafter`: who drafts; None: anyone but a model.
    """
    actions: list[Action] = []
    kinds = st.sampled_from(["submit", "submit", "submit", "siblings", "cancel", "step", "step", "steps"])
    for index, kind in enumerate(draw(st.lists(kinds, min_size=6, max_size=18))):
        if kind == "submit":
            actions.append(Submit(draw(requests(index))))
        elif kind == "siblings":
            actions += siblings(draw(requests(index)), draw(st.integers(2, 4)))
        elif kind == "cancel":
            actions += [Cancel(draw(st.integers(0, 9)), draw(st.booleans()))] * draw(st.integers(1, 2))
        else:
            actions += [Step()] * (4 if kind == "steps" else 1)
    tokens = st.frozensets(st.integers(2, VOCAB_SIZE - 1), max_size=2) if faults else st.just(frozenset())
    speculates = draw(st.booleans()) if drafts is None else drafts
    drafter = draftings(faults=faults) if drafter is None else drafter
    return Script(
        config=draw(configs()),
        actions=tuple(actions),
        drafting=draw(drafter) if speculates else None,
        nan_tokens=draw(tokens),
        crash_tokens=draw(tokens),
        flaky_every=draw(st.integers(0, 3)) if faults else 0,
    )
