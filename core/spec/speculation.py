"""What an engine needs in order to speculate."""

from __future__ import annotations

from dataclasses import dataclass

from mvllm.core.spec.draft_length import DraftLengthPolicy
from mvllm.core.spec.drafter import Drafter


@dataclass(frozen=True, slots=True)
class Speculation:
    """Who drafts, and who decides how much. Both belong to one engine, which closes the drafter."""

    drafter: Drafter
    policy: DraftLengthPolicy
