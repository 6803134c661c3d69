"""Chat messages to prompt tokens, through the model's own template.

What callers write can't become a control token: `ContentGuard` disguises it before the template runs. The
rendered text is cut at the control tokens it holds then, the template's own; the disguise is taken off, and
each piece is encoded as ordinary text. Pieces are encoded whole, so merges across the borders of content and
template are those of the model's reference tokenizer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from mvllm.core.errors import TemplateError
from mvllm.core.text.assets import TextAssets
from mvllm.core.text.chat_messages import Message, checked_messages, plain, strings_in
from mvllm.core.text.content_guard import ContentGuard, Disguise, undisguised
from mvllm.core.text.template_sandbox import compile_template
from mvllm.core.text.tokenizer import Tokenizer
from mvllm.core.types import TokenId

_RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "strftime_now"}
)


class ChatTemplate:
    """A model's chat template, ready to use from any thread. Immutable.

    `clock` gives seconds and bounds the time of a rendering; `now` gives the local time to templates that
    ask.

    Raises:
        TemplateError: the model has no template, or the template is invalid.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        assets: TextAssets,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        if assets.chat_template is None:
            raise TemplateError(
                "the model has no chat template; give the prompt as plain text instead (--raw)"
            )
        self._tokenizer = tokenizer
        self._source = assets.chat_template
        self._compiled = compile_template(assets.chat_template, clock)
        self._guard = ContentGuard(tokenizer.control, self._compiled.literals)
        self._clock = clock
        tokens = {"bos_token": assets.bos_token, "eos_token": assets.eos_token}
        self._fixed: dict[str, Any] = {name: text for name, text in tokens.items() if text is not None}
        self._fixed["strftime_now"] = lambda format: now().strftime(format)

    def encode(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        parse_special_in_content: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> list[TokenId]:
        """The prompt: exactly what the template writes, no BOS added.

        `variables` are further template variables (JSON types). With `parse_special_in_content`, control
        tokens named in messages, tools and variables become those tokens.

        Raises:
            TemplateError: malformed messages, or the template failed, refused them or exceeded a limit.
        """
        given = self._checked(messages, tools, add_generation_prompt, variables)
        disguise = {} if parse_special_in_content else self._disguise_for(given)
        pieces = self._tokenizer.control.split(self._rendered(given, disguise))
        return self._tokenizer.encode_pieces(
            [undisguised(piece, disguise) if isinstance(piece, str) else piece for piece in pieces]
        )

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt as text; for people. In it, content that names a control token looks like one."""
        given = self._checked(messages, tools, add_generation_prompt, variables)
        disguise = self._disguise_for(given)
        return undisguised(self._rendered(given, disguise), disguise)

    def _checked(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        extra = plain(dict(variables or {}), "variables")
        if taken := sorted(_RESERVED & extra.keys()):
            raise TemplateError(f"the template variable {taken[0]!r} can't be set; it comes with the chat")
        return {
            **extra,
            "messages": checked_messages(messages, content_as_parts=self._compiled.loops_over_content),
            "tools": plain(list(tools), "tools") if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }

    def _disguise_for(self, given: dict[str, Any]) -> Disguise:
        return self._guard.disguise_for([self._source, *strings_in(given)])

    def _rendered(self, given: dict[str, Any], disguise: Disguise) -> str:
        if disguise:
            disguised = {name: self._guard.disguised(value, disguise) for name, value in given.items()}
            for message, original in zip(disguised["messages"], given["messages"], strict=True):
                # A checked word, which templates compare and write into markers.
                message["role"] = original["role"]
            given = disguised
        return self._compiled.render({**self._fixed, **given}, self._clock)
