"""Planted bugs in the CPU backend's products."""

from __future__ import annotations

import inspect
from typing import Any

from mvllm.backends.cpu.quantized_kernels import emit_tile
from mvllm.backends.cpu.quantized_panels import emit_panel_tile
from mvllm.backends.cpu.vector import I64, Emitter, Value


class _UnfusedEmitter(Emitter):
    """Rounds after the multiplication as well."""

    def fma(self, x: Value, y: Value, z: Value) -> Value:
        return self.builder.fadd(self.builder.fmul(x, y), z)


def emit_tile_unfused_for_batches(
    emitter: Emitter,
    isa: Any,
    layout: Any,
    records: Any,
    blocks: int,
    tokens: int,
    *rest: Value,
    **options: Any,
) -> None:
    """Tiles of several tokens use another formula than the tile of one."""
    chosen = _UnfusedEmitter(emitter.builder) if tokens > 1 else emitter
    emit_tile(chosen, isa, layout, records, blocks, tokens, *rest, **options)


def emit_panel_tile_without_earlier_chunks(emitter: Emitter, *arguments: Any) -> None:
    """Every chunk of inputs overwrites the sums of those before it."""
    given = inspect.signature(emit_panel_tile).bind(emitter, *arguments).arguments
    emit_panel_tile(**{**given, "is_first": I64(1)})
