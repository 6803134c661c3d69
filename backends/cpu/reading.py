"""How the weights of a few tokens' products are best read from memory: measured, by processor."""

from __future__ import annotations

from dataclasses import dataclass

import llvmlite.binding

from mvllm.backends.cpu.isa import Isa
from mvllm.backends.cpu.layout import ActivationLayout


@dataclass(frozen=True)
class Reading:
    """How a thread reads its row blocks of a matrix for products of some tokens, each block once for all."""

    most_tokens: int  # of such a product
    streams: int  # parts of the row blocks that are read side by side, each from end to end
    bytes_ahead: int  # of each, that are prefetched
    past_caches: bool  # prefetches go past the outer caches


_FEW_REGISTERS = (Reading(most_tokens=1, streams=1, bytes_ahead=2560, past_caches=False),)
"""Measured on Zen 3: more tokens need a second row block to share what is loaded of them."""

_ZEN4_FEW_REGISTERS = (Reading(most_tokens=1, streams=1, bytes_ahead=2560, past_caches=True),)

_MANY_REGISTERS = (Reading(most_tokens=2, streams=4, bytes_ahead=1024, past_caches=False),)
"""On an Intel Xeon with AMX one stream gets 88 % of what memory gives, four get 94 %, and prefetches past the
caches a quarter."""

_ZEN4_FEW_TOKENS = Reading(most_tokens=2, streams=1, bytes_ahead=2560, past_caches=True)
"""5 % faster than through the caches, which keep the interpreter's working set instead."""

_ZEN4_NARROW = (Reading(most_tokens=8, streams=1, bytes_ahead=2560, past_caches=True),)
"""Of 4 bits 1.33 times as fast as tiles with 3 tokens, 1.2 with 4 and 1.08 with 8, where memory is fast. Two
streams are a tenth faster with rows so long that activations leave the first-level cache, but slower with all
others."""

_ZEN4_WIDE = (_ZEN4_FEW_TOKENS, Reading(most_tokens=8, streams=2, bytes_ahead=2560, past_caches=False))
"""Twice as many activations are loaded, so that two row blocks have to share them. As fast as tiles, and 1.17
times with 8 tokens, whose tiles lack registers for addresses."""

_LANES_OF_MANY_REGISTERS = 16  # AVX-512, with twice the registers of AVX2


def best_readings(isa: Isa, records: ActivationLayout) -> tuple[Reading, ...]:
    """Of quantized weights on this machine, by number of tokens: the first that allows as many. With more
    tokens than the last allows tiles are better."""
    is_zen4 = llvmlite.binding.get_host_cpu_name() == "znver4"
    if isa.lanes != _LANES_OF_MANY_REGISTERS:
        return _ZEN4_FEW_REGISTERS if is_zen4 else _FEW_REGISTERS
    if not is_zen4:
        return _MANY_REGISTERS
    return _ZEN4_WIDE if records.is_wide else _ZEN4_NARROW
