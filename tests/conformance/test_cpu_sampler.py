"""The compiled sampler equals the reference sampler bit for bit (M0, M9), and stays within its memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import given
from numpy.typing import NDArray

from mvllm.backends.cpu import sampler_arithmetic
from mvllm.backends.cpu.sampler import sample_rows
from mvllm.backends.cpu.sampler_table import (
    NUM_COLUMNS,
    empty_output,
    pack_parameters,
    sampler_scratch_bytes,
)
from mvllm.core.errors import InvariantViolation
from mvllm.core.sampling import arithmetic, keyed_noise
from mvllm.core.sampling import sampler as reference
from mvllm.core.step import SamplingArrays, StepOutput
from tests.sampling_cases import Batch, Row, arrays, batches, differences, select

CANARY = -0x0123456789ABCDEF


def _sample_compiled(logits: NDArray[np.float32], sampling: SamplingArrays) -> StepOutput:
    """The compiled sampler's answer for logits f32[S, V] in packed rows, from one worker."""
    rows, vocab = logits.shape
    output = empty_output(sampling)
    scratch = np.empty(sampler_scratch_bytes(vocab) // 8, np.int64)
    table = np.empty(NUM_COLUMNS, np.int64)
    pack_parameters(
        table,
        logits=logits.ctypes.data,
        row_stride=logits.strides[0] // logits.itemsize,
        vocab=vocab,
        sampling=sampling,
        output=output,
        scratch=scratch.ctypes.data,
        scratch_stride=scratch.nbytes,
    )
    sample_rows(table.ctypes.data, 0, rows, 0)
    return output


def _assert_equal(logits: NDArray[np.float32], rows: list[Row]) -> None:
    sampling = arrays(rows)
    assert not differences(reference.sample(logits, sampling), _sample_compiled(logits, sampling))


@given(batch=batches(unusable=True))
def test_small_batches_give_the_same_bits(batch: Batch) -> None:
    """M0, M8: any settings, extreme logits, NaN and infinities included."""
    _assert_equal(batch.logits, batch.rows)


@given(batch=batches(max_vocab=150))
def test_vocabularies_of_several_blocks_give_the_same_bits(batch: Batch) -> None:
    """M0."""
    _assert_equal(batch.logits, batch.rows)


def _normal(random: np.random.Generator, vocab: int) -> NDArray[np.float32]:
    return (random.standard_normal(vocab) * 3).astype(np.float32)


def _shapes(random: np.random.Generator, vocab: int) -> dict[str, NDArray[np.float32]]:
    normal = _normal(random, vocab)
    with np.errstate(over="ignore"):
        return {
            "normal": normal,
            "flat": normal * np.float32(1e-3),
            "ties": np.round(normal),
            "all equal": np.full(vocab, 2.5, np.float32),
            "rising": np.linspace(-20, 20, vocab, dtype=np.float32),
            "falling": np.linspace(20, -20, vocab, dtype=np.float32),
            "subnormal": normal * np.float32(1e-39),
            "huge": np.clip(normal * np.float32(1e38), -3e38, 3e38).astype(np.float32),
            "zeros of both signs": np.where(normal > 0, np.float32(0.0), np.float32(-0.0)),
            "mostly masked": np.where(random.random(vocab) < 0.99, np.float32(-np.inf), normal),
        }


SETTINGS = [
    Row(temperature=0.0, num_logprobs=20, target=0),
    Row(temperature=0.7, seed=1, position=5, num_logprobs=5),
    Row(temperature=1.0, top_k=40, top_p=0.95, seed=2, position=2**31 - 1),
    Row(temperature=1.3, top_p=0.9, seed=2**64 - 1, num_logprobs=0),
    Row(temperature=0.8, min_p=0.05, top_p=0.5, seed=4),
    Row(temperature=1e-5, top_k=3000, seed=5),
    Row(temperature=100.0, top_k=900, top_p=0.999, min_p=1e-6, seed=6),
    Row(temperature=float(np.finfo(np.float32).max), top_p=0.7, seed=7),
    Row(temperature=1.0, top_p=1e-9, seed=8),
    Row(temperature=1.0, repetition_penalty=1.3, counts={0: (1, 2)}, bias={0: 3.0}, num_logprobs=3, seed=9),
]


@pytest.mark.parametrize("vocab", [1, 63, 64, 65, 1000, 49_152])
def test_every_shape_of_logits_gives_the_same_bits_under_every_setting(vocab: int) -> None:
    """M0: ties, subnormals, huge ranges, both zeros, masks."""
    random = np.random.default_rng(vocab)
    for logits in _shapes(random, vocab).values():
        finite = logits.copy()
        finite[-1] = 0.25
        rows = [row if row.num_logprobs <= vocab else Row(temperature=0.0) for row in SETTINGS]
        _assert_equal(np.broadcast_to(finite, (len(rows), vocab)).copy(), rows)


def test_many_draws_from_a_large_vocabulary_give_the_same_tokens() -> None:
    """M0: passing over candidates that can't win never changes the winner."""
    random = np.random.default_rng(3)
    rows = [
        Row(temperature=temperature, seed=seed, position=seed)
        for seed, temperature in enumerate(random.choice([0.3, 1.0, 3.0], 60))
    ]
    _assert_equal(np.stack([_normal(random, 5_000) for _ in rows]), rows)


@pytest.mark.parametrize("vocab", [8, 128])
def test_equal_tokens_are_cut_at_the_same_id(vocab: int) -> None:
    """M0, M4: where a share of the mass is reached exactly; 300 draws show which tokens were kept."""
    logits = np.zeros((300, vocab), np.float32)
    for share in (0.25, 0.5, 0.50001, 0.75):
        _assert_equal(logits, [Row(top_p=share, seed=seed) for seed in range(300)])
    _assert_equal(logits, [Row(top_k=vocab // 2, top_p=0.5, seed=seed) for seed in range(300)])
    _assert_equal(logits, [Row(top_k=3, min_p=1.0, seed=seed) for seed in range(300)])


def _over_array(kernel: Callable[[Any], Any], dtype: type[np.generic]) -> Callable[[Any], NDArray[Any]]:
    """`kernel` applied to each element, in a compiled loop that LLVM may vectorise."""

    @numba.njit  # type: ignore[misc,untyped-decorator,unused-ignore]
    def loop(values: NDArray[Any], result: NDArray[Any]) -> None:
        for index in range(len(values)):
            result[index] = kernel(values[index])

    def call(values: NDArray[Any]) -> NDArray[Any]:
        result = np.empty(len(values), dtype)
        loop(values, result)
        return result

    return call


def test_arithmetic_gives_the_same_bits_on_millions_of_values() -> None:
    """M0: no fused multiply-add, no reassociation, in loops too."""
    random = np.random.default_rng(4)
    edges = np.array([0.0, -0.0, -64.0, -1e308, -np.inf, -5e-324, -(2.0**-1022)])
    x = np.concatenate(
        [-40.0 * random.random(2_000_000), -np.exp(random.standard_normal(500_000) * 30), edges]
    )
    assert (_over_array(sampler_arithmetic.mass, np.int64)(x) == arithmetic.masses(x)).all()

    raw = np.concatenate(
        [random.integers(0, 2**64 - 1, 2_000_000, np.uint64, endpoint=True), edges.view(np.uint64)]
    )
    uniform = keyed_noise.uniform_from_raw(raw)
    x = np.concatenate(
        [uniform, 1.0 - uniform * 1e-9, np.exp(random.standard_normal(500_000) * 100), [2.0**-1022]]
    )
    assert _over_array(sampler_arithmetic.log, np.float64)(x).tobytes() == arithmetic.log(x).tobytes()

    mixed = _over_array(sampler_arithmetic.mix, np.uint64)(raw[:1000])
    assert mixed.tolist() == [keyed_noise.mix(int(value)) for value in raw[:1000]]


class _Guarded:
    """A packed table with two workers' scratch between canaries, and logits with a gap after each row."""

    def __init__(self, logits: NDArray[np.float32], sampling: SamplingArrays, gap: int = 5) -> None:
        rows, self.vocab = logits.shape
        self.logits = np.full((rows, self.vocab + gap), np.nan, np.float32)
        self.logits[:, : self.vocab] = logits
        self.words = sampler_scratch_bytes(self.vocab) // 8
        self.scratch = np.full(8 + 2 * (self.words + 8), CANARY, np.int64)
        self.output = empty_output(sampling)
        self.table = np.empty(NUM_COLUMNS, np.int64)
        self.sampling = sampling
        pack_parameters(
            self.table,
            logits=self.logits.ctypes.data,
            row_stride=self.vocab + gap,
            vocab=self.vocab,
            sampling=sampling,
            output=self.output,
            scratch=self.scratch[8:].ctypes.data,
            scratch_stride=8 * (self.words + 8),
        )

    def run(self, first_row: int, last_row: int, worker: int = 0) -> None:
        sample_rows(self.table.ctypes.data, first_row, last_row, worker)

    def canaries_live(self) -> bool:
        starts = (0, 8 + self.words, 8 + 2 * self.words + 8)
        return all((self.scratch[start : start + 8] == CANARY).all() for start in starts)


@pytest.mark.parametrize("vocab", [1, 64, 65, 1000])
def test_only_the_scratch_and_the_rows_asked_for_are_written(vocab: int) -> None:
    """M8, C4: canaries around the scratch live, logits are only read, other rows' outputs stay."""
    random = np.random.default_rng(vocab)
    rows = [row if row.num_logprobs <= vocab else Row(temperature=0.0) for row in SETTINGS]
    logits = np.stack([_normal(random, vocab) for _ in rows])
    sampling = arrays(rows)
    expected = reference.sample(logits, sampling)
    guarded = _Guarded(logits, sampling)
    before = guarded.logits.tobytes()
    guarded.run(3, 6, worker=1)
    assert guarded.canaries_live()
    assert (guarded.scratch[8 : 8 + guarded.words] == CANARY).all()
    width = guarded.output.top_tokens.shape[1]
    outside = [0, 1, 2, *range(6, len(rows))]
    assert not differences(
        select(guarded.output, outside, width), select(empty_output(sampling), outside, width)
    )
    guarded.run(0, 3)
    guarded.run(6, len(rows))
    assert guarded.canaries_live()
    assert guarded.logits.tobytes() == before
    assert not differences(guarded.output, expected)


def test_workers_may_sample_disjoint_rows_at_once() -> None:
    """M5: the kernel releases the GIL; each worker has its own scratch."""
    random = np.random.default_rng(8)
    rows = [Row(temperature=0.9, top_p=0.9, seed=seed, num_logprobs=4) for seed in range(40)]
    logits = np.stack([_normal(random, 3000) for _ in rows])
    sampling = arrays(rows)
    guarded = _Guarded(logits, sampling)
    threads = [
        threading.Thread(target=guarded.run, args=(20 * worker, 20 * worker + 20, worker))
        for worker in (0, 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert guarded.canaries_live()
    assert not differences(guarded.output, reference.sample(logits, sampling))


def test_arrays_of_another_type_or_stride_are_refused() -> None:
    output: StepOutput = empty_output(arrays([Row(), Row()]))
    sampling = vars(arrays([Row(), Row()]))
    for name, bad in (("temperature", np.ones(2)), ("seed", np.zeros(4, np.uint64)[::2])):
        with pytest.raises(InvariantViolation, match=name):
            pack_parameters(
                np.empty(NUM_COLUMNS, np.int64),
                logits=0,
                row_stride=1,
                vocab=1,
                sampling=SamplingArrays(**{**sampling, name: bad}),
                output=output,
                scratch=0,
                scratch_stride=0,
            )
