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
from numba import njit

from mvllm.backends.cpu.backend import CpuBackend
from mvllm.backends.cpu.model import CpuModel
from mvllm.backends.cpu.operations import _share_of_columns
from mvllm.backends.cpu.program import Kind
from mvllm.backends.cpu.tables import INSTRUCTION, Domain
from mvllm.backends.cpu.team import WORKER
from mvllm.core.errors import CapacityError, ConfigError, EngineClosed, InvariantViolation, ModelFileError
from mvllm.core.load.weights import DenseWeight, QuantizedWeight
from mvllm.core.model.spec import ModelSpec
from mvllm.core.sampling.sampler import sample
from mvllm.core.step import ForwardBatch, SamplingArrays
from mvllm.core.tensor import ModelWeights
from mvllm.core.types import BlockId
from tests.conformance.random_models import ModelShape, Row, geometry, make_batch, random_model
from tests.cpu_matrices import random_weight

TOKENS = [int(token) for token in np.random.default_rng(0).integers(0, 70, 30)]
TABLE = [7, 2, 5, 1, 0, 9, 4, 3]
BLOCK_SIZE = 4
ALL_BLOCKS = [BlockId(block) for block in range(16)]


def load(threads: int = 2) -> CpuModel:
    return loaded(*random_model(ModelShape(), seed=1), threads=threads)


def loaded(spec: ModelSpec, weights: ModelWeights, threads: int = 2) -> CpuModel:
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


def mixed_model() -> tuple[ModelSpec, ModelWeights]:
    """Gate and up projection are packed in different forms."""
    spec, weights = random_model(ModelShape(intermediate_size=192), seed=1)
    rng = np.random.default_rng(2)
    layers = tuple(replace(layer, up=small_weight("Q8_0", 192, 64, rng)) for layer in weights.layers)
    return spec, replace(weights, layers=layers)


def small_weight(format_name: str, rows: int, inputs: int, rng: np.random.Generator) -> QuantizedWeight:
    """A random weight whose scales are those of a trained one."""
    weight = random_weight(format_name, rows, inputs, rng)
    assert isinstance(weight, QuantizedWeight)
    blocks = weight.stored.reshape(rows, -1, weight.format.block_bytes)
    blocks[..., :2] = np.array([1e-3], np.float16).view(np.uint8)
    return weight


@pytest.mark.parametrize("parts", [random_model(ModelShape(), seed=1), mixed_model()], ids=["F32", "mixed"])
def test_no_bit_depends_on_how_much_of_the_work_each_thread_does(
    parts: tuple[ModelSpec, ModelWeights],
) -> None:
    """X1: shares as uneven as they come, and others in each call."""
    batches = [batch_of(0, 1), batch_of(0, 9, num_logits=4), batch_of(0, 29, num_logits=5), batch_of(0, 30)]
    with closing(loaded(*parts, threads=1)) as alone:
        expected = [alone.logits(batch) for batch in batches]
        drawn = [alone.step(batch).tokens for batch in batches]
    random = np.random.default_rng(5)
    with closing(loaded(*parts, threads=3)) as model:
        model.logits(batches[0])
        assert model._all is not None and model._all.team._crew is not None
        paces = model._all.team._crew._paces
        for _ in range(20):
            for batch, logits, tokens in zip(batches, expected, drawn, strict=True):
                paces[:] = random.choice([0.25, 0.5, 1.0, 4.0], paces.shape)
                assert np.array_equal(model.logits(batch), logits)
                assert np.array_equal(model.step(batch).tokens, tokens)


@njit
def shared_out(instruction: Any, worker: Any) -> Any:
    return _share_of_columns(instruction, worker)


@pytest.mark.parametrize("num_tokens", [1, 2, 15, 16, 30])
def test_products_with_equally_many_columns_are_shared_out_alike(num_tokens: int) -> None:
    """The planner leaves out barriers between them: one thread's columns of one are its columns of the other,
    whatever the formats."""
    with closing(loaded(*mixed_model(), threads=3)) as model:
        model.logits(batch_of(0, num_tokens))
        own = model._all
        assert own is not None and own.team._crew is not None
        own.team._crew._worker_words.view(WORKER)["share_last"][0] += 5_000  # as uneven as you like
        own.team._crew._worker_words.view(WORKER)["share_first"][1] += 5_000
        records, shares = own.linked.table.view(INSTRUCTION), dict[int, set[object]]()
        for record, step in zip(records, own.linked.program.instructions, strict=True):
            if step.kind is Kind.LINEAR and step.domain is Domain.TOKENS:
                instruction = record.__array_interface__["data"][0]
                workers = own.team._crew._workers
                parts = [shared_out(instruction, workers + i * WORKER.itemsize) for i in range(3)]
                assert step.output is not None
                shares.setdefault(step.output.width, set()).add(tuple(parts))
        assert 192 in shares
        assert all(len(found) == 1 for found in shares.values())


def test_logits_beyond_the_limit_are_not_computed() -> None:
    """They keep what another batch left there."""
    with closing(loaded(*random_model(ModelShape(vocab_size=200), seed=3))) as model:
        own = model._all
        assert own is not None
        logits = own.linked.rows(own.linked.program.logits, 1)
        model.step(batch_of(0, 1))
        before = logits.copy()
        model.step(replace(batch_of(0, 2), vocab_limit=17))
        changed = np.flatnonzero(logits[0] != before[0])
        assert 0 < changed.max() < 32  # whole row blocks


@pytest.mark.parametrize("asking", [{"num_logprobs": ints(1)}, {"target": ints(3)}])
def test_rows_of_a_batch_with_a_limit_may_not_ask_for_logprobs_of_other_tokens(
    model: CpuModel, asking: dict[str, Any]
) -> None:
    batch = batch_of(0, 3)
    with pytest.raises(InvariantViolation, match="vocab_limit"):
        model.step(replace(batch, sampling=replace(batch.sampling, **asking), vocab_limit=17))


def test_outputs_that_nobody_asked_for_are_shared_and_others_are_not(model: CpuModel) -> None:
    batch = batch_of(0, 3)
    plain = [model.step(batch) for _ in range(2)]
    assert plain[0].logprob is plain[1].logprob and not plain[0].logprob.flags.writeable
    asking = replace(batch, sampling=replace(batch.sampling, target=ints(5)))
    first = model.step(asking)
    expected = float(first.target_logprob[0])
    assert expected < 0.0
    model.step(replace(asking, sampling=replace(asking.sampling, target=ints(6))))
    assert first.target_logprob[0] == expected


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
