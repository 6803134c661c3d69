"""What the batcher needs of a request's sampling parameters, worked out once per request."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mvllm.core.request import Request
from mvllm.core.types import TokenId


@dataclass(frozen=True, slots=True)
class TokenBias:
    """Values to add to the logits of single tokens; -inf bans a token."""

    tokens: tuple[TokenId, ...] = ()  # ascending
    values: tuple[float, ...] = ()

    @classmethod
    def of(cls, by_token: dict[TokenId, float]) -> TokenBias:
        tokens = tuple(sorted(by_token))
        return cls(tokens, tuple(by_token[token] for token in tokens))


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """The constant part of a request's row in `SamplingArrays`."""

    filters: tuple[float, float, float, float, float, float]
    """temperature, top_p, min_p, repetition, presence and frequency penalty"""
    top_k: int
    seed: int
    num_logprobs: int  # -1: none
    has_penalties: bool
    min_tokens: int
    early_bias: TokenBias  # while the output is shorter than min_tokens: what would end it is banned
    bias: TokenBias  # from then on

    def bias_at(self, num_output_tokens: int) -> TokenBias:
        return self.early_bias if num_output_tokens < self.min_tokens else self.bias

    @classmethod
    def of(cls, request: Request) -> SamplingRow:
        params = request.params
        ending = set(params.stop_token_ids)
        if not params.ignore_eos:
            ending |= request.eos_token_ids
        wanted = dict(params.logit_bias)
        return cls(
            filters=(
                params.temperature,
                params.top_p,
                params.min_p,
                params.repetition_penalty,
                params.presence_penalty,
                params.frequency_penalty,
            ),
            top_k=params.top_k,
            seed=request.seed,
            num_logprobs=-1 if params.logprobs is None else params.logprobs,
            has_penalties=(
                params.repetition_penalty != 1.0
                or params.presence_penalty != 0.0
                or params.frequency_penalty != 0.0
            ),
            min_tokens=params.min_tokens,
            early_bias=TokenBias.of(wanted | dict.fromkeys(ending, -math.inf)),
            bias=TokenBias.of(wanted),
        )
