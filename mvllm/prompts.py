"""Prompts and sampling parameters in all the forms that `LLM` takes, brought into one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

import numpy as np

from mvllm.core.errors import ConfigError, shown
from mvllm.core.request import SamplingParams
from mvllm.core.text.chat_messages import Message
from mvllm.core.text.tokenizer import Tokenizer
from mvllm.core.types import TokenId

Prompt = str | Sequence[TokenId] | Mapping[str, Any]
"""Text, token ids, or vLLM's form {"prompt": text} or {"prompt_token_ids": ids}."""


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as token ids, with its text if it was given as one."""

    text: str | None
    token_ids: tuple[TokenId, ...]


def encode_prompts(tokenizer: Tokenizer, prompts: Prompt | Iterable[Prompt]) -> list[EncodedPrompt]:
    """One prompt or several, told apart by what they hold.

    Raises:
        ConfigError: something in it is no prompt.
    """
    if isinstance(prompts, str | Mapping):
        return [encode_prompt(tokenizer, prompts)]
    listed: list[Any] = _items(prompts, "prompts")
    if listed and isinstance(listed[0], int | np.integer):
        return [encode_prompt(tokenizer, listed)]
    return [encode_prompt(tokenizer, prompt) for prompt in listed]


def encode_prompt(tokenizer: Tokenizer, prompt: Prompt) -> EncodedPrompt:
    """One prompt.

    Raises:
        ConfigError: it is neither text, nor token ids, nor a mapping with either.
    """
    if isinstance(prompt, Mapping):
        if "prompt_token_ids" in prompt:
            return EncodedPrompt(prompt.get("prompt"), _token_ids(prompt["prompt_token_ids"]))
        if "prompt" not in prompt:
            raise ConfigError('a prompt mapping needs the key "prompt" or "prompt_token_ids"')
        prompt = prompt["prompt"]
        if not isinstance(prompt, str):
            raise ConfigError(f'"prompt" in a mapping must be text, got {shown(prompt)}')
    if isinstance(prompt, str):
        return EncodedPrompt(prompt, tuple(tokenizer.encode(prompt)))
    return EncodedPrompt(None, _token_ids(prompt))


def conversations(messages: Iterable[Message] | Iterable[Iterable[Message]]) -> list[list[Message]]:
    """One conversation or several, told apart by what they hold.

    Raises:
        ConfigError: it is no list of messages.
    """
    listed: list[Any] = _items(messages, "messages")
    if listed and isinstance(listed[0], Mapping):
        return [listed]
    return [_items(conversation, "the messages of a conversation") for conversation in listed]


def params_by_prompt(
    params: SamplingParams | Iterable[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    """Sampling parameters for each of `count` prompts: their own, or the one that is for all.

    Raises:
        ConfigError: another number of them, or something else.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    listed = _items(params, "sampling parameters")
    for own in listed:
        if not isinstance(own, SamplingParams):
            raise ConfigError(f"sampling parameters must be SamplingParams, got {shown(own)}")
    if len(listed) != count:
        raise ConfigError(f"{len(listed)} sampling parameters for {count} prompts: give one, or one each")
    return listed


def _token_ids(ids: object) -> tuple[TokenId, ...]:
    """As plain ints: NumPy's would overflow and hash in ways of their own."""
    try:
        return tuple(map(index, _items(ids, "a prompt")))
    except TypeError:
        raise ConfigError(f"a prompt must be text or token ids, got {shown(ids)}") from None


def _items(value: Any, what: str) -> list[Any]:
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping):
        raise ConfigError(f"{shown(value)} can't be used as {what}")
    return list(value)
