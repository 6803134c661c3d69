"""X1 through the whole engine on random tiny models: no drafter changes a bit of an answer.

`test_cpu_exactness.py` has the logits of any arrangement; here it is the engine that arranges, with every
drafter: batches, chunks, prefix cache, preemption, threads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mvllm.backends.cpu.backend import CpuBackend
from mvllm.core.config import ResolvedConfig
from mvllm.core.engine.engine import Engine
from mvllm.core.engine.statistics import EngineTotals
from mvllm.core.errors import MvllmError
from mvllm.core.request import Request, SamplingParams
from mvllm.core.spec.draft_length import DraftLengthPolicy, FixedLength
from mvllm.core.spec.drafter import Drafter
from mvllm.core.spec.lookup_first import LookupFirst
from mvllm.core.spec.model_drafter import ModelDrafter, ModelDrafterConfig
from mvllm.core.spec.ngram_drafter import NgramDrafter
from mvllm.core.spec.speculation import Speculation
from mvllm.core.step import TokensOut
from mvllm.core.tensor import KvGeometry
from mvllm.core.types import RequestId, TokenId
from tests.conformance.random_models import ModelShape, random_model
from tests.models.drafters import RandomLengths, ScriptedDrafter, guess_randomly, know_the_answer, mostly
from tests.mutants.speculation import MUTANTS
from tests.property.engine_harness import resolved_config
from tests.property.test_cpu_exactness import MODELS, VOCAB_SIZE, model_of

MAX_MODEL_LEN = 32
MAX_TOKENS = 10
MAX_DRAFTS = 6

Answer = tuple[tuple[TokenId, ...], tuple[tuple[TokenId, float], ...]]
"""Tokens, and all logprobs told of them: equal logits give equal bits."""

STEM = (3, 1, 4, 1, 5, 3, 1, 4, 1, 5, 3)
PROMPTS = [STEM[:length] + tail for length in (2, 5, 9, 11) for tail in ((), (1,), (60, 7, 60))]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, logprobs=2),
    SamplingParams(temperature=0.7, top_k=12, seed=4, max_tokens=MAX_TOKENS, logprobs=0),
    SamplingParams(
        temperature=1.1, top_p=0.9, seed=9, max_tokens=MAX_TOKENS, frequency_penalty=0.5, logprobs=1
    ),
]


CROWDED = resolved_config(
    block_size=4, num_kv_blocks=6, max_num_batched_tokens=32, max_model_len=MAX_MODEL_LEN
)
"""Somebody is preempted."""


@dataclass(frozen=True)
class Arrangement:
    """Who drafts, and how the engine is made to work. `members` are indices of prompts and of parameters."""

    drafter: str
    model: int = 0
    members: tuple[tuple[int, int], ...] = ((0, 0), (5, 1), (7, 2), (11, 0))
    fixed_length: int | None = 4
    seed: int = 0
    threads: int = 2
    config: ResolvedConfig = CROWDED
    draft_blocks: int = 40
    first_tokens: int | None = None


def request_of(member: tuple[int, int], id: str) -> Request:
    prompt, params = PROMPTS[member[0]], PARAMS[member[1]]
    return Request(RequestId(id), prompt, params, params.seed or 0, MAX_TOKENS, frozenset())


def model_drafter(arrangement: Arrangement, *, itself: bool) -> ModelDrafter:
    spec, weights = model_of(arrangement.model) if itself else random_model(ModelShape(num_layers=1), seed=77)
    target = arrangement.config
    config = ModelDrafterConfig(
        num_kv_blocks=arrangement.draft_blocks,
        block_size=target.block_size,
        max_model_len=target.max_model_len,
        max_num_seqs=target.max_num_seqs,
        vocab_size=VOCAB_SIZE,
        catch_up_tokens=2 * target.max_num_seqs + 3,
        first_tokens=arrangement.first_tokens,
        enable_prefix_caching=target.enable_prefix_caching,
        head_share=0.5,
    )
    loaded = CpuBackend(threads=arrangement.threads).load(spec, weights, config.geometry(target.kv_dtype))
    return ModelDrafter(loaded, config)


def nearly_perfect(arrangement: Arrangement) -> ScriptedDrafter:
    answers = {
        RequestId(str(index)): lambda member=member: alone(
            arrangement.model, member, arrangement.config.kv_dtype
        )[0]
        for index, member in enumerate(arrangement.members)
    }
    return ScriptedDrafter(mostly(know_the_answer(answers), VOCAB_SIZE), seed=arrangement.seed)


DRAFTERS: dict[str, Callable[[Arrangement], Drafter | None]] = {
    "none": lambda arrangement: None,
    "n-gram": lambda arrangement: NgramDrafter(),
    "another model": functools.partial(model_drafter, itself=False),
    "the model itself": functools.partial(model_drafter, itself=True),
    "n-gram, then another model": lambda arrangement: LookupFirst(model_drafter(arrangement, itself=False)),
    "adversarial": lambda arrangement: ScriptedDrafter(guess_randomly(VOCAB_SIZE), seed=arrangement.seed),
    "nearly perfect": nearly_perfect,
}


def answers_of(arrangement: Arrangement) -> tuple[list[Answer], EngineTotals]:
    """All requests submitted at once to an engine with the arrangement's drafter."""
    spec, weights = model_of(arrangement.model)
    config = arrangement.config
    geometry = KvGeometry(
        num_blocks=config.num_kv_blocks,
        block_size=config.block_size,
        max_context=config.max_model_len,
        max_batch_tokens=config.max_num_batched_tokens,
        max_batch_rows=config.max_num_seqs,
        max_logit_rows=config.max_logit_rows,
        dtype=config.kv_dtype,
    )
    length = arrangement.fixed_length
    policy: DraftLengthPolicy = RandomLengths(arrangement.seed) if length is None else FixedLength(length)
    drafter = DRAFTERS[arrangement.drafter](arrangement)
    engine = Engine(
        CpuBackend(threads=arrangement.threads).load(spec, weights, geometry),
        config,
        vocab_size=VOCAB_SIZE,
        speculation=None if drafter is None else Speculation(drafter, policy),
        clock=lambda: 0.0,
    )
    tokens: dict[RequestId, list[TokenId]] = {}
    logprobs: dict[RequestId, list[tuple[TokenId, float]]] = {}
    with closing(engine):
        for index, member in enumerate(arrangement.members):
            request = request_of(member, str(index))
            tokens[request.id], logprobs[request.id] = [], []
            engine.submit(request)
        while engine.has_work:
            for event in engine.step():
                if isinstance(event, TokensOut):
                    tokens[event.id] += event.token_ids
                    for entries in event.logprobs:
                        logprobs[event.id] += [(t, one.logprob) for t, one in entries.by_token.items()]
        return [(tuple(tokens[id]), tuple(logprobs[id])) for id in tokens], engine.totals


@functools.cache
def alone(model: int, member: tuple[int, int], kv_dtype: str) -> Answer:
    """The answer without a drafter, with nobody beside it, on one thread."""
    config = resolved_config(
        block_size=16, max_num_batched_tokens=MAX_MODEL_LEN, max_num_seqs=1, max_model_len=MAX_MODEL_LEN
    )
    config = replace(config, kv_dtype=kv_dtype, enable_prefix_caching=False)
    [answer], _ = answers_of(Arrangement("none", model, (member,), threads=1, config=config))
    return answer


def check(arrangement: Arrangement) -> EngineTotals:
    answers, totals = answers_of(arrangement)
    assert totals.speculation is None or totals.speculation.switched_off is None
    kv_dtype = arrangement.config.kv_dtype
    for member, answer in zip(arrangement.members, answers, strict=True):
        assert answer == alone(arrangement.model, member, kv_dtype), f"X1: prompt and parameters {member}"
    return totals


@st.composite
def arrangements(draw: st.DrawFn, drafter: str) -> Arrangement:
    block_size = draw(st.sampled_from([1, 3, 8, 16]))
    longest = -(-(max(map(len, PROMPTS)) + MAX_TOKENS) // block_size)
    max_num_seqs = draw(st.integers(1, 5))
    config = resolved_config(
        block_size=block_size,
        num_kv_blocks=longest + draw(st.integers(0, longest)),  # for one request or two: others are preempted
        max_num_batched_tokens=draw(st.sampled_from([max_num_seqs, 8, 32])),
        max_num_seqs=max_num_seqs,
        enable_prefix_caching=draw(st.booleans()),
        max_model_len=MAX_MODEL_LEN,
        max_step_drafts=draw(st.sampled_from([MAX_DRAFTS, 3])),
    )
    members = st.tuples(st.integers(0, len(PROMPTS) - 1), st.integers(0, len(PARAMS) - 1))
    return Arrangement(
        drafter,
        model=draw(st.integers(0, len(MODELS) - 1)),
        members=tuple(draw(st.lists(members, min_size=1, max_size=6))),
        fixed_length=draw(st.sampled_from([None, None, 1, MAX_DRAFTS])),
        seed=draw(st.integers(0, 9)),
        threads=draw(st.integers(1, 4)),
        config=replace(config, kv_dtype=draw(st.sampled_from(["f32", "f16"]))),
        draft_blocks=longest + draw(st.integers(0, longest)),
        first_tokens=draw(st.sampled_from([None, 4])),
    )


@pytest.mark.parametrize("drafter", DRAFTERS)
@settings(max_examples=max(8, settings.default.max_examples // 5))
@given(data=st.data())
def test_x1_answers_have_the_same_bits_with_every_drafter(drafter: str, data: st.DataObject) -> None:
    check(data.draw(arrangements(drafter)))


@pytest.mark.parametrize("drafter", [name for name in DRAFTERS if name != "none"])
def test_the_drafters_of_these_arrangements_are_accepted_and_rejected(drafter: str) -> None:
    """The property above is worth nothing if no draft is ever accepted, or none ever refused."""
    engine_totals = check(Arrangement(drafter))
    assert engine_totals.num_preemptions > 0
    totals = engine_totals.speculation
    assert totals is not None and totals.num_proposed > 0
    if drafter in ("n-gram", "the model itself", "nearly perfect"):
        assert totals.num_accepted > 0
    if drafter == "the model itself":
        assert totals.num_accepted == totals.num_proposed, "V4"
    else:
        assert totals.num_accepted < totals.num_proposed


@pytest.mark.parametrize("bug", ["takes the drafts at their word", "rejected drafts count as computed"])
@pytest.mark.parametrize("drafter", ["n-gram", "another model", "adversarial", "nearly perfect"])
def test_the_planted_bug_shows(bug: str, drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arrangement = Arrangement(drafter)
    for member in arrangement.members:
        alone(arrangement.model, member, arrangement.config.kv_dtype)
    [mutant] = [mutant for mutant in MUTANTS if mutant.name == bug]
    mutant.plant(monkeypatch)
    with pytest.raises((AssertionError, MvllmError)):
        check(arrangement)
