"""The MLX backend's memory: pools written in place, nothing that grows with time, all of it given back."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mvllm.backends.mlx import graphs
from mvllm.backends.mlx.backend import MlxBackend
from mvllm.backends.mlx.model import MlxModel
from mvllm.backends.mlx.options import MlxOptions
from mvllm.core.errors import CapacityError
from mvllm.core.step import ForwardBatch
from mvllm.core.tensor import KvGeometry
from tests.conformance.random_models import ModelShape, Row, geometry, make_batch, random_model

BLOCK_SIZE = 4
NUM_BLOCKS = 4096
SHAPE = ModelShape(num_layers=1, hidden_size=32, intermediate_size=32, vocab_size=40)
POOL_BYTES = 2 * (NUM_BLOCKS + 1) * BLOCK_SIZE * SHAPE.num_kv_heads * SHAPE.head_dim * 4


def load(size: KvGeometry, options: MlxOptions | None = None) -> MlxModel:
    spec, weights = random_model(SHAPE, seed=0)
    model = MlxBackend(options).load(spec, weights, size)
    assert isinstance(model, MlxModel)
    return model


@pytest.mark.parametrize("exact", [False, True])
def test_a_step_writes_the_pool_in_place(exact: bool) -> None:
    model = load(geometry(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE), MlxOptions(exact=exact))
    with closing(model):
        batch = make_batch([Row([1, 2, 3, 4, 5], 0, 5, [7, 2])], BLOCK_SIZE)
        for _ in range(3):
            before = mx.get_active_memory()
            mx.reset_peak_memory()
            model.step(batch)
            model.taps(batch)
            assert mx.get_peak_memory() - before < POOL_BYTES / 8
        model.write_blocks([3], model.read_blocks([7]))
        assert mx.get_peak_memory() - before < POOL_BYTES / 8


def test_a_compiled_graph_computes_the_same_and_writes_in_place_too() -> None:
    """One shape only: on the CPU device MLX takes seconds to compile its kernels."""
    batch = make_batch([Row([1, 2, 3], 0, 3, [7])], BLOCK_SIZE)
    size = geometry(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    with closing(load(size)) as plain:
        expected, blocks = plain.logits(batch), plain.read_blocks([7])
    with closing(load(size, MlxOptions(compile=True))) as model:
        model.logits(batch)
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        np.testing.assert_allclose(model.logits(batch), expected, atol=1e-5, rtol=0)
        assert mx.get_peak_memory() - before < POOL_BYTES / 8
        np.testing.assert_allclose(model.read_blocks([7]), blocks, atol=1e-5, rtol=0)
        assert model.num_graphs == 1


def random_batches(count: int, seed: int) -> Iterator[ForwardBatch]:
    rng = np.random.default_rng(seed)
    for _ in range(count):
        free = rng.permutation(NUM_BLOCKS).tolist()
        rows = []
        for _ in range(rng.integers(1, 7)):
            start, tokens = int(rng.integers(0, 100)), int(rng.choice([1, 1, 1, 3, 12]))
            table = [free.pop() for _ in range(-(-(start + tokens) // BLOCK_SIZE))]
            sequence = rng.integers(0, SHAPE.vocab_size, start + tokens).tolist()
            rows.append(Row(sequence, start, start + tokens, table, int(rng.integers(0, 2))))
        yield make_batch(rows, BLOCK_SIZE)


def test_c8_memory_and_graphs_are_bounded_over_a_thousand_random_steps() -> None:
    model = load(geometry(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE))
    with closing(model):
        held = []
        for number, batch in enumerate(random_batches(1000, seed=1)):
            model.step(batch)
            assert model.num_graphs <= graphs.MAX_GRAPHS
            if number % 100 == 99:
                gc.collect()
                held.append(mx.get_active_memory())
        assert model.num_graphs == graphs.MAX_GRAPHS  # so the bound was reached
        assert max(held) - min(held) < 1 << 16


def test_the_longest_unused_graph_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 2)
    built: list[Any] = []

    def build(shape: Any) -> Any:
        built.append(shape)
        return object()

    kept = graphs.Graphs(build, lambda graph: graph)
    shapes: Any = "aabacab"
    for shape in shapes:
        kept.get(shape)
    assert built == ["a", "b", "c", "b"]
    assert len(kept) == 2


def test_close_gives_the_memory_back_at_once() -> None:
    gc.collect()
    gc.disable()
    try:
        before = mx.get_active_memory()
        model = load(geometry(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE))
        batch = make_batch([Row([1, 2], 0, 2, [0])], BLOCK_SIZE)
        model.step(batch)
        model.taps(batch)
        assert mx.get_active_memory() - before > POOL_BYTES
        model.close()
        model.close()
        assert mx.get_active_memory() - before < 1 << 16
    finally:
        gc.enable()


def test_a_pool_beyond_the_memory_is_refused_before_anything_is_allocated() -> None:
    before = mx.get_active_memory()
    with pytest.raises(CapacityError, match="KV pool"):
        load(replace(geometry(num_blocks=1 << 29, block_size=BLOCK_SIZE), max_context=64))
    gc.collect()
    assert mx.get_active_memory() - before < 1 << 16
