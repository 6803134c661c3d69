"""What is measured: cases by name, and their prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pydoc_data.topics import topics

from mvllm.core.errors import ConfigError
from mvllm.core.text.tokenizer import Tokenizer

DEFAULT_CASES = (
    "decode-128,decode-2048,prefill-64,prefill-256,prefill-512,"
    "sequences-1,sequences-2,sequences-4,sequences-8,sequences-16"
)

SEQUENCE_CONTEXT = 128
"""Prompt tokens of each of several sequences."""

MAX_SEQUENCES = 256
"""What llama.cpp is built for."""

_STEPS = 32
_FEWER_STEPS, _MANY_SEQUENCES = 16, 4
_CHARACTERS_PER_TOKEN = 12  # more than any tokenizer makes of English text


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    kind: str  # "decode" or "prefill"
    sequences: int
    context: int  # prompt tokens of each sequence
    steps: int  # decoding steps of one repetition; 0 for prefill

    @property
    def name(self) -> str:
        if self.sequences > 1:
            return f"sequences-{self.sequences}"
        return f"{self.kind}-{self.context}"

    @property
    def place(self) -> tuple[int, int, int]:
        """Of its row in a table."""
        return (self.kind == "prefill", self.sequences, self.context)

    @property
    def prompt_length(self) -> int:
        """Tokens of each prompt. Decoding has one more than the context, so that a prefix cache with blocks
        holds all the rest."""
        return self.context + (1 if self.kind == "decode" else 0)

    @property
    def length(self) -> int:
        """Tokens of a sequence at the end."""
        return self.prompt_length + max(1, self.steps + 1)

    @property
    def tokens(self) -> int:
        """Tokens of one repetition that count for the rate."""
        return self.sequences * self.steps if self.kind == "decode" else self.context


def parse_cases(names: str) -> list[Case]:
    """Cases by their names, with commas: decode-CONTEXT, prefill-TOKENS, sequences-NUMBER.

    One sequence is the same as decode-128; a case named twice is measured once.

    Raises:
        ConfigError: a name is none of these.
    """
    return list(dict.fromkeys(_parse(name.strip()) for name in names.split(",")))


def _parse(name: str) -> Case:
    kind, _, number = name.partition("-")
    if number.isascii() and number.isdigit() and 1 <= int(number) <= 1 << 20:
        if kind == "prefill":
            return Case("prefill", 1, int(number), 0)
        if kind == "decode":
            return Case("decode", 1, int(number), _STEPS)
        if kind == "sequences" and int(number) <= MAX_SEQUENCES:
            steps = _FEWER_STEPS if int(number) >= _MANY_SEQUENCES else _STEPS
            return Case("decode", int(number), SEQUENCE_CONTEXT, steps)
    raise ConfigError(
        f"{name!r} is no case; cases are decode-CONTEXT, prefill-TOKENS and sequences-NUMBER "
        f"(up to {MAX_SEQUENCES}), such as decode-128"
    )


def tokens_needed(cases: Iterable[Case]) -> int:
    """Tokens of text that `Prompts` must have for all of them."""
    return max(case.sequences * case.prompt_length for case in cases)


def text_token_ids(tokenizer: Tokenizer, count: int) -> list[int]:
    """`count` tokens of real text: the language reference that comes with Python, in English."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    repeats = 1 + count * _CHARACTERS_PER_TOKEN // len(text)
    ids = tokenizer.encode((text * repeats)[: count * _CHARACTERS_PER_TOKEN])
    if len(ids) < count:
        raise ConfigError(f"the text has {len(ids)} tokens; {count} are needed")
    return [int(token) for token in ids[:count]]


def prompts_of(case: Case, ids: Sequence[int]) -> list[list[int]]:
    """The prompts of a case: consecutive pieces of the text, so that no two sequences have the same."""
    length = case.prompt_length
    return [list(ids[start : start + length]) for start in range(0, case.sequences * length, length)]
