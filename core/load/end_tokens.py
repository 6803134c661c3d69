"""Which special tokens end a turn, whatever a file says of its end-of-sequence token."""

from __future__ import annotations

END_OF_TURN_TOKENS = frozenset(
    {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "</s>"}
)
"""Strings that end a turn where a vocabulary has them as control tokens. Files often name only one of
several, and a model runs on into the next turn if the others are not heeded."""
