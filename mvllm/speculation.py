"""What the draft settings of an `LLM` mean, and the drafter that they ask for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mvllm.core.config import EngineConfig, ResolvedConfig, kv_bytes_per_token, resolve
from mvllm.core.errors import CapacityError, ConfigError, ModelFileError, shown
from mvllm.core.load.contents import Checkpoint
from mvllm.core.spec.draft_length import DraftLengthPolicy
from mvllm.core.spec.drafter import Drafter
from mvllm.core.spec.length_policies import DEFAULT_POLICY, create_policy
from mvllm.core.spec.lookup_first import LookupFirst
from mvllm.core.spec.model_drafter import (
    DEFAULT_FIRST_TOKENS,
    ModelDrafter,
    ModelDrafterConfig,
    catch_up_tokens_for,
)
from mvllm.core.spec.ngram_drafter import NgramDrafter
from mvllm.core.spec.speculation import Speculation
from mvllm.core.spec.vocab_limit import head_share_of
from mvllm.core.spec.vocabulary import ids_to_mask, token_texts
from mvllm.core.tensor import Backend
from mvllm.core.types import TokenId

DrafterName = Literal["ngram", "model", "ngram+model"]


@dataclass(frozen=True)
class DraftSettings:
    """What a user may say about drafting. The fields are arguments of `LLM`, where they are described.

    Raises:
        ConfigError: two of them contradict each other, or one needs another that is not given.
    """

    drafter: DrafterName | Drafter | None = None
    draft_model: str | Path | None = None
    draft_length: int | None = None
    draft_policy: str | DraftLengthPolicy | None = None
    draft_backend: str | Backend | None = None
    draft_context: int | None = None
    draft_kv_cache_bytes: int | None = None

    def __post_init__(self) -> None:
        with_model = ("model", "ngram+model")
        if not isinstance(self.drafter, Drafter) and self.drafter not in (None, "ngram", *with_model):
            raise ConfigError(
                f"drafter must be 'ngram', 'model', 'ngram+model' or a Drafter, got {shown(self.drafter)}"
            )
        if self.draft_model is not None and self.drafter not in (None, *with_model):
            raise ConfigError(
                "give a draft model or another drafter, not both; for n-gram lookup with a draft model say "
                "'ngram+model', or nothing"
            )
        if self.drafter in with_model and self.draft_model is None:
            raise ConfigError(
                f"drafter '{self.drafter}' needs draft_model (--draft-model), the model to draft with"
            )
        self._check_needs()
        for name, least in (("draft_length", 1), ("draft_context", 2), ("draft_kv_cache_bytes", 1)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise ConfigError(f"{name} must be a whole number of at least {least}, got {shown(value)}")
        if isinstance(self.draft_policy, DraftLengthPolicy):
            if self.draft_length is not None:
                raise ConfigError("draft_length goes with the name of a policy; a policy object has its own")
        elif self.draft_policy is not None:
            create_policy(self.draft_policy)  # refuses an unknown name now

    def _check_needs(self) -> None:
        needs_drafter = ("draft_length", "draft_policy")
        needs_model = ("draft_backend", "draft_context", "draft_kv_cache_bytes")
        if not self.wanted:
            for name in (*needs_drafter, *needs_model):
                if getattr(self, name) is not None:
                    raise ConfigError(
                        f"{name} needs a drafter: a draft model (draft_model, --draft-model) or "
                        "n-gram lookup (drafter='ngram', --drafter ngram)"
                    )
        elif self.draft_model is None:
            for name in needs_model:
                if getattr(self, name) is not None:
                    raise ConfigError(
                        f"{name} needs draft_model (--draft-model): other drafters have no model"
                    )

    @property
    def wanted(self) -> bool:
        """Whether anything is to be drafted."""
        return self.drafter is not None or self.draft_model is not None

    def policy(self) -> DraftLengthPolicy:
        """Fresh, if it was given by name."""
        if isinstance(self.draft_policy, DraftLengthPolicy):
            return self.draft_policy
        return create_policy(self.draft_policy or DEFAULT_POLICY, max_length=self.draft_length)

    def speculation(self, model_drafter: Drafter | None) -> Speculation | None:
        """What the engine gets; None if nothing is to be drafted.

        Args:
            model_drafter: the draft model's, if one was given.
        """
        if not self.wanted:
            return None
        drafter = self.drafter
        if drafter == "ngram":
            drafter = NgramDrafter()
        elif drafter == "model":
            drafter = model_drafter
        elif model_drafter is not None:
            drafter = LookupFirst(model_drafter)
        assert isinstance(drafter, Drafter)
        return Speculation(drafter, self.policy())


@dataclass(frozen=True)
class DraftModel:
    """A draft model that fits its target; nothing of it is loaded yet."""

    checkpoint: Checkpoint
    backend: Backend
    masked_token_ids: tuple[TokenId, ...]

    @classmethod
    def fitting(cls, target: Checkpoint, checkpoint: Checkpoint, backend: Backend) -> DraftModel:
        """
        Raises:
            ConfigError: the vocabularies do not fit together.
            ModelFileError: the backend can't run the draft model.
        """
        masked = ids_to_mask(
            token_texts(target.text, target.spec.vocab_size),
            token_texts(checkpoint.text, checkpoint.spec.vocab_size),
        )
        reason = backend.unsupported(checkpoint.spec, checkpoint.weights)
        if reason is not None:
            raise ModelFileError(f"the {backend.name} backend can't run the draft model: {reason}")
        return cls(checkpoint, backend, masked)

    def load(
        self, target: ResolvedConfig, end_token_ids: frozenset[TokenId], settings: DraftSettings
    ) -> ModelDrafter:
        """Load the model with a KV pool of its own, of the target's block size.

        Raises:
            ConfigError: the pool is too small for anything, or memory does not suffice.
        """
        spec = self.checkpoint.spec
        kv_dtype = self.backend.capabilities.kv_dtypes[0]
        if target.kv_dtype in self.backend.capabilities.kv_dtypes:
            kv_dtype = target.kv_dtype
        wanted = EngineConfig(
            max_model_len=min(target.max_model_len, spec.context_length),
            max_num_seqs=target.max_num_seqs,
            max_num_batched_tokens=target.max_num_batched_tokens,
            block_size=target.block_size,
            kv_cache_bytes=settings.draft_kv_cache_bytes,
        )
        bytes_per_token = kv_bytes_per_token(spec.kv_values_per_token, kv_dtype)
        try:
            sizes = resolve(
                wanted,
                model_context=spec.context_length,
                kv_bytes_per_token=bytes_per_token,
                kv_dtype=kv_dtype,
            )
        except ConfigError as error:
            raise ConfigError(f"draft model: {error}; see draft_kv_cache_bytes") from error
        config = ModelDrafterConfig(
            num_kv_blocks=sizes.num_kv_blocks,
            block_size=sizes.block_size,
            max_model_len=sizes.max_model_len,
            max_num_seqs=sizes.max_num_seqs,
            vocab_size=spec.vocab_size,
            masked_token_ids=self.masked_token_ids,
            end_token_ids=end_token_ids,
            catch_up_tokens=catch_up_tokens_for(sizes.max_num_seqs),
            first_tokens=settings.draft_context or DEFAULT_FIRST_TOKENS,
            enable_prefix_caching=target.enable_prefix_caching,
            head_share=head_share_of(self.checkpoint.weights, self.backend.capabilities),
        )
        try:
            model = self.backend.load(spec, self.checkpoint.weights, config.geometry(kv_dtype))
        except (MemoryError, CapacityError) as error:
            raise ConfigError(
                f"memory does not suffice for the draft model with {config.num_kv_blocks} KV blocks of "
                f"{config.block_size} ({error}); set draft_kv_cache_bytes or max_model_len lower"
            ) from error
        return ModelDrafter(model, config)
