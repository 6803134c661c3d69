"""The fake model: tags that give paging errors away, and the faults that tests inject."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mvllm.backends.fake.backend import FakeBackend
from mvllm.backends.fake.model import FakeModel, Faults, InjectedFault
from mvllm.backends.fake.tags import FakeSampling, choose, tag_of
from mvllm.core.batch.sampling_arrays import SamplingPacker
from mvllm.core.errors import EngineClosed
from mvllm.core.step import ForwardBatch
from mvllm.core.types import BlockId


def batch(tokens: list[int], start: int, table: list[int], block_size: int = 2) -> ForwardBatch:
    """One row without a logit row."""
    positions = range(start, start + len(tokens))
    slots = [table[p // block_size] * block_size + p % block_size for p in positions]
    return ForwardBatch(
        tokens=np.array(tokens, np.int32),
        positions=np.array(positions, np.int32),
        slots=np.array(slots, np.int32),
        row_starts=np.array([0, len(tokens)], np.int32),
        context_lens=np.array([positions[-1] + 1], np.int32),
        block_tables=np.array([table], np.int32),
        logit_rows=np.array([], np.int32),
        sampling=SamplingPacker().pack([]),
    )


def test_a_position_holds_the_tag_of_its_whole_prefix_however_it_was_computed() -> None:
    """C2, K1."""
    model = FakeModel(8, num_blocks=4, block_size=2)
    model.step(batch([5, 6, 7], 0, [3, 1]))
    model.step(batch([4], 3, [3, 1]))
    assert [model.tag_at(slot) for slot in (6, 7, 2, 3)] == [tag_of([5, 6, 7, 4][:n]) for n in (1, 2, 3, 4)]
    assert model.violations == []


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda good: replace(good, block_tables=good.block_tables[:, ::-1].copy()), "goes to slot"),
        (lambda good: replace(good, slots=good.slots - 1), "goes to slot"),
        (lambda good: replace(good, context_lens=good.context_lens + 1), "context length"),
        (lambda good: replace(good, positions=good.positions + 1), "context length"),
        (lambda good: replace(good, block_tables=good.block_tables[:, :1]), "outside of table"),
    ],
)
def test_wrong_arrays_are_recorded(wrong: object, message: str) -> None:
    model = FakeModel(8, num_blocks=4, block_size=2)
    model.step(batch([5, 6], 0, [3, 1]))
    model.step(wrong(batch([7], 2, [3, 1])))  # type: ignore[operator]
    assert any(message in violation for violation in model.violations)


def test_reading_a_block_that_holds_another_prefix_is_recorded() -> None:
    """A stale hash or a reused block: each tag in it is fine, but not in this place."""
    model = FakeModel(8, num_blocks=4, block_size=2)
    model.step(batch([5, 6, 7, 1], 0, [3, 1]))
    model.step(batch([2, 2, 7, 1], 0, [0, 2]))
    model.step(batch([4], 4, [3, 2, 0]))
    assert any("reads" in violation for violation in model.violations)


def test_blocks_read_from_one_model_and_written_to_another_carry_the_sequence_on() -> None:
    """H1."""
    source, target = FakeModel(8, 4, 2), FakeModel(8, 4, 2)
    source.step(batch([5, 6, 7], 0, [3, 1]))
    target.write_blocks([BlockId(0), BlockId(2)], source.read_blocks([BlockId(3), BlockId(1)]))
    target.step(batch([4], 3, [0, 2]))
    assert target.tag_at(5) == tag_of([5, 6, 7, 4])
    assert target.violations == []


def test_an_injected_crash_writes_nothing() -> None:
    model = FakeModel(8, 4, 2, faults=Faults(crash_tokens=frozenset({7})))
    with pytest.raises(InjectedFault):
        model.step(batch([5, 7], 0, [3]))
    assert model.tag_at(6) is None


def test_a_closed_model_refuses_to_run() -> None:
    model = FakeModel(8, 4, 2)
    model.close()
    with pytest.raises(EngineClosed):
        model.step(batch([5], 0, [3]))


def test_the_choice_depends_on_seed_and_position_only_when_it_is_random() -> None:
    tag = tag_of([1, 2, 3])
    greedy = {choose(tag, 50, FakeSampling(position, seed)) for position in (3, 4) for seed in (0, 1, 2)}
    random = {choose(tag, 50, FakeSampling(3, seed, temperature=2.0)) for seed in range(20)}
    assert len(greedy) == 1
    assert len(random) > 3


def test_the_backend_promises_exact_rows() -> None:
    assert FakeBackend().capabilities.row_exact
