"""What a caller asks for and what comes back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Literal

from mvllm.core.errors import ConfigError
from mvllm.core.types import MASK_64, RequestId, TokenId

GREEDY_TEMPERATURE = 1e-5
"""Below this temperature the most likely token is taken (as in vLLM)."""

FinishReason = Literal["stop", "length", "cancelled", "error"]
"""Why a request ended: a stop token or stop string, its length limit, its caller, or an error of its own."""

MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to end; names and meanings follow vLLM's.

    Order of the steps: penalties and bias, temperature, min-p, top-k, top-p, draw.

    Raises:
        ConfigError: a value is out of range; the message names the field and the value.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over output only
    frequency_penalty: float = 0.0  # over output only
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None  # None: drawn at submission
    max_tokens: int | None = 16  # None: to the end of the context
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None  # None: none; 0: of the chosen token; k: also of the k most likely
    cache_salt: str = ""  # requests share cached prefixes only with equal salts

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        self._check()

    def _check(self) -> None:
        def require(ok: bool, name: str, expected: str) -> None:
            if not ok:
                raise ConfigError(f"{name} must be {expected}, got {getattr(self, name)!r}")

        def whole(
            name: str, expected: str, low: int, high: int | None = None, *, optional: bool = False
        ) -> None:
            value = getattr(self, name)
            if optional and value is None:
                return
            fits = isinstance(value, int) and not isinstance(value, bool) and value >= low
            require(fits and (high is None or value <= high), name, expected)

        def real(name: str, expected: str, low: float, high: float, *, above_low: bool = False) -> None:
            value = getattr(self, name)
            fits = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            fits = fits and low <= value <= high and not (above_low and value == low)
            require(fits, name, expected)

        whole("n", f"a whole number from 1 to {MAX_CHOICES}", 1, MAX_CHOICES)
        real("temperature", "a finite number of at least 0", 0.0, math.inf)
        real("top_p", "above 0 and at most 1", 0.0, 1.0, above_low=True)
        whole("top_k", "a whole number of at least -1", -1)
        real("min_p", "from 0 to 1", 0.0, 1.0)
        real("repetition_penalty", "a finite number above 0", 0.0, math.inf, above_low=True)
        real("presence_penalty", "from -2 to 2", -2.0, 2.0)
        real("frequency_penalty", "from -2 to 2", -2.0, 2.0)
        whole("seed", "a whole number or None", -(1 << 63), MASK_64, optional=True)
        whole("max_tokens", "a whole number of at least 1, or None", 1, optional=True)
        whole("min_tokens", "a whole number of at least 0", 0)
        whole("logprobs", f"from 0 to {MAX_LOGPROBS}, or None", 0, MAX_LOGPROBS, optional=True)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ConfigError(f"min_tokens ({self.min_tokens}) exceeds max_tokens ({self.max_tokens})")
        ok = len(self.stop) <= MAX_STOP_STRINGS
        ok = ok and all(isinstance(text, str) and 0 < len(text) <= MAX_STOP_LENGTH for text in self.stop)
        require(ok, "stop", f"up to {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_LENGTH} characters")
        ok = all(isinstance(token, int) and token >= 0 for token in self.stop_token_ids)
        require(ok, "stop_token_ids", "token ids")
        for token, bias in self.logit_bias.items():
            if not isinstance(token, int) or token < 0:
                raise ConfigError(f"logit_bias: {token!r} is not a token id")
            if not isinstance(bias, (int, float)) or not -100.0 <= bias <= 100.0:
                raise ConfigError(f"logit_bias[{token}] must be from -100 to 100, got {bias!r}")

    def with_changes(self, **changes: object) -> SamplingParams:
        """A copy with some fields replaced, checked like any other."""
        return replace(self, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Request:
    """One sequence to generate, complete and validated; what the engine accepts.

    `params.n` is 1 here: siblings are separate requests. `seed` and `max_tokens` are resolved.
    """

    id: RequestId
    prompt_token_ids: tuple[TokenId, ...]
    params: SamplingParams
    seed: int  # in [0, 2**64)
    max_tokens: int
    eos_token_ids: frozenset[TokenId] = frozenset()

    @property
    def total_limit(self) -> int:
        """Most tokens, prompt included, that the sequence can ever have."""
        return len(self.prompt_token_ids) + self.max_tokens


class Phase(Enum):
    """Where a request stands. Legal moves: WAITING <-> RUNNING (preemption), and either to an end."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def terminal(self) -> bool:
        return self not in (Phase.WAITING, Phase.RUNNING)


@dataclass(frozen=True)
class Logprob:
    """Natural-log probability of a token under the model's own distribution, and its rank (1 = best)."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True)
class TokenLogprobs:
    """Of one generated position: the chosen token first, then the most likely ones asked for."""

    token_id: TokenId
    by_token: Mapping[TokenId, Logprob]


@dataclass(frozen=True)
class CompletionOutput:
    """One of the `n` answers to a prompt."""

    index: int
    text: str
    token_ids: tuple[TokenId, ...]
    finish_reason: FinishReason | None = None  # None while running
    stop_reason: int | str | None = None  # the stop token or stop string that ended it
    cumulative_logprob: float | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    error: str | None = None


@dataclass(frozen=True)
class RequestMetrics:
    """Times in seconds and counts, of the whole group of siblings."""

    time_to_first_token: float | None = None
    total_time: float = 0.0
    num_preemptions: int = 0


@dataclass(frozen=True)
class RequestOutput:
    """What `LLM.generate` returns for one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[TokenId, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    num_cached_tokens: int = 0  # prompt tokens taken from the prefix cache, of the first sibling
    metrics: RequestMetrics = RequestMetrics()
