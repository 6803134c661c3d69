"""Real checkpoints against a float32 reference computed elsewhere."""

from __future__ import annotations

import numpy as np
import pytest

from mvllm import LLM, SamplingParams
from tests.golden.data import NIGHTLY, GoldenPrompt, forced_logprobs, golden_prompts, loaded, model_path

REFERENCE_TOLERANCE = 2e-3
DECIDED_GAP = 0.004
"""Above this gap between the two best logits, float32 rounding can't change the best."""

CPU_AGREEMENT = {"smollm2-135m": 0.96, "qwen2.5-coder-0.5b": 0.985}
"""Share of positions with the same best token; activations are rounded to 8 bits."""

CPU_MEAN_ERROR = 0.08
CPU_LARGEST_GAP = 0.35

NAMES = tuple(CPU_AGREEMENT)
SHORT_PROMPTS = ("raw_one_token", "raw_zh", "chat_hello")


def _for_the_reference(prompts: list[GoldenPrompt]) -> list[GoldenPrompt]:
    """All of it only at night: the reference needs minutes where the cpu backend needs seconds."""
    if NIGHTLY:
        return prompts
    return [prompt.cut(len(prompt.top)) for prompt in prompts if prompt.name in SHORT_PROMPTS]


def _for_the_cpu(name: str) -> list[GoldenPrompt]:
    """By day the larger model leaves out the one long prompt, and two thirds of each answer."""
    prompts = golden_prompts(name)
    if NIGHTLY or name == "smollm2-135m":
        return prompts
    return [prompt.cut(16) for prompt in prompts if len(prompt.token_ids) < 100]


@pytest.mark.parametrize("name", NAMES if NIGHTLY else NAMES[:1])
def test_reference_logprobs_equal_the_golden_ones(name: str) -> None:
    with loaded(name, "reference") as model:
        for prompt in _for_the_reference(golden_prompts(name)):
            logprobs = forced_logprobs(model, prompt)
            for position, expected in enumerate(prompt.top):
                ids = [token for token, _ in expected]
                theirs = np.array([logprob for _, logprob in expected])
                error = np.abs(logprobs[position, ids] - theirs).max()
                assert error <= REFERENCE_TOLERANCE, (prompt.name, position, error)
            best = logprobs.argmax(axis=-1)
            decided = np.array(prompt.gap) > DECIDED_GAP
            assert (best == np.array(prompt.greedy))[decided].all(), prompt.name


@pytest.mark.parametrize("name", NAMES)
def test_cpu_best_tokens_and_logprobs_agree_with_the_golden_ones(name: str) -> None:
    agreed = positions = 0
    errors = []
    with loaded(name, "cpu") as model:
        for prompt in _for_the_cpu(name):
            logprobs = forced_logprobs(model, prompt)
            agreed += int((logprobs.argmax(axis=-1) == np.array(prompt.greedy)).sum())
            positions += len(prompt.greedy)
            for position, expected in enumerate(prompt.top):
                ids = [token for token, _ in expected]
                theirs = np.array([logprob for _, logprob in expected])
                errors.append(np.abs(logprobs[position, ids] - theirs).mean())
    assert agreed / positions >= CPU_AGREEMENT[name], (agreed, positions)
    assert np.mean(errors) <= CPU_MEAN_ERROR


@pytest.mark.parametrize("name", NAMES)
def test_cpu_greedy_text_leaves_the_golden_one_only_at_near_ties(name: str) -> None:
    prompts = _for_the_cpu(name)
    params = SamplingParams(temperature=0, max_tokens=len(prompts[0].greedy), ignore_eos=True)
    with LLM(model_path(name), max_model_len=1024) as llm:
        outputs = llm.generate([prompt.token_ids for prompt in prompts], params)
        assert llm.engine.num_used_blocks == 0
    for prompt, output in zip(prompts, outputs, strict=True):
        ours = output.outputs[0].token_ids
        differing = [i for i, pair in enumerate(zip(ours, prompt.greedy, strict=True)) if pair[0] != pair[1]]
        if differing:
            assert prompt.gap[differing[0]] < CPU_LARGEST_GAP, (prompt.name, differing[0])
