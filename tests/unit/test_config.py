"""From a user's settings to complete ones."""

from __future__ import annotations

from typing import Any

import pytest

from mvllm.core.config import EngineConfig, ResolvedConfig, resolve
from mvllm.core.errors import ConfigError


def resolved(speculates: bool, **settings: Any) -> ResolvedConfig:
    return resolve(
        EngineConfig(**settings),
        model_context=256,
        kv_bytes_per_token=8,
        kv_dtype="f32",
        speculates=speculates,
    )


def test_drafts_cost_logit_rows_only_in_an_engine_that_speculates() -> None:
    assert resolved(False, max_num_seqs=8).max_logit_rows == 8
    assert resolved(True, max_num_seqs=8, max_step_drafts=20).max_logit_rows == 28


def test_a_step_never_drafts_more_than_its_tokens() -> None:
    assert resolved(True, max_num_seqs=2, max_num_batched_tokens=5).max_step_drafts == 5


@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_a_bound_on_drafts_that_is_no_count_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="max_step_drafts must be a whole number of at least 1"):
        EngineConfig(max_step_drafts=value)  # type: ignore[arg-type]
