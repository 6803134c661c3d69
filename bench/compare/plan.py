"""What a comparison asks of every backend, and the prompts it does so with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mvllm.core.errors import ConfigError
from mvllm.core.load.contents import Checkpoint
from mvllm.core.tensor import Backend, KvGeometry
from mvllm.core.types import TokenId, ceil_div

DEFAULT_PROMPTS = (
    "The capital of Norway is",
    "def is_even(number):\n    return",
    "Water boils at one hundred degrees",
    "Monday, Tuesday, Wednesday,",
)

BLOCK_SIZE = 16


@dataclass(frozen=True)
class ComparedPrompt:
    """A prompt under the name that reports give it."""

    name: str
    token_ids: tuple[TokenId, ...]


@dataclass(frozen=True)
class Plan:
    """Sizes of a comparison. Small, so that slow backends finish too."""

    prompts: tuple[ComparedPrompt, ...]
    max_tokens: int = 16  # greedy tokens per prompt
    kv_dtype: str = "auto"  # each backend's default
    batch_sizes: tuple[int, ...] = (1, 8)  # sequences whose speed is measured
    speed_tokens: int = 16  # prompt of each such sequence
    speed_steps: int = 8  # tokens that each then decodes

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        longest_prompt = max(len(prompt.token_ids) for prompt in self.prompts)
        return max(longest_prompt + self.max_tokens, self.speed_tokens + self.speed_steps)

    def geometry(self, backend: Backend) -> KvGeometry:
        """A KV pool in which every sequence of the largest batch has blocks of its own."""
        rows = max(self.batch_sizes)
        kv_dtypes = backend.capabilities.kv_dtypes
        return KvGeometry(
            num_blocks=rows * ceil_div(self.longest, BLOCK_SIZE),
            block_size=BLOCK_SIZE,
            max_context=self.longest,
            max_batch_tokens=max(self.longest, rows * self.speed_tokens),
            max_batch_rows=rows,
            max_logit_rows=max(self.max_tokens, rows),
            dtype=kv_dtypes[0] if self.kv_dtype == "auto" else self.kv_dtype,
        )


def check_plan(plan: Plan, checkpoint: Checkpoint) -> None:
    """Refuse what the model can't do.

    Raises:
        ConfigError: a prompt is empty, has unknown tokens, or does not fit with its answer.
    """
    spec = checkpoint.spec
    for prompt in plan.prompts:
        if not prompt.token_ids:
            raise ConfigError(f"prompt {prompt.name!r} has no tokens")
        if not all(0 <= token < spec.vocab_size for token in prompt.token_ids):
            raise ConfigError(
                f"prompt {prompt.name!r} has a token outside the vocabulary of {spec.vocab_size}"
            )
    if plan.longest > spec.context_length:
        raise ConfigError(
            f"the longest prompt with its answer, or what speed is measured with, takes {plan.longest} "
            f"tokens; the model's context has {spec.context_length}"
        )


def choose_base(names: Sequence[str]) -> str:
    """The backend that errors are relative to: the reference if it is named, otherwise the first."""
    return "reference" if "reference" in names else names[0]
