"""The cpu backend's attention: right to float32, and the same bits however it is cut and paged."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mvllm.backends.cpu import elementwise
from mvllm.backends.cpu.attention import MAX_ROWS, PART
from mvllm.backends.cpu.attention_kernels import SPAN
from mvllm.backends.cpu.kv_pool import KvLayout, KvPool
from mvllm.backends.cpu.tables import Epilogue
from mvllm.core.errors import InvariantViolation
from tests.cpu_attention import Case, PagedAttention, expected_attention, random_sequence

TOLERANCE = 6e-6
"""Absolute, for outputs of about 1 from scores of up to 8, each a chain of head_dim roundings. KV in float16
is rounded beforehand, so it has the same."""

CASES = st.builds(
    Case,
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 4, 7]),
    head_dim=st.sampled_from([2, 16, 24, 64, 80, 128]),
    block_size=st.sampled_from([1, 2, 3, 8, 16, 24, 32, 64]),
    dtype=st.sampled_from(["f32", "f16"]),
    window=st.sampled_from([None, 1, 2, 5, 16, 33, SPAN, 300]),
    soft_cap=st.sampled_from([None, 3.0]),
)
LONG = st.sampled_from([SPAN - 1, SPAN, SPAN + 1, 2 * SPAN + 17, PART, PART + 1, 2 * PART + SPAN + 3])
"""Contexts with borders of spans and parts at or near their ends."""


@given(CASES, st.integers(1, 70), st.integers(0, 1000))
def test_attention_equals_its_definition(case: Case, num_tokens: int, seed: int) -> None:
    sequence = random_sequence(case, num_tokens, seed)
    out = PagedAttention(case, sequence, seed).run(0, num_tokens, MAX_ROWS)
    expected = expected_attention(case, sequence, range(num_tokens))
    np.testing.assert_allclose(out, expected, atol=TOLERANCE, rtol=0)


@settings(max_examples=settings().max_examples // 3)
@given(CASES, LONG, st.integers(1, 9), st.integers(1, 4))
def test_long_contexts_equal_the_definition_and_may_be_split(
    case: Case, num_tokens: int, num_queries: int, pieces: int
) -> None:
    sequence = random_sequence(case, num_tokens, seed=num_queries)
    paged = PagedAttention(case, sequence)
    first = num_tokens - num_queries
    out = paged.run(first, num_tokens, MAX_ROWS, pieces)
    expected = expected_attention(case, sequence, range(first, num_tokens))
    np.testing.assert_allclose(out, expected, atol=TOLERANCE, rtol=0)
    for rows, other_pieces in ((MAX_ROWS, 1), (2, 3), (1, 1)):
        again = paged.run(first, num_tokens, rows, other_pieces)
        assert np.array_equal(again.view(np.int32), out.view(np.int32)), (rows, other_pieces)


@given(CASES, st.integers(1, 50), st.integers(0, 1000), st.data())
def test_any_chunk_any_item_and_any_block_size_give_the_same_bits(
    case: Case, num_tokens: int, seed: int, data: st.DataObject
) -> None:
    sequence = random_sequence(case, num_tokens, seed)
    whole = PagedAttention(replace(case, block_size=16), sequence, seed).run(0, num_tokens, MAX_ROWS)
    other = PagedAttention(case, sequence, seed + 1)
    start = 0
    while start < num_tokens:
        stop = data.draw(st.integers(start + 1, num_tokens), label="chunk end")
        rows = data.draw(st.integers(1, MAX_ROWS), label="rows per item")
        chunk = other.run(start, stop, rows)
        assert np.array_equal(chunk.view(np.int32), whole[start:stop].view(np.int32))
        start = stop


def test_an_infinite_value_harms_only_the_positions_that_see_it() -> None:
    case = Case(kv_heads=1, group=2, window=6)
    sequence = random_sequence(case, 20, seed=5)
    clean = PagedAttention(case, sequence).run(0, 20, MAX_ROWS)
    sequence.v[9] = np.inf
    out = PagedAttention(case, sequence).run(0, 20, MAX_ROWS)
    unharmed = [position for position in range(20) if not 9 <= position < 9 + 6]
    assert np.array_equal(out[unharmed], clean[unharmed])
    assert np.isinf(out[9:15]).all()


def test_a_nan_key_makes_the_result_nan() -> None:
    case = Case(kv_heads=1, group=1)
    sequence = random_sequence(case, 5, seed=1)
    sequence.k[2, 0, 3] = np.nan
    out = PagedAttention(case, sequence).run(0, 5, MAX_ROWS)
    assert not np.isnan(out[:2]).any()
    assert np.isnan(out[2:]).all()


def test_float16_kv_is_rounded_to_nearest_even() -> None:
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    finite = np.sort(halves[np.isfinite(halves)])
    middles = (finite[:-1].astype(np.float64) + finite[1:]) / 2
    values = np.concatenate(
        [finite, middles.astype(np.float32), np.nextafter(middles.astype(np.float32), np.float32(np.inf))]
    )
    values = np.concatenate(
        [values, np.array([65519.9, 65520.0, 1e30, -1e30, np.inf, -np.inf, 1e-40], np.float32)]
    )
    values = np.resize(values, (len(values) // 64 + 1) * 64).reshape(-1, 1, 64)
    case = Case(kv_heads=1, group=1, head_dim=64, dtype="f16")
    sequence = random_sequence(case, len(values), seed=0)
    sequence.k[...] = values
    paged = PagedAttention(case, sequence)
    stored = paged.pool.read([int(block) for block in paged.table])[:, 0, 0].reshape(-1, 64)
    with np.errstate(over="ignore"):
        expected = values[:, 0].astype(np.float16).astype(np.float32)
    assert np.array_equal(stored[: len(values)], expected)


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("block_size", [1, 3, 8, 16, 24, 64])
def test_blocks_read_back_as_written_and_no_other_changes(block_size: int, dtype: str) -> None:
    pool = KvPool(KvLayout(2, 4, block_size, 3, 24, dtype))
    rng = np.random.default_rng(block_size)
    shape = (2, 2, 2, block_size, 3, 24)
    kv = rng.standard_normal(shape).astype(np.float16).astype(np.float32)
    before = pool.read([0, 1, 2, 3])
    pool.write([3, 1], kv)
    assert np.array_equal(pool.read([3, 1]), kv)
    assert np.array_equal(pool.read([0, 2]), before[[0, 2]])


def test_unknown_blocks_and_other_shapes_are_refused() -> None:
    pool = KvPool(KvLayout(1, 2, 4, 1, 8, "f32"))
    kv = np.zeros((1, 1, 2, 4, 1, 8), np.float32)
    with pytest.raises(InvariantViolation, match=r"block 2 is outside \[0, 2\)"):
        pool.read([2])
    with pytest.raises(InvariantViolation, match="block -1"):
        pool.write([-1], kv)
    with pytest.raises(InvariantViolation, match="shape"):
        pool.write([0, 1], kv)


# --- the functions between products ---------------------------------------------------------------------


def _through(kernel: str, values: NDArray[np.float32], *arguments: float) -> NDArray[np.float64]:
    values = np.ascontiguousarray(np.resize(values, -(-len(values) // 16) * 16))
    out, ones = np.empty_like(values), np.ones_like(values)
    if kernel == "gate":
        gate = int(arguments[0])
        elementwise.gate(gate, values.ctypes.data, ones.ctypes.data, out.ctypes.data, len(values))
    else:
        elementwise.cap_softly(values.ctypes.data, arguments[0], out.ctypes.data, len(values))
    return out.astype(np.float64)


GRID = np.concatenate([np.linspace(-30, 30, 20011), np.linspace(-1e-3, 1e-3, 101), [0.0]]).astype(np.float32)


@pytest.mark.parametrize("epilogue", [Epilogue.SILU, Epilogue.GELU_TANH])
def test_activations_are_right_to_a_few_units_in_the_last_place(epilogue: Epilogue) -> None:
    out = _through("gate", GRID, epilogue)
    x = np.resize(GRID, len(out)).astype(np.float64)
    if epilogue is Epilogue.SILU:
        expected = x / (1 + np.exp(-x))
    else:
        expected = x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    # Rounding the argument of exp costs as many ulps of the result as the argument is long.
    np.testing.assert_allclose(
        out, expected, rtol=5e-7, atol=3e-6 if epilogue is Epilogue.GELU_TANH else 1e-9
    )


def test_the_soft_cap_is_right_to_float32_of_the_cap() -> None:
    out = _through("cap", GRID, 5.0)
    expected = 5 * np.tanh(np.resize(GRID, len(out)).astype(np.float64) / 5)
    np.testing.assert_allclose(out, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("value", "expected"), [(np.inf, np.inf), (3e38, np.float32(3e38)), (-1e4, 0.0), (np.nan, np.nan)]
)
def test_silu_of_extreme_values_is_what_it_tends_to(value: float, expected: float) -> None:
    out = _through("gate", np.array([value], np.float32), Epilogue.SILU)[0]
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-30)


@pytest.mark.parametrize("count", [1, 15, 16, 24, 64, 65])
def test_rms_norm_equals_its_definition(count: int) -> None:
    rng = np.random.default_rng(count)
    x, gain = rng.standard_normal(count, np.float32), rng.standard_normal(count, np.float32)
    out = np.full(count + 1, np.nan, np.float32)
    elementwise.rms_norm(x.ctypes.data, gain.ctypes.data, 1e-5, out.ctypes.data, count)
    expected = x / np.sqrt(np.mean(x.astype(np.float64) ** 2) + 1e-5) * gain
    np.testing.assert_allclose(out[:count], expected, rtol=1e-6)
    assert np.isnan(out[count])
