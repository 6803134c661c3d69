"""The prompts of the experiment, as token ids of a model."""

from __future__ import annotations

from pathlib import Path

from mvllm.core.errors import TemplateError
from mvllm.core.load.contents import Checkpoint
from mvllm.core.text.chat_template import ChatTemplate
from mvllm.core.text.tokenizer import Tokenizer
from mvllm.core.types import TokenId

WORKLOADS = {"refactoring": 0.0, "creative": 0.8}
"""Temperature of each: greedy answers of small models to the second prompt turn in circles, which would be
easy to draft."""


def prompt_text(name: str) -> str:
    return (Path(__file__).parent / "prompts" / f"{name}.txt").read_text(encoding="utf-8")


def prompt_ids(checkpoint: Checkpoint, name: str) -> tuple[TokenId, ...]:
    """The prompt as one message of a chat; for a model without a chat template, as it stands."""
    tokenizer = Tokenizer.from_assets(checkpoint.text)
    text = prompt_text(name)
    try:
        template = ChatTemplate(tokenizer, checkpoint.text)
    except TemplateError:
        return tuple(tokenizer.encode(text))
    return tuple(template.encode([{"role": "user", "content": text}]))
