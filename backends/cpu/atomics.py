"""What threads need to meet: atomic int64 words at raw addresses, and ways to wait without burning a core."""

from __future__ import annotations

import platform
import sys
from typing import Any

from numba import types
from numba.extending import intrinsic

from mvllm.backends.cpu.jit import kernel
from mvllm.backends.cpu.vector import I32, I64, VOID, Emitter, Value

_ON_X86 = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")
_ON_ARM64 = platform.machine().lower() in ("arm64", "aarch64")
_AARCH64_YIELD = 1

_PAUSES = 2000  # about 30 us: longer than an undisturbed thread ever waits
_YIELDS = 200
_SLEEP_US = 50


@intrinsic
def atomic_add(typing: Any, address: types.Type, value: types.Type) -> Any:
    """Add to the word and return what it held before; sequentially consistent."""

    def emit(context: Any, builder: Value, signature: Any, arguments: Any) -> Value:
        pointer = builder.inttoptr(arguments[0], I64.as_pointer())
        return builder.atomic_rmw("add", pointer, arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), emit


@intrinsic
def atomic_exchange(typing: Any, address: types.Type, value: types.Type) -> Any:
    """Set the word and return what it held before; sequentially consistent."""

    def emit(context: Any, builder: Value, signature: Any, arguments: Any) -> Value:
        pointer = builder.inttoptr(arguments[0], I64.as_pointer())
        return builder.atomic_rmw("xchg", pointer, arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), emit


@intrinsic
def atomic_load(typing: Any, address: types.Type) -> Any:
    """The word; sequentially consistent."""

    def emit(context: Any, builder: Value, signature: Any, arguments: Any) -> Value:
        pointer = builder.inttoptr(arguments[0], I64.as_pointer())
        return builder.load_atomic(pointer, "seq_cst", 8)

    return types.int64(types.int64), emit


@intrinsic
def _pause(typing: Any) -> Any:
    """Tell the core that this is a spin loop; nothing where there is no such instruction."""

    def emit(context: Any, builder: Value, signature: Any, arguments: Any) -> Value:
        if _ON_X86:
            Emitter(builder).call("llvm.x86.sse2.pause", VOID)
        elif _ON_ARM64:
            Emitter(builder).call("llvm.aarch64.hint", VOID, I32(_AARCH64_YIELD))
        return context.get_dummy_value()

    return types.void(), emit


if sys.platform == "win32":
    # The C runtime there has neither call; spinning is all that is left.
    _yield_core = _pause

    @kernel("void(int64)")
    def _sleep_us(duration: Any) -> Any:
        _pause()

else:
    _sched_yield = types.ExternalFunction("sched_yield", types.int32())
    _usleep = types.ExternalFunction("usleep", types.int32(types.uint32))

    @kernel("void()")
    def _yield_core() -> Any:
        _sched_yield()

    @kernel("void(int64)")
    def _sleep_us(duration: Any) -> Any:
        _usleep(duration)


@kernel("void(int64)")
def back_off(tries: Any) -> Any:
    """Wait a moment, the longer the more `tries` there were: spin, then yield the core, then sleep.

    A thread whose partner has lost its core must give its own away, or both stand still.
    """
    if tries < _PAUSES:
        _pause()
    elif tries < _PAUSES + _YIELDS:
        _yield_core()
    else:
        _sleep_us(_SLEEP_US)
