"""The CPU backend's matrix products: right in every format, and the same bits in every arrangement."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mvllm.backends.cpu import isa as instruction_sets
from mvllm.backends.cpu import jit, linear, quantized_kernels, quantized_panels
from mvllm.backends.cpu.crossover import NEVER
from mvllm.backends.cpu.isa import Isa
from mvllm.backends.cpu.layout import (
    DENSE,
    GROUP,
    LAYOUT_NUMBERS,
    NARROW,
    QUANTIZED,
    ActivationLayout,
    packed_format,
)
from mvllm.backends.cpu.pack import Arena, PackedMatrix, pack_matrix
from mvllm.backends.cpu.reading import Reading
from mvllm.core.load.mlx_format import MLX_FORMATS
from mvllm.core.load.quantized import QUANT_FORMATS
from mvllm.core.load.weights import DENSE_DTYPES, AffineWeight, DenseWeight, HostWeight, QuantizedWeight
from tests.cpu_matrices import (
    FORMATS,
    RECORDS,
    activation_values,
    activations,
    codes_of,
    extreme_weight,
    packed,
    product,
    random_weight,
    without_biases,
)
from tests.mutants.cpu_linear import emit_panel_tile_without_earlier_chunks, emit_tile_unfused_for_batches

SELECTED = instruction_sets.selected()
# The other instruction sets are shown on formats that together use all of their code.
_REPRESENTATIVE = ("Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q6_K", "MLX8_G64_BF16", "F16")
CASES = [(SELECTED, name) for name in FORMATS] + [
    (isa, name) for isa in instruction_sets.available() if isa is not SELECTED for name in _REPRESENTATIVE
]
every_case = pytest.mark.parametrize(
    ("isa", "format_name"), CASES, ids=[f"{isa.name}-{name}" for isa, name in CASES]
)

PRODUCTS = [(isa, name, NARROW) for isa, name in CASES]
PRODUCTS += [(isa, name, isa.wide) for isa, name in CASES if name in _REPRESENTATIVE and name not in DENSE]
every_product = pytest.mark.parametrize(
    ("isa", "format_name", "layout"),
    PRODUCTS,
    ids=[f"{isa.name}-{name}-{layout.name}" for isa, name, layout in PRODUCTS],
)


def _inputs(format_name: str) -> tuple[int, ...]:
    if format_name in MLX_FORMATS:
        return MLX_FORMATS[format_name].group_size, 1536
    return (256, 1536) if format_name.endswith("_K") else (32, 64, 576, 1536)


@every_product
def test_products_are_those_of_the_exact_weights_and_the_rounded_activations(
    isa: Isa, format_name: str, layout: ActivationLayout
) -> None:
    rng = np.random.default_rng(1)
    for inputs in _inputs(format_name):
        weight = random_weight(format_name, 3 * isa.lanes - 5, inputs, rng)
        matrix = packed(weight, isa)
        acts = activations(rng.standard_normal((11, inputs), np.float32), matrix, layout)
        expected = activation_values(acts, matrix, layout) @ weight.to_float32().astype(np.float64).T
        got = product(matrix, acts, layout=layout)
        assert np.array_equal(got, product(matrix, acts, layout=layout, panels_from=len(acts) + 1))
        assert np.abs(got[:, : matrix.rows] - expected).max() < 1e-5 * np.abs(expected).max()
        assert not got[:, matrix.rows :].any(), "padding rows are zero"


def _exact_product(weight: HostWeight, codes: NDArray[np.int64]) -> NDArray[np.float32]:
    """float32[tokens, rows] as `quantized_kernels` defines it, for activations of scale 1 and a weight whose
    float factors are 1 or -1."""
    plain = without_biases(weight).to_float32().astype(np.float64)
    biases = weight.to_float32().astype(np.float64) - plain
    sums = np.zeros((len(codes), len(plain)), np.float32)
    for start in range(0, codes.shape[1], GROUP):
        group = slice(start, start + GROUP)
        dots = codes[:, group] @ plain[:, group].T  # integers far below 2**53
        if weight.format_name not in ("Q4_K", "Q5_K"):  # whose scales follow the rounding to float32
            dots = dots.astype(np.float32).astype(np.float64)
        # Sums in float64 of these are exact, so each of the two roundings is that of an fma.
        sums = (sums + dots).astype(np.float32)
        sums = (sums + codes[:, group].sum(1)[:, None] * biases[:, start]).astype(np.float32)
    return sums


@pytest.mark.parametrize(
    ("isa", "format_name", "layout"),
    [case for case in PRODUCTS if case[1] not in DENSE],
    ids=[f"{isa.name}-{name}-{layout.name}" for isa, name, layout in PRODUCTS if name not in DENSE],
)
def test_nothing_overflows_at_the_ends_of_all_ranges(
    isa: Isa, format_name: str, layout: ActivationLayout
) -> None:
    rng = np.random.default_rng(11)
    weight = extreme_weight(format_name, 5 * isa.lanes - 3, 512, rng)
    matrix = packed(weight, isa)
    ends = layout.largest_code, layout.largest_code - 1
    codes = rng.choice((*ends, *(-end for end in ends)), (20, 512))
    codes[:, ::GROUP] = layout.largest_code  # so that scales are 1
    codes[:2] = np.reshape((-layout.largest_code, layout.largest_code), (2, 1))
    acts = activations(codes.astype(np.float32), matrix, layout)
    expected = _exact_product(weight, codes)
    for tokens in (*range(1, 8), 20):
        for panels_from in (2, tokens + 1):
            for first in (0, 4):
                got = product(matrix, acts[:tokens], first, layout=layout, panels_from=panels_from)
                asked = slice(first * isa.lanes, matrix.rows)
                assert np.array_equal(got[:, asked], expected[:tokens, asked]), (tokens, panels_from, first)


@every_case
def test_embedding_rows_are_the_exact_values(isa: Isa, format_name: str) -> None:
    weight = random_weight(format_name, 2 * isa.lanes + 3, 512, np.random.default_rng(2))
    matrix = packed(weight, isa)
    expected = weight.to_float32()
    for token in (0, 1, isa.lanes, 2 * isa.lanes + 2):
        row = np.full(matrix.inputs, np.nan, np.float32)
        linear.embed_row(matrix.embedding_descriptor(), token, row.ctypes.data)
        assert np.array_equal(row, expected[token])


@pytest.mark.parametrize("format_name", ["MLX2_G64_BF16", "MLX4_G64_F16", "MLX5_G128_F32"])
def test_codes_of_the_other_widths_are_packed_exactly_and_in_the_order_of_the_rows(format_name: str) -> None:
    rng = np.random.default_rng(10)
    weight = random_weight(format_name, SELECTED.lanes + 3, 256, rng)
    assert isinstance(weight, AffineWeight)
    reordered = replace(weight, row_order=rng.permutation(weight.shape[0]))
    matrix, expected = packed(reordered, SELECTED), reordered.to_float32()
    for token in range(weight.shape[0]):
        row = np.full(matrix.inputs, np.nan, np.float32)
        linear.embed_row(matrix.embedding_descriptor(), token, row.ctypes.data)
        assert np.array_equal(row, expected[token])


@functools.cache
def _exactness_example(
    case: tuple[Isa, str, ActivationLayout],
) -> tuple[PackedMatrix, NDArray[np.uint8], NDArray[np.float32]]:
    isa, format_name, layout = case
    rng = np.random.default_rng(3)
    matrix = packed(random_weight(format_name, 9 * isa.lanes - 1, 512, rng), isa)
    acts = activations(rng.standard_normal((70, 512), np.float32), matrix, layout)
    alone = [product(matrix, acts[m : m + 1], layout=layout) for m in range(len(acts))]
    return matrix, acts, np.concatenate(alone)


@given(st.data())
def test_an_output_has_the_same_bits_for_every_batch_row_range_and_form(data: st.DataObject) -> None:
    case = data.draw(st.sampled_from(PRODUCTS))
    matrix, acts, alone = _exactness_example(case)
    tokens = data.draw(st.lists(st.integers(0, 69), min_size=1, max_size=70))
    first = data.draw(st.integers(0, matrix.num_blocks - 1))
    last = data.draw(st.integers(first, matrix.num_blocks))
    panels_from = data.draw(st.sampled_from((2, len(tokens), len(tokens) + 1)))
    got = product(matrix, acts[tokens], first, last, layout=case[2], panels_from=panels_from)
    lanes = matrix.isa.lanes
    asked = slice(first * lanes, last * lanes)
    assert np.array_equal(got[:, asked], alone[tokens, asked])
    got[:, asked] = np.nan
    assert np.isnan(got).all(), "nothing outside the blocks asked for is written"


@pytest.mark.parametrize(
    ("format_name", "layout", "streams"),
    [("Q4_K", NARROW, 1), ("Q4_K", NARROW, 3), ("Q6_K", NARROW, 2), ("Q6_K", SELECTED.wide, 4)],
)
def test_any_number_of_streams_gives_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, format_name: str, layout: ActivationLayout, streams: int
) -> None:
    rng = np.random.default_rng(13)
    matrix = packed(random_weight(format_name, 9 * SELECTED.lanes, 256, rng), SELECTED)
    acts = activations(rng.standard_normal((7, 256), np.float32), matrix, layout)
    expected = product(matrix, acts, layout=layout, panels_from=2)
    reading = Reading(5, streams, 5 - streams, bytes_ahead=512, past_caches=streams == 2)
    monkeypatch.setattr(quantized_panels, "best_reading", lambda isa, bits: reading)
    monkeypatch.setattr(linear, "_L1_BYTES", 2 * layout.row_bytes(256))
    monkeypatch.setattr(jit, "kernel_folder", lambda: None)
    monkeypatch.setattr(linear, "matmul_address", functools.cache(linear.matmul_address.__wrapped__))
    for tokens in (1, 2, 5, 7):
        for first in range(9):  # 9 to 1 row blocks
            got = product(matrix, acts[:tokens], first, layout=layout, panels_from=NEVER)
            asked = slice(first * SELECTED.lanes, None)
            assert np.array_equal(got[:, asked], expected[:tokens, asked])
            assert np.isnan(got[:, : asked.start]).all()


def test_the_exactness_property_catches_a_tile_that_rounds_differently(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jit, "kernel_folder", lambda: None)
    monkeypatch.setattr(quantized_kernels, "emit_tile", emit_tile_unfused_for_batches)
    matrix, acts, alone = _exactness_example((SELECTED, "Q4_0", NARROW))
    monkeypatch.setattr(linear, "matmul_address", linear.matmul_address.__wrapped__)
    assert np.array_equal(product(matrix, acts[:1]), alone[:1])
    assert not np.array_equal(product(matrix, acts[:2], panels_from=3), alone[:2])


def test_the_exactness_property_catches_panels_that_start_anew_with_every_chunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jit, "kernel_folder", lambda: None)
    monkeypatch.setattr(quantized_panels, "emit_panel_tile", emit_panel_tile_without_earlier_chunks)
    matrix, acts, alone = _exactness_example((SELECTED, "Q4_0", NARROW))
    monkeypatch.setattr(linear, "matmul_address", linear.matmul_address.__wrapped__)
    assert np.array_equal(product(matrix, acts[:2], panels_from=3), alone[:2])
    assert not np.array_equal(product(matrix, acts[:2], panels_from=2), alone[:2])


@pytest.mark.parametrize("format_name", ["Q4_1", "Q6_K", "MLX3_G128_F32", "BF16"])
def test_concatenated_weights_give_the_outputs_of_the_single_ones(format_name: str) -> None:
    rng = np.random.default_rng(4)
    weights = [random_weight(format_name, rows, 256, rng) for rows in (SELECTED.lanes + 3, 5, 40)]
    joined = pack_matrix(weights, Arena())
    x = rng.standard_normal((3, 256), np.float32)
    singles = [packed(weight, SELECTED) for weight in weights]
    apart = [product(m, activations(x, m))[:, : m.rows] for m in singles]
    got = product(joined, activations(x, joined))[:, : joined.rows]
    assert np.array_equal(got, np.concatenate(apart, axis=1))


def test_alternating_weights_take_turns_by_row_block() -> None:
    rng = np.random.default_rng(5)
    lanes = SELECTED.lanes
    gate, up = (random_weight("Q4_K", 2 * lanes - 1, 256, rng) for _ in range(2))
    both = pack_matrix([gate, up], Arena(), alternate=True)
    x = rng.standard_normal((2, 256), np.float32)
    got = product(both, activations(x, both)).reshape(2, -1, 2, lanes)
    for index, weight in enumerate((gate, up)):
        single = packed(weight, SELECTED)
        assert np.array_equal(got[:, :, index].reshape(2, -1), product(single, activations(x, single)))


@pytest.mark.parametrize("format_name", ["Q4_K", "F32"])
def test_reordered_rows_are_packed_in_their_new_order(format_name: str) -> None:
    rng = np.random.default_rng(6)
    plain = random_weight(format_name, 20, 256, rng)
    order = rng.permutation(20)
    if isinstance(plain, DenseWeight):
        moved: DenseWeight | QuantizedWeight = DenseWeight("moved", plain.format_name, plain.stored, order)
    else:
        moved = QuantizedWeight("moved", plain.format, plain.stored, order)
    x = rng.standard_normal((1, 256), np.float32)
    before, after = packed(plain, SELECTED), packed(moved, SELECTED)
    expected = product(before, activations(x, before))[:, order]
    assert np.array_equal(product(after, activations(x, after))[:, :20], expected)


@given(
    st.lists(
        st.one_of(
            st.floats(width=32, allow_nan=False, allow_infinity=False), st.integers(-254, 254).map(float)
        ),
        min_size=GROUP,
        max_size=GROUP,
    )
)
def test_activations_round_to_the_nearest_code_with_ties_to_even(values: list[float]) -> None:
    x = np.array(values, np.float32)
    for layout, dtype in RECORDS.items():
        record = np.zeros(1, dtype)
        linear.quantize_row(x.ctypes.data, record.ctypes.data, GROUP, LAYOUT_NUMBERS[layout])
        largest, code = np.abs(x).max(), np.float32(layout.largest_code)
        inverse = code / largest if largest > np.float32(2.0**-110) else np.float32(0.0)
        codes = np.rint(x * inverse).astype(np.int64)
        assert np.array_equal(codes_of(record)[0], codes)
        assert record["scale"][0] == largest / code
        total = int(codes.sum())
        assert record["minus_sum"][0] == -total
        halves = [-int(codes[:16].sum()), -int(codes[16:].sum())]
        stored = record["minus_half_sums"][0]
        assert stored == halves[0] if layout.is_wide else stored.tolist() == halves
        with np.errstate(over="ignore"):
            assert record["scaled_sum"][0] == record["scale"][0] * np.float32(total)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("format_name", ["Q4_1", "Q8_0", "F32"])
def test_an_unusable_input_makes_its_own_token_not_finite_and_no_other(format_name: str, bad: float) -> None:
    rng = np.random.default_rng(7)
    matrix = packed(random_weight(format_name, SELECTED.lanes, 64, rng), SELECTED)
    x = rng.standard_normal((3, 64), np.float32)
    good = product(matrix, activations(x, matrix))
    x[1, 40] = bad
    got = product(matrix, activations(x, matrix))
    assert not np.isfinite(got[1]).any()
    assert np.array_equal(got[[0, 2]], good[[0, 2]])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize(
    ("isa", "layout"),
    [(isa, layout) for isa in instruction_sets.available() for layout in (NARROW, isa.wide)],
    ids=lambda either: either.name,
)
def test_all_forms_make_the_same_of_an_unusable_input(isa: Isa, layout: ActivationLayout, bad: float) -> None:
    """Q6_K: only some of its forms use the sums of the activations."""
    rng = np.random.default_rng(12)
    matrix = packed(random_weight("Q6_K", 3 * isa.lanes, 256, rng), isa)
    x = rng.standard_normal((5, 256), np.float32)
    x[:, 40] = bad
    acts = activations(x, matrix, layout)
    records = acts.view(RECORDS[layout])
    assert np.array_equal(records["minus_sum"], -codes_of(records).sum(-1))
    alone = product(matrix, acts[:1], layout=layout)
    for panels_from in (2, 6):
        got = product(matrix, acts, layout=layout, panels_from=panels_from)
        assert np.array_equal(got[:1], alone, equal_nan=True)


def test_packed_matrices_start_on_cache_lines_and_say_what_they_are() -> None:
    rng = np.random.default_rng(8)
    arena = Arena()
    matrices = [pack_matrix([random_weight("Q5_0", 17, 32, rng)], arena) for _ in range(3)]
    assert all(matrix.data.ctypes.data % 64 == 0 for matrix in matrices)
    assert arena.allocated_bytes == sum(matrix.nbytes for matrix in matrices)
    assert matrices[0].describe().startswith("Q5_0: [17, 32] Q5_0")
    assert set(QUANTIZED).isdisjoint(DENSE)


def test_every_format_of_a_file_has_a_packed_form() -> None:
    for name in (*QUANT_FORMATS, *MLX_FORMATS, *DENSE_DTYPES):
        packed_name = packed_format(name)
        assert packed_name in QUANTIZED or packed_name in DENSE
    assert packed_format("Q3_K") is None


def test_groups_of_different_sizes_are_packed_together() -> None:
    rng = np.random.default_rng(9)
    weights = [random_weight(name, SELECTED.lanes, 256, rng) for name in ("MLX3_G32_F32", "MLX3_G128_F32")]
    joined = pack_matrix(weights, Arena())
    x = rng.standard_normal((2, 256), np.float32)
    apart = [product(matrix, activations(x, matrix)) for matrix in (packed(w, SELECTED) for w in weights)]
    assert np.array_equal(product(joined, activations(x, joined)), np.concatenate(apart, axis=1))
