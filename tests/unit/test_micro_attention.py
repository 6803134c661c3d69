"""The micro benchmark of attention: that it runs what it says."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest

from mvllm.bench.micro import attention
from mvllm.bench.micro.attention import AttentionAlone, Heads, Load, measure
from mvllm.bench.micro.read_bandwidth import ReadBandwidth

HEADS = Heads("tiny", layers=2, heads=4, kv_heads=2, head_dim=16)


@pytest.fixture(autouse=True)
def small_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_CACHES_BYTES", 1 << 16)


@pytest.mark.parametrize("load", [Load(3, 1, 40), Load(1, 7, 20)])
def test_every_query_gets_a_mean_of_values(load: Load) -> None:
    with closing(AttentionAlone(HEADS, load, "f32", threads=2)) as alone:
        alone.step()
        output = alone.output
        assert output.shape == (load.rows * load.chunk, HEADS.heads * HEADS.head_dim)
        assert (output != 0).all() and np.abs(output).max() < 5


def test_rates_count_every_byte_and_operation_once() -> None:
    load = Load(3, 2, 40)
    with closing(ReadBandwidth(2, 1 << 16)) as bandwidth:
        result = measure(HEADS, load, "f16", 2, bandwidth, seconds=0)
    assert result.kv_bytes == 3 * 40 * 2 * 2 * 16 * 2
    assert result.flops == 4 * 16 * 4 * 3 * (39 + 40)
    assert result.kv_rate == result.kv_bytes / result.seconds
    assert result.bandwidth > 0
