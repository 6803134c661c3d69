"""What `LLM` takes as prompts and as sampling parameters, and what it refuses with a reason."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mvllm import LLM, ConfigError, RequestOutput, SamplingParams
from tests.tiny_models import write_tiny_gguf

SHORT = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
CHAT = [{"role": "user", "content": "the"}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_tiny_gguf(path, tensor_type="F16")
    with LLM(path, backend="reference", max_model_len=64) as llm:
        yield llm


def ids(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.prompt_token_ids for output in outputs]


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ((5, 6), [(5, 6)]),
        (range(5, 7), [(5, 6)]),
        (iter([5, 6]), [(5, 6)]),
        ([np.int64(5), np.int32(6)], [(5, 6)]),
        (np.array([5, 6]), [(5, 6)]),
        (np.array([[5, 6], [7, 8]]), [(5, 6), (7, 8)]),
        ([[5, 6], (7,), {"prompt_token_ids": np.array([8])}], [(5, 6), (7,), (8,)]),
        ([], []),
    ],
    ids=lambda value: type(value).__name__,
)
def test_token_ids_come_in_any_form_and_become_plain_ints(
    llm: LLM, prompts: Any, expected: list[tuple[int, ...]]
) -> None:
    found = ids(llm.generate(prompts, SHORT))
    assert found == expected
    assert all(type(token) is int for prompt in found for token in prompt)


def test_iterators_of_texts_and_of_parameters_are_taken(llm: LLM) -> None:
    texts = ["the", "fox"]
    assert [output.prompt for output in llm.generate(iter(texts), iter([SHORT, SHORT]))] == texts
    assert len(llm.chat(iter(CHAT), SHORT)) == len(llm.chat([CHAT], SHORT)) == 1


BAD_PROMPTS: list[Any] = [None, 5, [None], [5.0], [[[5]]], [["a"]], [2**70], [-1], b"abc", [b"abc"]]
BAD_PROMPTS += [{"prompt": None}, {"prompt_token_ids": None}, {"prompt_token_ids": "abc"}, {"other": 1}]


@pytest.mark.parametrize("prompts", BAD_PROMPTS, ids=str)
def test_what_is_no_prompt_is_refused(llm: LLM, prompts: Any) -> None:
    with pytest.raises(ConfigError):
        llm.generate(prompts, SHORT)


@pytest.mark.parametrize("prompt", [None, ["a", "b"], 5], ids=str)
def test_a_stream_takes_one_prompt(llm: LLM, prompt: Any) -> None:
    with pytest.raises(ConfigError):
        llm.stream(prompt, SHORT)


@pytest.mark.parametrize("messages", [None, "hi", {"role": "user", "content": "x"}, [5]], ids=str)
def test_what_is_no_conversation_is_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(ConfigError):
        llm.chat(messages, SHORT)


@pytest.mark.parametrize("params", [{"max_tokens": 3}, "greedy", [None], [], [SHORT, SHORT]], ids=str)
def test_what_is_no_sampling_parameters_is_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(ConfigError):
        llm.generate("the", params)


HUGE = 10**400
BAD_VALUES: dict[str, list[Any]] = {
    "stop": [5, [None], [""]],
    "stop_token_ids": [5, ["a"], [True], [-1], [1.0]],
    "logit_bias": [5, "ab", {"5": 1.0}, {5: None}, {5: HUGE}, {True: 1.0}],
    "temperature": [None, "1", True, HUGE, 1e39, -1.0, float("nan"), float("inf")],
    "top_p": [0, HUGE, float("nan")],
    "top_k": [None, 1.5, 2**31, 10**30, -2],
    "repetition_penalty": [0, 1e-300, 1e300],
    "n": [0, None, True, 129],
    "seed": ["x", 1.5, 2**64],
    "ignore_eos": [None, "no", {}],
    "skip_special_tokens": [None, "no", {}],
    "include_stop_str_in_output": [[]],
    "cache_salt": [3, None, {}],
}
BAD_FIELDS = [(field, value) for field, values in BAD_VALUES.items() for value in values]


@pytest.mark.parametrize(("field", "value"), BAD_FIELDS, ids=lambda value: str(value)[:20])
def test_a_sampling_field_of_the_wrong_kind_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field) as refusal:
        SamplingParams(**{field: value})
    assert len(str(refusal.value)) < 250


def test_null_collections_are_empty_as_in_vllm() -> None:
    params = SamplingParams(stop=None, stop_token_ids=None, logit_bias=None)  # type: ignore[arg-type]
    assert (params.stop, params.stop_token_ids, params.logit_bias) == ((), (), {})


@pytest.mark.parametrize("field", ["temperature", "repetition_penalty"])
@pytest.mark.parametrize("value", [1e30, 1e-30])
def test_extreme_factors_that_are_allowed_give_an_answer(llm: LLM, field: str, value: float) -> None:
    [output] = llm.generate("the fox", SHORT.with_changes(**{"temperature": 1.0, field: value}))
    assert output.outputs[0].finish_reason == "length"
