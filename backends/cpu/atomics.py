"""What threads need to meet: atomic int64 words at raw addresses, and ways to wait without burning a core."""

from __future__ import annotations

import platform
import sys
from typing import Any

from mvllm.backends.cpu.jit import kernel
from mvllm.backends.cpu.vector import I32, I64, VOID, Emitter, Value, emitted

_ON_X86 = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")
_ON_ARM64 = platform.machine().lower() in ("arm64", "aarch64")
_AARCH64_YIELD = 1

_SLEEP_US = 20


def _word(emitter: Emitter, address: Value) -> Value:
    return emitter.builder.inttoptr(address, I64.as_pointer())


def _emit_add(emitter: Emitter, address: Value, value: Value) -> Value:
    """Add to the word and return what it held before; sequentially consistent."""
    return emitter.builder.atomic_rmw("add", _word(emitter, address), value, "seq_cst")


def _emit_exchange(emitter: Emitter, address: Value, value: Value) -> Value:
    """Set the word and return what it held before; sequentially consistent."""
    return emitter.builder.atomic_rmw("xchg", _word(emitter, address), value, "seq_cst")


def _emit_load(emitter: Emitter, address: Value) -> Value:
    """The word; sequentially consistent."""
    return emitter.builder.load_atomic(_word(emitter, address), "seq_cst", 8)


def _emit_pause(emitter: Emitter) -> None:
    """Tell the core that this is a spin loop; nothing where there is no such instruction."""
    if _ON_X86:
        emitter.call("llvm.x86.sse2.pause", VOID)
    elif _ON_ARM64:
        emitter.call("llvm.aarch64.hint", VOID, I32(_AARCH64_YIELD))


def _emit_sleep(emitter: Emitter) -> None:
    """Leave the core for a moment; on Windows, whose C runtime has no such call, only pause."""
    if sys.platform == "win32":
        _emit_pause(emitter)
    else:
        emitter.call("usleep", I32, I32(_SLEEP_US))


atomic_add = emitted(_emit_add, 2, returns="int64")
atomic_exchange = emitted(_emit_exchange, 2, returns="int64")
atomic_load = emitted(_emit_load, 1, returns="int64")
_pause = emitted(_emit_pause, 0)
_sleep = emitted(_emit_sleep, 0)


@kernel("void(int64, int64)")
def back_off(tries: Any, spins: Any) -> Any:
    """Wait a moment: spin for the first `spins` tries, sleep from then on. How long a try takes depends
    on the processor.

    A thread whose partner has lost its core must leave its own, so that the partner is moved there. Yielding
    does not do: the core stays busy, and with one core taken by others decoding was half as fast, with two
    taken a sixth.
    """
    if tries < spins:
        _pause()
    else:
        _sleep()
