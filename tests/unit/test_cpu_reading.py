"""Which reading a processor gets."""

from __future__ import annotations

import pytest

from mvllm.backends.cpu import reading
from mvllm.backends.cpu.isa import AVX2, AVX512, AVX512_GFNI, PORTABLE, Isa
from mvllm.backends.cpu.layout import NARROW, WIDE, ActivationLayout


def readings(
    monkeypatch: pytest.MonkeyPatch, processor: str, isa: Isa, records: ActivationLayout
) -> list[str]:
    """Tokens, streams and whether past the caches, for each."""
    monkeypatch.setattr(reading.llvmlite.binding, "get_host_cpu_name", lambda: processor)
    return [
        f"{one.most_tokens}: {one.streams}{' past' if one.past_caches else ''}"
        for one in reading.best_readings(isa, records)
    ]


@pytest.mark.parametrize("isa", [AVX512, AVX512_GFNI])
def test_zen4_reads_up_to_eight_tokens_in_streams(monkeypatch: pytest.MonkeyPatch, isa: Isa) -> None:
    assert readings(monkeypatch, "znver4", isa, NARROW) == ["8: 1 past"]
    assert readings(monkeypatch, "znver4", isa, WIDE) == ["2: 1 past", "8: 2"]


@pytest.mark.parametrize("records", [NARROW, WIDE])
def test_others_read_one_or_two(monkeypatch: pytest.MonkeyPatch, records: ActivationLayout) -> None:
    assert readings(monkeypatch, "sapphirerapids", AVX512, records) == ["2: 4"]
    assert readings(monkeypatch, "znver4", AVX2, records) == ["1: 1 past"]
    assert readings(monkeypatch, "znver3", AVX2, records) == ["1: 1"]
    assert readings(monkeypatch, "generic", PORTABLE, records) == ["1: 1"]


def test_as_many_tokens_as_a_tile_may_have() -> None:
    for isa in (AVX512, AVX2, PORTABLE):
        for records in (NARROW, WIDE):
            most = [one.most_tokens for one in reading.best_readings(isa, records)]
            assert most == sorted(most)
            assert most[-1] <= isa.max_tokens
