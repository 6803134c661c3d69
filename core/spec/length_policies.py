"""Draft-length policies by name."""

from __future__ import annotations

from mvllm.core.errors import ConfigError, shown
from mvllm.core.spec.adaptive_length import AdaptiveLength
from mvllm.core.spec.draft_length import (
    DEFAULT_LENGTH,
    DEFAULT_MAX_LENGTH,
    AcceptanceRate,
    AcceptedLength,
    DraftLengthPolicy,
    FixedLength,
)

DEFAULT_POLICY = "adaptive"
POLICIES = ("adaptive", "fixed", "acceptance-rate", "accepted-length")
"""Names `create_policy` knows, the default first."""


def create_policy(name: str = DEFAULT_POLICY, *, max_length: int | None = None) -> DraftLengthPolicy:
    """A fresh policy, with nothing learned yet.

    Args:
        max_length: the length itself for "fixed" (default 4), the greatest length for the others
            (default 8; "adaptive": 16).

    Raises:
        ConfigError: an unknown name, or a length below 1.
    """
    if max_length is not None and max_length < 1:
        raise ConfigError(f"the draft length must be at least 1, got {shown(max_length)}")
    if name == "adaptive":
        return AdaptiveLength() if max_length is None else AdaptiveLength(max_length)
    if name == "fixed":
        return FixedLength(max_length or DEFAULT_LENGTH)
    if name == "acceptance-rate":
        return AcceptanceRate(max_length or DEFAULT_MAX_LENGTH)
    if name == "accepted-length":
        return AcceptedLength(max_length or DEFAULT_MAX_LENGTH)
    raise ConfigError(f"draft policy must be one of {', '.join(POLICIES)}, got {shown(name)}")
