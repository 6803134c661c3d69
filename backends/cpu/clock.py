"""The time, read inside compiled code: the same clock as Python's `time.perf_counter_ns`."""

from __future__ import annotations

import time

from llvmlite import ir

from mvllm.backends.cpu.vector import I8, I32, I64, Emitter, Value, emitted

_CLOCK: int | None = getattr(time, "CLOCK_UPTIME_RAW", getattr(time, "CLOCK_MONOTONIC", None))
"""What `perf_counter_ns` reads on macOS, and elsewhere."""

HAS_CLOCK = _CLOCK is not None
"""False on Windows; `now_ns` is 0 there."""

_NS_PER_S = 1_000_000_000


def _emit_now_ns(emitter: Emitter) -> Value:
    if _CLOCK is None:
        return I64(0)
    builder = emitter.builder
    with builder.goto_entry_block():
        timespec = builder.alloca(ir.ArrayType(I64, 2))
    emitter.call("clock_gettime", I32, I32(_CLOCK), builder.bitcast(timespec, I8.as_pointer()))
    address = builder.ptrtoint(timespec, I64)
    seconds, nanoseconds = emitter.load(I64, address), emitter.load(I64, address, 8)
    return builder.add(builder.mul(seconds, I64(_NS_PER_S)), nanoseconds)


now_ns = emitted(_emit_now_ns, 0, returns="int64")
"""Nanoseconds of that clock, int64."""
