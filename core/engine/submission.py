"""From what a caller asks for to the requests that the engine takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mvllm.core.request import Request, SamplingParams
from mvllm.core.sampling.keyed_noise import sibling_seed
from mvllm.core.types import MASK_64, RequestId, TokenId

SeedSource = Callable[[], int]
"""Draws a seed in [0, 2**64) for requests that bring none."""


def prepare_requests(
    group_id: str,
    prompt_token_ids: Sequence[TokenId],
    params: SamplingParams,
    *,
    max_model_len: int,
    eos_token_ids: frozenset[TokenId],
    draw_seed: SeedSource,
) -> tuple[Request, ...]:
    """One request per sibling (`params.n` of them), named ``group_id`` or ``group_id/index``.

    `max_tokens` None becomes the rest of the context. Whether the request can be served is not checked here:
    `Engine.submit` does that.
    """
    prompt = tuple(prompt_token_ids)
    max_tokens = params.max_tokens
    if max_tokens is None:
        max_tokens = max(1, max_model_len - len(prompt))
    seed = draw_seed() if params.seed is None else params.seed & MASK_64
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
