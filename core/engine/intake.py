"""What the engine checks before it takes a request, so that no later step can trip over it."""

from __future__ import annotations

from collections.abc import Iterable

from mvllm.core.engine.request_text import RequestText, TextDecoderFor
from mvllm.core.errors import ConfigError, RequestRejected
from mvllm.core.request import Request
from mvllm.core.text.stop import StopStrings
from mvllm.core.types import TokenId


def check_request(request: Request, vocab_size: int, max_model_len: int, *, has_text: bool) -> None:
    """Refuse what could never be served; room in the KV pool is the scheduler's question.

    Raises:
        ConfigError: a token id outside the vocabulary, siblings not split, no output wanted, or stop strings
            in an engine without text.
        RequestRejected: the prompt is empty, or prompt and output exceed the context.
    """
    _check_length(request, max_model_len)
    params = request.params
    _check_token_ids("the prompt", request.prompt_token_ids, vocab_size)
    _check_token_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    _check_token_ids("logit_bias", params.logit_bias, vocab_size)
    _check_token_ids("eos_token_ids", request.eos_token_ids, vocab_size)
    if params.n != 1:
        raise ConfigError(f"the engine takes siblings as requests of their own, got n={params.n}")
    if params.stop and not has_text:
        raise ConfigError("stop strings need a tokenizer, and this engine has none; use stop_token_ids")


def start_text(request: Request, text: TextDecoderFor | None) -> RequestText | None:
    """State of a request's text before its first token; None in an engine without text."""
    if text is None:
        return None
    params = request.params
    stops = None
    if params.stop:
        stops = StopStrings(tuple(params.stop), params.include_stop_str_in_output)
    return RequestText.start(text(params), stops, request.prompt_token_ids)


def _check_length(request: Request, max_model_len: int) -> None:
    num_prompt = len(request.prompt_token_ids)
    if num_prompt == 0:
        raise RequestRejected("the prompt has no tokens; at least one is needed", needed=1, available=0)
    if request.max_tokens < 1:
        raise ConfigError(f"max_tokens must be at least 1, got {request.max_tokens}")
    if num_prompt >= max_model_len:
        raise RequestRejected(
            f"the prompt has {num_prompt} tokens; the context of {max_model_len} has room for prompts of at "
            f"most {max_model_len - 1}",
            needed=num_prompt + 1,
            available=max_model_len,
        )
    if request.total_limit > max_model_len:
        raise RequestRejected(
            f"a prompt of {num_prompt} tokens and max_tokens={request.max_tokens} exceed the context of "
            f"{max_model_len} tokens: set max_tokens to at most {max_model_len - num_prompt}",
            needed=request.total_limit,
            available=max_model_len,
        )


def _check_token_ids(where: str, token_ids: Iterable[TokenId], vocab_size: int) -> None:
    for token in token_ids:
        if not 0 <= token < vocab_size:
            raise ConfigError(f"{where} has token id {token}; the vocabulary has ids 0 to {vocab_size - 1}")
