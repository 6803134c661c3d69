"""From what a caller asks for to the validated requests that the engine accepts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mvllm.core.errors import ConfigError, RequestRejected
from mvllm.core.request import Request, SamplingParams
from mvllm.core.sampling.keyed_noise import sibling_seed
from mvllm.core.types import RequestId, TokenId

SeedSource = Callable[[], int]
"""Draws a seed in [0, 2**64) for requests that bring none."""

_UINT64 = (1 << 64) - 1


def prepare_requests(
    group_id: str,
    prompt_token_ids: Sequence[TokenId],
    params: SamplingParams,
    *,
    max_model_len: int,
    vocab_size: int,
    eos_token_ids: frozenset[TokenId],
    draw_seed: SeedSource,
) -> tuple[Request, ...]:
    """One request per sibling (`params.n` of them), named ``group_id`` or ``group_id/index``.

    Raises:
        RequestRejected: the prompt is empty, or prompt and output do not fit the context.
        ConfigError: a token id in the prompt or the parameters is outside the vocabulary.
    """
    prompt = tuple(prompt_token_ids)
    max_tokens = _output_limit(len(prompt), params.max_tokens, max_model_len)
    _check_token_ids("prompt_token_ids", prompt, vocab_size)
    _check_token_ids("logit_bias", tuple(params.logit_bias), vocab_size)
    _check_token_ids("stop_token_ids", tuple(params.stop_token_ids), vocab_size)
    seed = draw_seed() if params.seed is None else params.seed & _UINT64
    single = params if params.n == 1 else params.with_changes(n=1)
    return tuple(
        Request(
            id=RequestId(group_id if params.n == 1 else f"{group_id}/{index}"),
            prompt_token_ids=prompt,
            params=single,
            seed=seed if index == 0 else sibling_seed(seed, index),
            max_tokens=max_tokens,
            eos_token_ids=eos_token_ids,
        )
        for index in range(params.n)
    )


def _output_limit(num_prompt: int, max_tokens: int | None, max_model_len: int) -> int:
    if num_prompt == 0:
        raise RequestRejected("the prompt has no tokens; give at least one", needed=1, available=0)
    room = max_model_len - num_prompt
    if room < 1:
        raise RequestRejected(
            f"the prompt has {num_prompt} tokens, and the context of {max_model_len} must hold it "
            "and at least one more: shorten the prompt or raise max_model_len",
            needed=num_prompt + 1,
            available=max_model_len,
        )
    if max_tokens is None:
        return room
    if max_tokens > room:
        raise RequestRejected(
            f"the prompt has {num_prompt} tokens and max_tokens is {max_tokens}, together more than the "
            f"context of {max_model_len}: lower max_tokens to {room} or leave it unset",
            needed=num_prompt + max_tokens,
            available=max_model_len,
        )
    return max_tokens


def _check_token_ids(what: str, ids: tuple[TokenId, ...], vocab_size: int) -> None:
    for token in ids:
        if not isinstance(token, int) or not 0 <= token < vocab_size:
            raise ConfigError(f"{what}: {token!r} is not a token id of this model (0 to {vocab_size - 1})")
