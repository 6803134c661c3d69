"""The `LLM` class: vLLM's names and semantics, streaming, threads, and nothing left behind."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mvllm import (
    LLM,
    ConfigError,
    EngineClosed,
    ModelFileError,
    RequestRejected,
    SamplingParams,
    TemplateError,
)
from mvllm.backends.reference.backend import ReferenceBackend
from tests.tiny_models import write_tiny_gguf

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = ["the fox", " the other engine", "it's they'll", "Hello, world 123!"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_tiny_gguf(path, architecture="llama", tensor_type="F16", seed=4)
    return path


@pytest.fixture
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, backend="reference", max_model_len=64, block_size=4, check_integrity=True) as llm:
        yield llm
        _advance_until_idle(llm)
        assert llm.engine.num_used_blocks == 0


def _advance_until_idle(llm: LLM) -> None:
    llm.generate("the", SamplingParams(max_tokens=1))  # also applies cancels that are still pending


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    together = llm.generate(PROMPTS, GREEDY)
    alone = [llm.generate(prompt, GREEDY)[0] for prompt in PROMPTS]
    assert [o.outputs[0].token_ids for o in together] == [o.outputs[0].token_ids for o in alone]
    assert [o.prompt for o in together] == PROMPTS
    assert all(o.finished and o.outputs[0].finish_reason == "length" for o in together)


def test_token_ids_and_mappings_are_prompts_too(llm: LLM) -> None:
    ids = llm.tokenizer.encode(PROMPTS[0])
    expected = llm.generate(PROMPTS[0], GREEDY)[0].outputs
    for prompt in (ids, {"prompt_token_ids": ids}, {"prompt": PROMPTS[0]}):
        assert llm.generate(prompt, GREEDY)[0].outputs == expected
    assert [o.outputs for o in llm.generate([ids, ids], GREEDY)] == [expected, expected]


def test_streamed_pieces_join_to_the_whole_answer(llm: LLM) -> None:
    whole = llm.generate(PROMPTS[1], GREEDY)[0].outputs[0]
    chunks = list(llm.stream(PROMPTS[1], GREEDY))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert tuple(t for chunk in chunks for t in chunk.token_ids) == whole.token_ids
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["length"]


def test_every_choice_of_n_is_streamed_to_its_own_end(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=6, ignore_eos=True)
    chunks = list(llm.stream(PROMPTS[0], params))
    whole = llm.generate(PROMPTS[0], params)[0].outputs
    assert len({answer.token_ids for answer in whole}) == 3
    for answer in whole:
        own = [chunk for chunk in chunks if chunk.index == answer.index]
        assert tuple(t for chunk in own for t in chunk.token_ids) == answer.token_ids
        assert own[-1].finish_reason == "length"


def test_a_closed_or_dropped_stream_is_cancelled(llm: LLM) -> None:
    long = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    for take in (0, 1, 3):
        stream = llm.stream(PROMPTS[0], long)
        for _ in range(take):
            next(stream)
        if take == 1:
            stream.close()
        del stream
        gc.collect()
    _advance_until_idle(llm)
    assert not llm.engine.has_work


def test_a_stream_that_was_closed_ends_and_says_that_it_was_cancelled(llm: LLM) -> None:
    long = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True, n=2)
    stream = llm.stream(PROMPTS[0], long)
    first = next(stream)
    stream.close()
    assert list(stream) == []
    reasons = [answer.finish_reason for answer in stream.output().outputs]
    assert reasons == ["cancelled", "cancelled"]
    assert stream.output().outputs[first.index].text.startswith(first.text)


def test_threads_share_one_batch_and_get_their_own_answers(llm: LLM) -> None:
    expected = {prompt: llm.generate(prompt, GREEDY)[0].outputs for prompt in PROMPTS}
    found: dict[str, object] = {}

    def ask(prompt: str) -> None:
        found[prompt] = llm.generate(prompt, GREEDY)[0].outputs

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in PROMPTS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected


def test_one_bad_prompt_starts_nothing(llm: LLM) -> None:
    with pytest.raises(RequestRejected):
        llm.generate([PROMPTS[0], "x" * 500], GREEDY)
    _advance_until_idle(llm)
    assert not llm.engine.has_work


@pytest.mark.parametrize("prompt", [[[]], "", [-1], [10**9], {"text": "a"}])
def test_unusable_prompts_are_refused(llm: LLM, prompt: object) -> None:
    with pytest.raises((RequestRejected, ConfigError)):
        llm.generate(prompt, GREEDY)  # type: ignore[arg-type]


def test_limits_name_both_numbers(llm: LLM) -> None:
    with pytest.raises(RequestRejected, match=r"max_tokens=100000000.*context of 64"):
        llm.generate(PROMPTS[0], SamplingParams(max_tokens=10**8))
    output = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))[0]
    assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 64


def test_logprobs_name_their_tokens(llm: LLM) -> None:
    answer = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=3, logprobs=2))[0].outputs[0]
    assert answer.logprobs is not None and answer.cumulative_logprob is not None
    for entry, token in zip(answer.logprobs, answer.token_ids, strict=True):
        assert entry.token_id == token
        assert entry.by_token[token].rank == 1
        assert entry.by_token[token].decoded_token == llm.tokenizer.token_text(token)
        assert all(value.logprob <= 0 for value in entry.by_token.values())
    total = sum(entry.by_token[entry.token_id].logprob for entry in answer.logprobs)
    assert answer.cumulative_logprob == total


def test_a_repeated_prompt_is_taken_from_the_cache(llm: LLM) -> None:
    prompt = list(range(10, 26))
    first, second = (llm.generate(prompt, GREEDY)[0] for _ in range(2))
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == 12  # whole blocks, at least one token computed
    assert first.outputs == second.outputs


def test_chat_without_a_template_says_so(tmp_path: Path) -> None:
    path = tmp_path / "plain.gguf"
    write_tiny_gguf(path, metadata={"tokenizer.chat_template": None})
    with LLM(path, backend="reference") as llm, pytest.raises(TemplateError, match="raw"):
        llm.chat([{"role": "user", "content": "hi"}])


def test_random_cancels_leave_no_block_no_row_and_no_thread(model: Path) -> None:
    before = threading.active_count()
    rng = random.Random(0)
    with LLM(model, backend="cpu", threads=2, max_model_len=64, num_kv_blocks=12, block_size=4) as llm:
        open_streams = []
        for _ in range(200):
            params = SamplingParams(n=rng.choice([1, 1, 2]), max_tokens=rng.randint(1, 20), ignore_eos=True)
            open_streams.append(llm.stream([rng.randrange(320) for _ in range(rng.randint(1, 20))], params))
            for stream in rng.sample(open_streams, min(len(open_streams), 2)):
                next(stream, None)
            if len(open_streams) > 6:
                open_streams.pop(rng.randrange(len(open_streams))).close()
        for stream in open_streams:
            stream.close()
        _advance_until_idle(llm)
        llm.engine.check_integrity()
        assert llm.engine.num_used_blocks == 0
        assert not llm.engine.has_work
    assert threading.active_count() == before


def test_a_closed_llm_says_so(model: Path) -> None:
    llm = LLM(model, backend="reference")
    llm.close()
    llm.close()
    with pytest.raises(EngineClosed):
        llm.generate("a", GREEDY)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"max_model_len": 0}, "max_model_len"),
        ({"max_model_len": 10**9}, "context"),
        ({"kv_dtype": "f64"}, "kv_dtype"),
        ({"kv_dtype": "bf16"}, "offers"),
        ({"colour": 1}, "colour"),
        ({"num_kv_blocks": 4, "kv_cache_bytes": 100}, "not both"),
        ({"kv_cache_bytes": 10}, "block"),
        ({"kv_cache_bytes": 10**23}, "can't be addressed"),
        ({"num_kv_blocks": 2**27}, "can't be addressed"),
        ({"block_size": 2**31}, "can't be addressed"),
        *(({"threads": value, "backend": "cpu"}, "threads") for value in (0, -1, 1.5, "2", True, 10**6)),
        ({"backend": "quantum"}, "quantum"),
    ],
)
def test_bad_settings_are_explained(model: Path, settings: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        LLM(model, **{"backend": "reference", **settings})  # type: ignore[arg-type]


def test_what_memory_can_not_hold_is_explained(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*arguments: object) -> None:
        raise MemoryError

    monkeypatch.setattr(ReferenceBackend, "load", exhausted)
    with pytest.raises(ConfigError, match="set max_model_len or kv_cache_bytes lower"):
        LLM(model, backend="reference")


def test_a_missing_model_is_explained() -> None:
    with pytest.raises(ModelFileError, match="catalog"):
        LLM("no-such-model")
