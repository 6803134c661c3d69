"""Speculation on a real model: the same ids, texts and logprobs with and without (V2 to V4, X1)."""

from __future__ import annotations

from typing import Any

import pytest

from mvllm import LLM, RequestOutput, SamplingParams
from mvllm.core.engine.statistics import SpeculationTotals
from tests.golden.data import model_path

MODEL = "smollm2-135m"
MAX_TOKENS = 24
PROMPTS = [
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(",
    "1 2 3 4 5 1 2 3 4 5 1 2",
    "Once upon a time, in a village by the sea, there lived",
]
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=MAX_TOKENS, logprobs=2),
    "sampled": SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=MAX_TOKENS, logprobs=2),
}


def run(**drafting: Any) -> tuple[list[RequestOutput], SpeculationTotals | None]:
    """Every prompt, greedy and sampled, in one batch."""
    with LLM(model_path(MODEL), max_model_len=256, kv_cache_bytes=1 << 25, **drafting) as llm:
        prompts = [prompt for prompt in PROMPTS for _ in PARAMS]
        return llm.generate(prompts, [*PARAMS.values()] * len(PROMPTS)), llm.engine.totals.speculation


@pytest.fixture(scope="module")
def expected() -> list[RequestOutput]:
    return run()[0]


def check_equal(outputs: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for output, wanted in zip(outputs, expected, strict=True):
        [answer], [answer_wanted] = output.outputs, wanted.outputs
        assert answer.token_ids == answer_wanted.token_ids
        assert answer.text == answer_wanted.text
        assert answer.logprobs == answer_wanted.logprobs
        assert answer.finish_reason == answer_wanted.finish_reason


@pytest.mark.parametrize(("policy", "length"), [("fixed", 5), ("adaptive", None)])
def test_ngram_drafts_change_nothing(expected: list[RequestOutput], policy: str, length: int | None) -> None:
    outputs, totals = run(drafter="ngram", draft_policy=policy, draft_length=length)
    check_equal(outputs, expected)
    assert totals is not None and totals.switched_off is None
    if policy == "fixed":
        assert totals.num_accepted > 0


@pytest.mark.parametrize("length", [1, 4])
def test_the_model_itself_as_drafter_is_always_right(expected: list[RequestOutput], length: int) -> None:
    outputs, totals = run(
        drafter="model", draft_model=model_path(MODEL), draft_policy="fixed", draft_length=length
    )
    check_equal(outputs, expected)
    assert totals is not None and totals.switched_off is None
    assert totals.num_proposed > 0
    assert totals.num_accepted == totals.num_proposed, "V4: the same noise and the same logits"
