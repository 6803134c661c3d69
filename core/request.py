"""What a caller asks for and what comes back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Literal

from mvllm.core.errors import ConfigError, shown
from mvllm.core.types import MASK_64, RequestId, TokenId

GREEDY_TEMPERATURE = 1e-5
"""Below this temperature the most likely token is taken (as in vLLM)."""

FinishReason = Literal["stop", "length", "cancelled", "error"]
"""Why a request ended: a stop token or stop string, its length limit, its caller, or an error of its own."""

MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024
MAX_TOP_K = (1 << 31) - 1  # it travels as int32
SMALLEST_FACTOR, LARGEST_FACTOR = 1e-30, 1e30  # of logits, which must stay within float32's range


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
        self._convert("stop", lambda stop: (stop,) if isinstance(stop, str) else tuple(stop), "text or texts")
        self._convert("stop_token_ids", tuple, "token ids")
        self._convert("logit_bias", dict, "a mapping of token ids to numbers")
        self._check_numbers()
        self._check_collections()
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            self._require(isinstance(getattr(self, name), bool), name, "True or False")
        self._require(isinstance(self.cache_salt, str), "cache_salt", "text")

    def _convert(self, name: str, convert: Callable[[Any], object], expected: str) -> None:
        """Bring a collection into the form it is kept in; None, as in vLLM, is an empty one."""
        value = getattr(self, name)
        try:
            object.__setattr__(self, name, convert(() if value is None else value))
        except (TypeError, ValueError):
            self._require(False, name, expected)

    def _require(self, ok: bool, name: str, expected: str) -> None:
        if not ok:
            raise ConfigError(f"{name} must be {expected}, got {shown(getattr(self, name))}")

    def _whole(
        self, name: str, expected: str, low: int, high: int | None = None, *, optional: bool = False
    ) -> None:
        value = getattr(self, name)
        fits = _is_whole(value) and value >= low and (high is None or value <= high)
        self._require(fits or (optional and value is None), name, expected)

    def _real(self, name: str, expected: str, low: float, high: float) -> None:
        value = getattr(self, name)
        self._require(_is_real(value) and low <= value <= high, name, expected)  # NaN fails this too

    def _check_numbers(self) -> None:
        self._whole("n", f"a whole number from 1 to {MAX_CHOICES}", 1, MAX_CHOICES)
        self._real("temperature", f"a finite number from 0 to {LARGEST_FACTOR:g}", 0.0, LARGEST_FACTOR)
        self._real("top_p", "above 0 and at most 1", 0.0, 1.0)
        self._require(self.top_p > 0.0, "top_p", "above 0 and at most 1")
        self._whole("top_k", f"a whole number from -1 to {MAX_TOP_K}", -1, MAX_TOP_K)
        self._real("min_p", "from 0 to 1", 0.0, 1.0)
        factors = f"a finite number from {SMALLEST_FACTOR:g} to {LARGEST_FACTOR:g}"
        self._real("repetition_penalty", factors, SMALLEST_FACTOR, LARGEST_FACTOR)
        self._real("presence_penalty", "from -2 to 2", -2.0, 2.0)
        self._real("frequency_penalty", "from -2 to 2", -2.0, 2.0)
        self._whole("seed", "a whole number or None", -(1 << 63), MASK_64, optional=True)
        self._whole("max_tokens", "a whole number of at least 1, or None", 1, optional=True)
        self._whole("min_tokens", "a whole number of at least 0", 0)
        self._whole("logprobs", f"from 0 to {MAX_LOGPROBS}, or None", 0, MAX_LOGPROBS, optional=True)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ConfigError(f"min_tokens ({self.min_tokens}) exceeds max_tokens ({self.max_tokens})")

    def _check_collections(self) -> None:
        ok = len(self.stop) <= MAX_STOP_STRINGS
        ok = ok and all(isinstance(text, str) and 0 < len(text) <= MAX_STOP_LENGTH for text in self.stop)
        expected = f"up to {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_LENGTH} characters"
        self._require(ok, "stop", expected)
        ok = all(_is_whole(token) and token >= 0 for token in self.stop_token_ids)
        self._require(ok, "stop_token_ids", "token ids")
        for token, bias in self.logit_bias.items():
            if not _is_whole(token) or token < 0:
                raise ConfigError(f"logit_bias: {shown(token)} is not a token id")
            if not _is_real(bias) or not -100.0 <= bias <= 100.0:
                raise ConfigError(f"logit_bias[{token}] must be from -100 to 100, got {shown(bias)}")

    def with_changes(self, **changes: object) -> SamplingParams:
        """A copy with some fields replaced, checked like any other."""
        return replace(self, **changes)  # type: ignore[arg-type]


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


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
    decoded_token: str | None = None  # on its own; a part of a character shows as U+FFFD
    token_bytes: bytes | None = None  # those of chosen tokens, joined, are the text


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
