"""One suite over every backend: each is compared with the reference (INVARIANTS 8)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mvllm.backends.mlx.options import MlxOptions
from mvllm.backends.registry import create_backend
from mvllm.core.sampling.sampler import sample
from mvllm.core.tensor import Backend, Model
from tests.conformance.random_models import ModelShape, Row, geometry, make_batch, random_model
from tests.sampling_cases import Row as SampledRow
from tests.sampling_cases import arrays, differences

AssertSame = Callable[..., None]

BACKENDS = ("reference", "cpu", "mlx", "mlx --exact")
BLOCK_SIZE = 4
TOLERANCE = {"f32": 2e-4, "f16": 2e-2, "bf16": 1e-1}
"""Largest absolute difference of logits from the reference (whose KV is float32), by KV type."""

SHAPES = [
    ModelShape(),
    ModelShape(num_heads=4, num_kv_heads=4, tied_head=True),
    ModelShape(num_heads=6, num_kv_heads=2, head_dim=24, biases=True),
    ModelShape(num_heads=8, num_kv_heads=1, head_dim=8, qk_norm=True, window=5),
    ModelShape(head_dim=32, soft_caps=True, activation="gelu_tanh"),
    ModelShape(head_dim=64, hidden_size=96, vocab_size=71, format_name="BF16"),
    ModelShape(num_heads=3, num_kv_heads=3, head_dim=128, format_name="F16", window=7),
]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return _create(request.param)


def _create(name: str) -> Backend:
    name, _, flag = name.partition(" ")
    if name == "mlx":
        pytest.importorskip("mlx.core")
    return create_backend(name, threads=2, mlx=MlxOptions(exact=flag == "--exact"))


@pytest.fixture(params=SHAPES, ids=lambda shape: f"{shape.num_heads}h{shape.num_kv_heads}kv{shape.head_dim}d")
def shape(request: pytest.FixtureRequest) -> ModelShape:
    return request.param


@pytest.fixture
def pair(backend: Backend, shape: ModelShape) -> Iterator[tuple[Model, Model]]:
    """(the backend's model, the reference's) with the same weights, both with float32 KV."""
    spec, weights = random_model(shape, seed=7)
    reference = create_backend("reference")
    with (
        closing(backend.load(spec, weights, geometry(block_size=BLOCK_SIZE))) as model,
        closing(reference.load(spec, weights, geometry(block_size=BLOCK_SIZE))) as expected,
    ):
        yield model, expected


def _tokens(seed: int, count: int, vocab: int = 70) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, vocab, count)]


def _tables(count: int, blocks_each: int, seed: int = 3, num_blocks: int = 64) -> list[list[int]]:
    """Disjoint tables of shuffled blocks."""
    order = np.random.default_rng(seed).permutation(num_blocks)
    return [[int(b) for b in order[i * blocks_each : (i + 1) * blocks_each]] for i in range(count)]


def test_c1_logits_of_ragged_batches_equal_the_reference(pair: tuple[Model, Model]) -> None:
    model, expected = pair
    tables = _tables(4, 10)
    sequences = [_tokens(i, 40) for i in range(4)]
    first = [Row(sequences[i], 0, stop, tables[i]) for i, stop in enumerate((1, 5, 16, 33))]
    # A chunk that goes on, two decodes, and a verification of several positions, in another order.
    second = [
        Row(sequences[2], 16, 17, tables[2]),
        Row(sequences[0], 1, 20, tables[0], num_logits=3),
        Row(sequences[3], 33, 34, tables[3]),
        Row(sequences[1], 5, 10, tables[1], num_logits=5),
    ]
    for rows in (first, second):
        batch = make_batch(rows, BLOCK_SIZE)
        np.testing.assert_allclose(model.logits(batch), expected.logits(batch), atol=TOLERANCE["f32"], rtol=0)


def test_c1_taps_at_layer_borders_equal_the_reference(pair: tuple[Model, Model]) -> None:
    model, expected = pair
    batch = make_batch([Row(_tokens(1, 9), 0, 9, [5, 2, 8])], BLOCK_SIZE)
    for ours, theirs in zip(model.taps(batch), expected.taps(batch), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=TOLERANCE["f32"], rtol=0)


@pytest.fixture
def assert_same(backend: Backend) -> AssertSame:
    """Equal to the bit where the backend promises that, else within the tolerance."""
    return partial(np.testing.assert_allclose, atol=0 if backend.capabilities.row_exact else 1e-4, rtol=0)


def test_c2_any_split_into_chunks_gives_the_same_bits(
    pair: tuple[Model, Model], assert_same: AssertSame
) -> None:
    model, _ = pair
    tokens = _tokens(11, 37)
    table = _tables(1, 10)[0]
    whole = model.logits(make_batch([Row(tokens, 0, 37, table)], BLOCK_SIZE))
    blocks = model.read_blocks(table)
    for cuts in ([0, 1, 37], [0, 7, 14, 21, 28, 35, 37], [0, 36, 37], list(range(38))):
        for start, stop in pairwise(cuts):
            logits = model.logits(make_batch([Row(tokens, start, stop, table)], BLOCK_SIZE))
        assert_same(logits, whole)
        assert_same(model.read_blocks(table)[:9], blocks[:9])


def test_c2_and_c3_company_order_and_block_names_change_no_bit(
    pair: tuple[Model, Model], assert_same: AssertSame
) -> None:
    model, _ = pair
    sequences = [_tokens(20 + i, length) for i, length in enumerate((1, 3, 4, 5, 15, 16, 17, 33))]
    alone = []
    for tokens in sequences:
        batch = make_batch([Row(tokens, 0, len(tokens), list(range(9)))], BLOCK_SIZE)
        alone.append(model.logits(batch)[0])
    order = [3, 0, 7, 5, 1, 6, 2, 4]
    ids = [int(block) for block in np.random.default_rng(9).permutation(64)]
    rows = []
    for index in order:
        needed = -(-len(sequences[index]) // BLOCK_SIZE)
        table, ids = ids[:needed], ids[needed:]
        rows.append(Row(sequences[index], 0, len(sequences[index]), table))
    together = model.logits(make_batch(rows, BLOCK_SIZE))
    for index, logits in zip(order, together, strict=True):
        assert_same(logits, alone[index])


def test_c4_only_granted_slots_are_written_and_only_visible_ones_are_read(
    pair: tuple[Model, Model],
) -> None:
    model, expected = pair
    every = list(range(64))
    poison = np.full_like(model.read_blocks(every), np.nan)
    model.write_blocks(every, poison)
    tokens, table = _tokens(5, 11), [9, 30, 2]
    batch = make_batch([Row(tokens, 0, 11, table)], BLOCK_SIZE)
    logits = model.logits(batch)
    assert np.isfinite(logits).all()
    np.testing.assert_allclose(logits, expected.logits(batch), atol=TOLERANCE["f32"], rtol=0)
    written = np.isfinite(model.read_blocks(every)).all(axis=(1, 2, 4, 5))  # [block, offset]
    assert {(b, o) for b, o in zip(*np.nonzero(written), strict=True)} == {
        (table[position // 4], position % 4) for position in range(11)
    }


def test_c6_contexts_around_block_borders(pair: tuple[Model, Model]) -> None:
    model, expected = pair
    table = [40, 41, 42]
    for length in (3, 4, 5, 7, 8, 9):
        tokens = _tokens(length, length + 1)
        for start, stop in ((0, length), (length, length + 1)):
            batch = make_batch([Row(tokens, start, stop, table)], BLOCK_SIZE)
            ours, theirs = model.logits(batch), expected.logits(batch)
            np.testing.assert_allclose(
                ours, theirs, atol=TOLERANCE["f32"], rtol=0, err_msg=f"{length} tokens"
            )


@pytest.mark.parametrize("limit", [1, 16, 37, 70, 5000])
def test_logits_from_the_vocab_limit_on_are_minus_infinity_and_the_others_keep_their_bits(
    backend: Backend, limit: int
) -> None:
    """A step draws what the reference sampler draws from such logits, whatever penalties and bias name."""
    spec, weights = random_model(ModelShape(vocab_size=71), seed=4)
    tokens, table = _tokens(6, 31), list(range(8))
    seen = {token: (1, token % 3) for token in (0, 5, 36, 37, 70)}
    settings = [
        SampledRow(
            temperature=0.0, counts=seen, repetition_penalty=1.5, bias={0: 1.0, 70: 50.0}, num_logprobs=0
        ),
        SampledRow(temperature=2.0, seed=3, position=9, top_p=0.9, bias={15: 2.0, 37: 50.0}, num_logprobs=0),
        SampledRow(temperature=0.7, seed=4, position=2, top_k=40, counts=seen, frequency_penalty=0.5),
    ]
    with closing(backend.load(spec, weights, geometry(block_size=BLOCK_SIZE))) as model:
        for start, stop, count in ((0, 29, 3), (29, 30, 1), (0, 31, 1)):
            plain = make_batch([Row(tokens, start, stop, table, num_logits=count)], BLOCK_SIZE)
            plain = replace(plain, sampling=arrays(settings[:count]))
            batch = replace(plain, vocab_limit=limit)
            expected = model.logits(plain)
            expected[:, limit:] = -np.inf
            np.testing.assert_array_equal(model.logits(batch), expected)
            assert not differences(model.step(batch), sample(expected, batch.sampling))
            np.testing.assert_array_equal(model.logits(plain)[:, :limit], expected[:, :limit])


def test_blocks_survive_a_round_trip_through_the_host(pair: tuple[Model, Model]) -> None:
    model, expected = pair
    tokens = _tokens(8, 12)
    model.logits(make_batch([Row(tokens, 0, 12, [4, 5, 6])], BLOCK_SIZE))
    kv = model.read_blocks([4, 5, 6])
    expected.logits(make_batch([Row(tokens, 0, 12, [4, 5, 6])], BLOCK_SIZE))
    np.testing.assert_allclose(kv, expected.read_blocks([4, 5, 6]), atol=TOLERANCE["f32"], rtol=0)
    model.write_blocks([10, 11, 12], kv)
    assert np.array_equal(model.read_blocks([10, 11, 12]), kv)
    more = [*tokens, 3]
    moved = model.logits(make_batch([Row(more, 12, 13, [10, 11, 12, 13])], BLOCK_SIZE))
    stayed = model.logits(make_batch([Row(more, 12, 13, [4, 5, 6, 7])], BLOCK_SIZE))
    assert np.array_equal(moved, stayed)


@pytest.mark.parametrize("name", BACKENDS)
def test_every_offered_kv_type_stays_near_the_reference(name: str) -> None:
    backend = _create(name)
    spec, weights = random_model(ModelShape(), seed=2)
    tokens, table = _tokens(2, 30), list(range(8))
    batch = make_batch([Row(tokens, 0, 30, table)], BLOCK_SIZE)
    with closing(create_backend("reference").load(spec, weights, geometry())) as reference:
        expected = reference.logits(batch)
    for dtype in backend.capabilities.kv_dtypes:
        with closing(backend.load(spec, weights, geometry(dtype=dtype))) as model:
            np.testing.assert_allclose(model.logits(batch), expected, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("name", BACKENDS[1:])
@settings(max_examples=15)
@given(data=st.data())
def test_c1_and_c2_hold_for_random_models_and_random_batches(name: str, data: st.DataObject) -> None:
    backend = _create(name)
    kv_heads = data.draw(st.sampled_from([1, 2, 3]), label="kv heads")
    shape = ModelShape(
        num_heads=kv_heads * data.draw(st.sampled_from([1, 2, 3, 5]), label="group"),
        num_kv_heads=kv_heads,
        head_dim=data.draw(st.sampled_from([8, 16, 24, 32, 64]), label="head dim"),
        hidden_size=data.draw(st.sampled_from([32, 64, 96]), label="hidden"),
        vocab_size=data.draw(st.integers(33, 80), label="vocab"),
        window=data.draw(st.sampled_from([None, 1, 3, 8]), label="window"),
        biases=data.draw(st.booleans(), label="biases"),
        qk_norm=data.draw(st.booleans(), label="qk norm"),
        tied_head=data.draw(st.booleans(), label="tied"),
        soft_caps=data.draw(st.booleans(), label="soft caps"),
        format_name=data.draw(st.sampled_from(["F32", "F16", "BF16"]), label="format"),
    )
    block_size = data.draw(st.sampled_from([1, 2, 4, 16]), label="block size")
    lengths = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=5), label="lengths")
    spec, weights = random_model(shape, seed=data.draw(st.integers(0, 99), label="seed"))
    size = geometry(block_size=block_size, num_blocks=128)
    tables = _tables(len(lengths), 20, num_blocks=128)
    sequences = [_tokens(i, length, shape.vocab_size) for i, length in enumerate(lengths)]
    rows = [Row(t, 0, len(t), table) for t, table in zip(sequences, tables, strict=True)]
    with (
        closing(backend.load(spec, weights, size)) as model,
        closing(create_backend("reference").load(spec, weights, size)) as reference,
    ):
        together = model.logits(make_batch(rows, block_size))
        expected = reference.logits(make_batch(rows, block_size))
        np.testing.assert_allclose(together, expected, atol=TOLERANCE["f32"], rtol=0)
        tolerance = 0 if backend.capabilities.row_exact else 1e-4
        for row, logits in zip(rows, together, strict=True):
            alone = model.logits(make_batch([row], block_size))[0]
            np.testing.assert_allclose(alone, logits, atol=tolerance, rtol=0)
