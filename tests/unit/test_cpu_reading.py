"""Which reading a processor gets."""

from __future__ import annotations

import pytest

from mvllm.backends.cpu import isa as instruction_sets
from mvllm.backends.cpu.isa import AVX2, AVX512, PORTABLE, Isa
from mvllm.backends.cpu.reading import best_reading


def reading(monkeypatch: pytest.MonkeyPatch, processor: str, isa: Isa, bits: int = 4) -> tuple[int, ...]:
    """Tokens, streams of short and of long rows, and whether past the caches."""
    monkeypatch.setattr(instruction_sets.llvmlite.binding, "get_host_cpu_name", lambda: processor)
    best = best_reading(isa, bits)
    return best.most_tokens, best.short_streams, best.long_streams, best.past_caches


def test_a_processor_gets_what_was_measured_on_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reading(monkeypatch, "znver4", AVX512) == (8, 1, 2, True)
    assert reading(monkeypatch, "znver4", AVX512, bits=8) == (8, 2, 2, False)
    assert reading(monkeypatch, "znver4", AVX2) == (1, 1, 1, True)
    assert reading(monkeypatch, "sapphirerapids", AVX512) == (2, 4, 4, False)
    assert reading(monkeypatch, "znver3", AVX2) == (1, 1, 1, False)
    assert reading(monkeypatch, "generic", PORTABLE) == (1, 1, 1, False)


@pytest.mark.parametrize("processor", ["znver4", "znver3", "sapphirerapids"])
def test_as_many_tokens_as_a_tile_may_have(monkeypatch: pytest.MonkeyPatch, processor: str) -> None:
    for isa in (AVX512, AVX2, PORTABLE):
        for bits in (4, 8):
            most, *_ = reading(monkeypatch, processor, isa, bits)
            assert most <= isa.max_tokens
