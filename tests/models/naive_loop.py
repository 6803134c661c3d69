"""What the engine must produce, by the most obvious loop: one request, alone, no cache, no batch.

Everything is recomputed from the whole token list at every token.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mvllm.backends.fake.model import logprobs_of
from mvllm.backends.fake.tags import FakeSampling, choose, tag_of
from mvllm.core.request import Request
from tests.models.toy_text import decode_all, decode_certain


@dataclass(frozen=True)
class NaiveOutput:
    """A finished request. `reason` is "error" where the model had no usable logits."""

    token_ids: tuple[int, ...]
    reason: str
    stop_reason: int | str | None
    text: str
    logprobs: tuple[tuple[tuple[int, float], ...], ...] | None  # per token: chosen first, then the top ones


def naive_generate(
    request: Request, vocab_size: int, *, nan_tokens: frozenset[int] = frozenset()
) -> NaiveOutput:
    """Generate on the tag function itself, with the toy tokenizer's text."""
    prompt, output = list(request.prompt_token_ids), list[int]()
    while True:
        tokens = prompt + output
        token = None if tokens[-1] in nan_tokens else _next_token(request, output, vocab_size)
        if token is None:
            return NaiveOutput(
                tuple(output), "error", None, decode_certain(output), _logprobs(request, output, vocab_size)
            )
        output.append(token)
        end = _end(request, output)
        if end is not None:
            reason, stop_reason, text = end
            logprobs = _logprobs(request, output, vocab_size)
            return NaiveOutput(tuple(output), reason, stop_reason, text, logprobs)


def _next_token(request: Request, output: Sequence[int], vocab_size: int) -> int | None:
    params = request.params
    tokens = [*request.prompt_token_ids, *output]
    bias = dict(params.logit_bias)
    if len(output) < params.min_tokens:
        bias |= dict.fromkeys(params.stop_token_ids, -math.inf)
        if not params.ignore_eos:
            bias |= dict.fromkeys(request.eos_token_ids, -math.inf)
    sampling = FakeSampling(
        position=len(tokens),
        seed=request.seed,
        temperature=params.temperature,
        filters=(params.top_k, params.top_p, params.min_p),
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        prompt_counts=Counter(request.prompt_token_ids),
        output_counts=Counter(output),
        bias=bias,
    )
    return choose(tag_of(tokens), vocab_size, sampling)


def _end(request: Request, output: Sequence[int]) -> tuple[str, int | str | None, str] | None:
    """(reason, stop reason, whole text) if the output ends with its last token."""
    params = request.params
    last = output[-1]
    is_eos = last in request.eos_token_ids and not params.ignore_eos
    ends_by_token = is_eos or last in params.stop_token_ids
    hide_last = ends_by_token and not params.include_stop_str_in_output
    shown = output[:-1] if hide_last else output
    at_limit = len(output) == request.max_tokens
    text = decode_all(shown) if ends_by_token or at_limit else decode_certain(shown)
    if params.stop and (params.min_tokens == 0 or len(output) > params.min_tokens):
        unsearched = len(decode_certain(output[: params.min_tokens])) if params.min_tokens else 0
        found = earliest_stop(text[unsearched:], params.stop)
        if found is not None:
            start, stop = found
            cut = unsearched + start + (len(stop) if params.include_stop_str_in_output else 0)
            return "stop", stop, text[:cut]
    if ends_by_token:
        return "stop", None if is_eos else last, text
    return ("length", None, text) if at_limit else None


def earliest_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """The stop string that is complete first when the text is read character by character."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return end - len(longest), longest
    return None


def _logprobs(
    request: Request, output: Sequence[int], vocab_size: int
) -> tuple[tuple[tuple[int, float], ...], ...] | None:
    count = request.params.logprobs
    if count is None:
        return None
    entries = []
    for index, token in enumerate(output):
        values = logprobs_of(tag_of([*request.prompt_token_ids, *output[:index]]), vocab_size)
        top = np.argsort(-values, kind="stable")[:count].tolist()
        shown = [token, *[other for other in top if other != token]]
        entries.append(tuple((other, float(values[other])) for other in shown))
    return tuple(entries)
