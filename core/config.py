"""Settings of an engine. User settings are frozen; `resolve` makes a new, complete object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from mvllm.core.errors import ConfigError
from mvllm.core.types import ceil_div

AdmissionPolicy = Literal["optimistic", "reserve"]
PrefillPolicy = Literal["fcfs", "shortest-prefill", "round-robin"]
KvDtype = Literal["auto", "f32", "f16", "bf16"]

DEFAULT_KV_BYTES = 1 << 30
MAX_SLOTS = (1 << 31) - 1  # positions of a KV pool; they travel as int32
KV_DTYPE_BYTES = {"f32": 4, "f16": 2, "bf16": 2}


@dataclass(frozen=True)
class EngineConfig:
    """What a user may set; None means "choose for me".

    Raises:
        ConfigError: a value is out of range, or two contradict each other.
    """

    max_model_len: int | None = None  # tokens; default: the model's context, or all the KV pool holds
    max_num_seqs: int = 64  # rows per step
    max_num_batched_tokens: int = 512  # tokens per step
    block_size: int = 16  # tokens per KV block
    num_kv_blocks: int | None = None  # default: what kv_cache_bytes holds
    kv_cache_bytes: int | None = None  # default: 1 GiB or what max_num_seqs can use
    kv_dtype: KvDtype = "auto"
    enable_prefix_caching: bool = True
    admission: AdmissionPolicy = "optimistic"
    policy: PrefillPolicy = "fcfs"  # whose prompt gets a step's spare tokens
    max_step_drafts: int = 64  # drafted tokens per step, all rows together; each has logits of its own
    check_integrity: bool = False  # re-verify all state after each step; slow

    def __post_init__(self) -> None:
        positive = ("max_num_seqs", "max_num_batched_tokens", "block_size", "max_step_drafts")
        optional = ("max_model_len", "num_kv_blocks", "kv_cache_bytes")
        for name in positive + optional:
            value = getattr(self, name)
            if value is None and name in optional:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r}")
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ConfigError(
                f"max_num_seqs ({self.max_num_seqs}) must not exceed max_num_batched_tokens "
                f"({self.max_num_batched_tokens}): every running row advances in every step"
            )
        if self.num_kv_blocks is not None and self.kv_cache_bytes is not None:
            raise ConfigError("set num_kv_blocks or kv_cache_bytes, not both")
        if self.admission not in ("optimistic", "reserve"):
            raise ConfigError(f"admission must be 'optimistic' or 'reserve', got {self.admission!r}")
        if self.policy not in get_args(PrefillPolicy):
            names = ", ".join(map(repr, get_args(PrefillPolicy)))
            raise ConfigError(f"policy must be one of {names}, got {self.policy!r}")
        if self.kv_dtype not in ("auto", "f32", "f16", "bf16"):
            raise ConfigError(f"kv_dtype must be 'auto', 'f32', 'f16' or 'bf16', got {self.kv_dtype!r}")


@dataclass(frozen=True)
class ResolvedConfig:
    """Complete settings: every number known."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_kv_blocks: int
    kv_dtype: str
    enable_prefix_caching: bool
    admission: AdmissionPolicy
    policy: PrefillPolicy
    max_step_drafts: int  # 0 without speculation
    check_integrity: bool

    @property
    def max_logit_rows(self) -> int:
        """Most tokens drawn in one step: one of each row, and one after each draft."""
        return self.max_num_seqs + self.max_step_drafts


def resolve(
    config: EngineConfig,
    *,
    model_context: int,
    kv_bytes_per_token: int,
    kv_dtype: str,
    speculates: bool = False,
) -> ResolvedConfig:
    """Complete `config` for a model.

    Args:
        model_context: the model's own context length, tokens.
        kv_bytes_per_token: KV bytes per position over all layers, in `kv_dtype`.
        kv_dtype: the type that "auto" stands for on the chosen backend, or the one asked for.
        speculates: whether the engine will draft; if not, no memory is set aside for the logits of drafts.

    Raises:
        ConfigError: a context longer than the model's, or a pool without a single block or beyond MAX_SLOTS.
    """
    max_model_len = config.max_model_len or model_context
    if max_model_len > model_context:
        raise ConfigError(f"max_model_len is {max_model_len}; the model's context is {model_context} tokens")
    block_bytes = kv_bytes_per_token * config.block_size
    if config.num_kv_blocks is not None:
        num_blocks = config.num_kv_blocks
    elif config.kv_cache_bytes is not None:
        num_blocks = config.kv_cache_bytes // block_bytes
        if num_blocks < 1:
            raise ConfigError(
                f"kv_cache_bytes is {config.kv_cache_bytes}; one block takes {block_bytes} bytes"
            )
    else:
        one_context = ceil_div(max_model_len, config.block_size)
        most_useful = one_context * config.max_num_seqs
        num_blocks = max(one_context, min(most_useful, DEFAULT_KV_BYTES // block_bytes))
    if num_blocks * config.block_size > MAX_SLOTS:
        raise ConfigError(
            f"the KV cache would have {num_blocks} blocks of {config.block_size} tokens; "
            f"more than {MAX_SLOTS} tokens can't be addressed"
        )
    if config.max_model_len is None:
        max_model_len = min(max_model_len, num_blocks * config.block_size)
    return ResolvedConfig(
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=config.block_size,
        num_kv_blocks=num_blocks,
        kv_dtype=kv_dtype,
        enable_prefix_caching=config.enable_prefix_caching,
        admission=config.admission,
        policy=config.policy,
        max_step_drafts=min(config.max_step_drafts, config.max_num_batched_tokens) if speculates else 0,
        check_integrity=config.check_integrity,
    )


def kv_bytes_per_token(kv_values_per_token: int, kv_dtype: str) -> int:
    """The one formula for KV memory per position."""
    return kv_values_per_token * KV_DTYPE_BYTES[kv_dtype]
