"""In which order running rows share the prompt tokens that a step has left over.

A policy is a pure ordering of rows and nothing else. Admission and preemption go by age under every policy,
and every running row gets its minimum first, so no policy can starve a request: a prefill of p tokens ends
after at most p steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from mvllm.core.step import RowView

PrefillOrder = Callable[[Sequence[RowView]], Sequence[RowView]]
"""Prefilling rows, oldest first -> the same rows in the order in which they are served."""


def first_come_first_served(rows: Sequence[RowView]) -> Sequence[RowView]:
    """Oldest first."""
    return rows


def shortest_prefill_first(rows: Sequence[RowView]) -> Sequence[RowView]:
    """Fewest tokens left to compute first, older first among equals."""
    return sorted(rows, key=lambda row: row.num_tokens - row.num_computed)


def round_robin(rows: Sequence[RowView]) -> Sequence[RowView]:
    """Fewest tokens computed so far first, older first among equals: chunks of equal prompts take turns."""
    return sorted(rows, key=lambda row: row.num_computed)


POLICIES: Mapping[str, PrefillOrder] = MappingProxyType(
    {
        "fcfs": first_come_first_served,
        "shortest-prefill": shortest_prefill_first,
        "round-robin": round_robin,
    }
)
