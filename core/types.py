"""Identifier types and the integer arithmetic everyone shares.

Intervals are half-open throughout the project: ``[start, end)``.
"""

from __future__ import annotations

from typing import NewType

BlockId = NewType("BlockId", int)
"""Physical KV block, in ``[0, num_blocks)``."""

RequestId = NewType("RequestId", str)
"""Name of one sequence in the engine; each of ``n`` siblings has its own."""

TokenId = int
"""Vocabulary index. Plain ``int``: token ids cross every boundary in bulk."""

MASK_64 = (1 << 64) - 1
"""Keeps the low 64 bits of an integer; seeds and the states of generators are in ``[0, 2**64)``."""


def ceil_div(numerator: int, denominator: int) -> int:
    """Smallest integer ``q`` with ``q * denominator >= numerator``."""
    return -(-numerator // denominator)
