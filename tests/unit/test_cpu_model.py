"""`CpuModel` as an object: what it refuses, what it reports, how it shares the process with others."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mvllm.backends.cpu.backend import CpuBackend
from mvllm.backends.cpu.model import CpuModel
from mvllm.core.errors import CapacityError, ConfigError, EngineClosed, InvariantViolation, ModelFileError
from mvllm.core.load.weights import DenseWeight
from mvllm.core.sampling.sampler import sample
from mvllm.core.step import ForwardBatch, SamplingArrays
from mvllm.core.types import BlockId
from tests.conformance.random_models import ModelShape, Row, geometry, make_batch, random_model

TOKENS = [int(token) for token in np.random.default_rng(0).integers(0, 70, 30)]
TABLE = [7, 2, 5, 1, 0, 9, 4, 3]
BLOCK_SIZE = 4
ALL_BLOCKS = [BlockId(block) for block in range(16)]


def load(threads: int = 2) -> CpuModel:
    spec, weights = random_model(ModelShape(), seed=1)
    model = CpuBackend(threads=threads).load(spec, weights, geometry(num_blocks=16, block_size=BLOCK_SIZE))
    assert isinstance(model, CpuModel)
    return model


@pytest.fixture
def model() -> Iterator[CpuModel]:
    with closing(load()) as loaded:
        yield loaded


def batch_of(start: int, stop: int, num_logits: int = 1) -> ForwardBatch:
    return make_batch([Row(TOKENS, start, stop, TABLE, num_logits)], BLOCK_SIZE)


def ints(*values: int) -> Any:
    return np.array(values, np.int32)


FAULTS = {
    "token id is outside the vocabulary": {"tokens": ints(1, 70, 3)},
    "token id is outside": {"tokens": ints(1, -1, 3)},
    "position is outside the longest context": {"positions": ints(0, 1, 64), "context_lens": ints(65)},
    "slot is outside the KV pool": {"slots": ints(0, 1, 64)},
    "row_starts": {"row_starts": ints(0, 2)},
    "row's context": {"context_lens": ints(4)},
    "block table is too short": {"positions": ints(0, 1, 40), "context_lens": ints(41)},
    "names a block outside": {"block_tables": ints(16).reshape(1, 1)},
    "logit row": {"logit_rows": ints(3)},
    "differ in length": {"slots": ints(0, 1)},
    "vocab_limit is 0": {"vocab_limit": 0},
    "at most 128 were announced": {"tokens": np.zeros(129, np.int32)},
}


@pytest.mark.parametrize("message", FAULTS)
def test_a_faulty_batch_is_refused_before_anything_changes(message: str, model: CpuModel) -> None:
    model.logits(batch_of(0, 3))
    before = model.read_blocks(ALL_BLOCKS)
    good = batch_of(0, 3)
    with pytest.raises(InvariantViolation, match=message):
        model.logits(replace(good, **FAULTS[message]))
    assert np.array_equal(model.read_blocks(ALL_BLOCKS), before)
    assert np.isfinite(model.logits(good)).all()


def test_a_step_samples_as_the_specification_does_from_the_same_logits(model: CpuModel) -> None:
    batch = batch_of(0, 6, num_logits=3)
    options = {
        "temperature": np.array([0.0, 1.0, 0.7], np.float32),
        "top_k": ints(0, 0, 5),
        "seed": np.array([1, 2, 3], np.uint64),
        "position": ints(4, 5, 6),
        "num_logprobs": ints(-1, 0, 4),
        "target": ints(3, -1, -1),
    }
    sampling: SamplingArrays = replace(batch.sampling, **options)
    expected = sample(model.logits(batch), sampling)
    output = model.step(replace(batch, sampling=sampling))
    for name in type(expected).__dataclass_fields__:
        assert np.array_equal(getattr(output, name), getattr(expected, name)), name


def test_outputs_stay_as_they_are_when_the_next_step_runs(model: CpuModel) -> None:
    first = model.step(batch_of(0, 6))
    tokens = first.tokens.copy()
    logits = model.logits(batch_of(0, 6))
    kept = logits.copy()
    model.step(batch_of(6, 9))
    assert np.array_equal(first.tokens, tokens)
    assert np.array_equal(logits, kept)


def test_no_bit_depends_on_how_much_of_the_work_each_thread_does() -> None:
    """Shares as uneven as they come, and others in each call."""
    batches = [batch_of(0, 1), batch_of(0, 29, num_logits=5), batch_of(0, 30)]
    with closing(load(threads=1)) as alone:
        expected = [alone.logits(batch) for batch in batches]
    random = np.random.default_rng(5)
    with closing(load(threads=3)) as model:
        model.logits(batches[0])
        assert model._all is not None and model._all.team._crew is not None
        paces = model._all.team._crew._paces
        for _ in range(20):
            for batch, logits in zip(batches, expected, strict=True):
                paces[:] = random.choice([0.25, 0.5, 1.0, 4.0], paces.shape)
                assert np.array_equal(model.logits(batch), logits)


def test_batches_without_logit_rows_only_fill_the_cache(model: CpuModel) -> None:
    for stop in (1, 5):
        batch = batch_of(stop - 1, stop + 1) if stop > 1 else batch_of(0, 1)
        silent = replace(batch, logit_rows=ints(), sampling=make_sampling_empty(batch.sampling))
        assert model.step(silent).tokens.shape == (0,)
        assert model.logits(silent).shape == (0, 70)


def make_sampling_empty(sampling: SamplingArrays) -> SamplingArrays:
    fields = {name: getattr(sampling, name)[:0] for name in type(sampling).__dataclass_fields__}
    return SamplingArrays(**{**fields, "count_offsets": ints(0), "bias_offsets": ints(0)})


def test_the_listing_names_every_weight_and_the_threads(model: CpuModel) -> None:
    text = model.describe()
    assert "2 threads" in text
    for name in ("embedding", "0.q", "1.down", "head", "final_norm"):
        assert name in text


def test_weight_bytes_are_those_of_the_packed_matrices_and_vectors(model: CpuModel) -> None:
    _, weights = random_model(ModelShape(), seed=1)
    file_bytes = sum(layer.q.nbytes + layer.gate.nbytes for layer in weights.layers)
    assert model.weight_bytes > file_bytes


def test_a_closed_model_says_so(model: CpuModel) -> None:
    model.close()
    model.close()
    for call in (
        lambda: model.logits(batch_of(0, 1)),
        lambda: model.read_blocks(ALL_BLOCKS[:1]),
        model.describe,
    ):
        with pytest.raises(EngineClosed):
            call()


def test_overlapping_calls_are_refused(model: CpuModel) -> None:
    with model._resources(), pytest.raises(InvariantViolation, match="overlap"):
        model.read_blocks(ALL_BLOCKS[:1])


def test_models_in_several_threads_do_not_disturb_each_other() -> None:
    with closing(load(threads=1)) as alone:
        expected = [alone.logits(batch_of(0, stop)) for stop in range(1, 20)]

    def run(threads: int) -> bool:
        with closing(load(threads=threads)) as own:
            found = [own.logits(batch_of(0, stop)) for stop in range(1, 20)]
        return all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(run, (1, 2, 2)))


def _logits_in_child(model: CpuModel, results: Any) -> None:
    results.put(model.logits(batch_of(4, 9)))


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_goes_on_with_the_parents_cache(model: CpuModel) -> None:
    model.logits(batch_of(0, 4))
    fork = multiprocessing.get_context("fork")
    results = fork.SimpleQueue()
    child = fork.Process(target=_logits_in_child, args=(model, results))
    child.start()
    found = results.get()
    child.join(30)
    assert child.exitcode == 0
    assert np.array_equal(found, model.logits(batch_of(4, 9)))


def test_unusable_settings_are_refused_with_what_was_found() -> None:
    spec, weights = random_model(ModelShape(), seed=1)
    with pytest.raises(ConfigError, match="from 1 to 256, got 0"):
        CpuBackend(threads=0)
    with pytest.raises(ConfigError, match="'bf16'"):
        CpuBackend(threads=1).load(spec, weights, geometry(dtype="bf16"))
    with pytest.raises(CapacityError, match="KV cache"):
        CpuBackend(threads=1).load(spec, weights, replace(geometry(), num_blocks=1 << 50))


def test_unsupported_models_are_refused_with_a_reason() -> None:
    spec, weights = random_model(ModelShape(), seed=1)
    backend = CpuBackend()
    assert backend.unsupported(spec, weights) is None
    assert "head_dim is 15" in str(backend.unsupported(replace(spec, head_dim=15), weights))
    odd = DenseWeight("odd", "F64", np.zeros((4, 4)))
    assert "odd has format F64" in str(backend.unsupported(spec, replace(weights, head=odd)))
    with pytest.raises(ModelFileError, match="F64"):
        backend.load(spec, replace(weights, head=odd), geometry())
