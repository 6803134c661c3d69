"""How the weights of a few tokens' products are best read from memory: measured, by processor."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mvllm.backends.cpu.isa import Isa, is_zen4


@dataclass(frozen=True)
class Reading:
    """How a thread reads its row blocks of a matrix for products of some tokens, each block once for all."""

    most_tokens: int  # of such a product
    short_streams: int  # parts of the row blocks that are read side by side, each from end to end
    long_streams: int  # the same where the tokens' activations leave the first-level cache
    bytes_ahead: int  # of all streams together, that are prefetched
    past_caches: bool = False  # prefetches go past the outer caches


_FEW_REGISTERS = Reading(most_tokens=1, short_streams=1, long_streams=1, bytes_ahead=2560)
"""Measured on Zen 3: more tokens need a second row block to share what is loaded of them."""

_ZEN4_FEW_REGISTERS = replace(_FEW_REGISTERS, past_caches=True)

_MANY_REGISTERS = Reading(most_tokens=2, short_streams=4, long_streams=4, bytes_ahead=4096)
"""On an Intel Xeon with AMX one stream gets 88 % of what memory gives, four get 94 %, and prefetches past the
caches a quarter."""

_ZEN4_MANY_REGISTERS = Reading(
    most_tokens=8, short_streams=1, long_streams=2, bytes_ahead=2560, past_caches=True
)
"""With one token 5 % faster than through the caches, which keep the interpreter's working set instead. Of 4
bits 1.33 times as fast as tiles with 3 tokens, 1.2 with 4 and 1.08 with 8, where memory is fast. With long
rows two row blocks have to share the activations: 1.1 to 1.18 times as fast with 4 to 6 tokens."""

_ZEN4_8_BITS = Reading(most_tokens=8, short_streams=2, long_streams=2, bytes_ahead=5120)
"""Of 8 bits 1.08 to 1.3 times as fast as one stream past the caches with 3 to 8 tokens, and 1 to 1.25 times
with one."""

_LANES_OF_MANY_REGISTERS = 16  # AVX-512, with twice the registers of AVX2


def best_reading(isa: Isa, bits: int) -> Reading:
    """Of quantized weights with so many bits, on this machine. With more than its `most_tokens` tiles are
    better."""
    if isa.lanes != _LANES_OF_MANY_REGISTERS:
        return _ZEN4_FEW_REGISTERS if is_zen4() else _FEW_REGISTERS
    if not is_zen4():
        return _MANY_REGISTERS
    return _ZEN4_8_BITS if bits == 8 else _ZEN4_MANY_REGISTERS
