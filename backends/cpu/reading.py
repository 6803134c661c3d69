"""How the weights of a few tokens' products are best read from memory: measured, by processor."""

from __future__ import annotations

from dataclasses import dataclass

import llvmlite.binding

from mvllm.backends.cpu.isa import Isa


@dataclass(frozen=True)
class Reading:
    """How a thread reads its row blocks of a matrix, each once."""

    streams: int  # parts of them that it reads side by side, each from end to end
    bytes_ahead: int  # of each, that are prefetched
    past_caches: bool  # prefetches go past the outer caches


_ONE_STREAM = Reading(streams=1, bytes_ahead=2560, past_caches=False)
"""Measured on Zen 3; also where there are few registers."""

_BY_PROCESSOR = {
    "znver3": _ONE_STREAM,
    # 5 % faster than through the caches, which keep the interpreter's working set instead.
    "znver4": Reading(streams=1, bytes_ahead=2560, past_caches=True),
}
"""By LLVM's name of the processor."""

_FOUR_STREAMS = Reading(streams=4, bytes_ahead=1024, past_caches=False)
"""On an Intel Xeon with AMX one stream gets 88 % of what memory gives, four get 94 %, and prefetches past the
caches a quarter."""

_LANES_OF_MANY_REGISTERS = 16  # AVX-512, with twice the registers of AVX2


def best_reading(isa: Isa) -> Reading:
    """Of quantized weights, on this machine."""
    others = _FOUR_STREAMS if isa.lanes == _LANES_OF_MANY_REGISTERS else _ONE_STREAM
    return _BY_PROCESSOR.get(llvmlite.binding.get_host_cpu_name(), others)
