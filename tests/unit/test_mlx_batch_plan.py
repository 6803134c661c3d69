"""Batches in fixed shapes: every token and row keeps its place, padding stays out of sight. Needs no MLX."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mvllm.backends.mlx.batch_check import check_batch
from mvllm.backends.mlx.batch_plan import bucket, plan_batch, single_tokens
from mvllm.core.errors import InvariantViolation
from mvllm.core.step import ForwardBatch
from tests.conformance.random_models import Row, geometry, make_batch

BLOCK_SIZE = 4
SCRATCH = 64


@st.composite
def batches(draw: st.DrawFn) -> ForwardBatch:
    """Rows of 1 to 40 tokens on top of contexts of 0 to 90, with disjoint tables."""
    free = iter(np.random.default_rng(draw(st.integers(0, 9))).permutation(1000).tolist())
    rows = []
    for _ in range(draw(st.integers(1, 6))):
        start = draw(st.integers(0, 90))
        count = draw(st.sampled_from([1, 1, 1, 2, 5, 9, 17, 40]))
        table = [next(free) for _ in range(-(-(start + count) // BLOCK_SIZE))]
        num_logits = draw(st.sampled_from([0, 1, count]))
        rows.append(Row(list(range(start + count)), start, start + count, table, num_logits))
    return make_batch(rows, BLOCK_SIZE)


@given(size=st.integers(1, 100_000))
def test_a_bucket_is_no_smaller_and_at_most_a_quarter_larger(size: int) -> None:
    assert size <= bucket(size) < 1.25 * size + 1
    assert bucket(bucket(size)) == bucket(size)


def test_few_buckets_cover_many_sizes() -> None:
    assert len({bucket(size) for size in range(1, 513)}) == 8 + 6 * 4


@settings(max_examples=25)
@given(batch=batches())
def test_every_query_stands_once_among_the_groups_with_its_position_context_and_table(
    batch: ForwardBatch,
) -> None:
    plan = plan_batch(batch, block_size=BLOCK_SIZE, scratch_block=SCRATCH)
    seen = {}
    for group, shape in zip(plan.arrays.groups, plan.shape.groups, strict=True):
        assert group.positions.shape == (shape.rows, shape.queries)
        assert group.tables.shape == (shape.rows, shape.blocks)
        for index, token in enumerate(group.queries.tolist()):
            if token >= 0:
                row, query = divmod(index, shape.queries)
                seen[token] = (
                    group.positions[row, query],
                    group.context_lens[row],
                    tuple(block for block in group.tables[row].tolist() if block != SCRATCH),
                )
    rows = np.repeat(np.arange(batch.num_rows), np.diff(batch.row_starts))
    assert sorted(seen) == list(range(batch.num_tokens))
    for token, row in enumerate(rows.tolist()):
        used = -(-int(batch.context_lens[row]) // BLOCK_SIZE)
        assert seen[token] == (
            batch.positions[token],
            batch.context_lens[row],
            tuple(batch.block_tables[row, :used].tolist()),
        )


@settings(max_examples=25)
@given(batch=batches())
def test_answers_lead_each_token_back_to_its_own_query(batch: ForwardBatch) -> None:
    plan = plan_batch(batch, block_size=BLOCK_SIZE, scratch_block=SCRATCH)
    queries = np.concatenate([group.queries for group in plan.arrays.groups])
    if plan.shape.in_order:
        assert len(plan.arrays.groups) == 1
        assert len(queries) == plan.shape.tokens
        assert queries[: batch.num_tokens].tolist() == list(range(batch.num_tokens))
    else:
        assert len(plan.arrays.answers) == plan.shape.tokens
        answered = queries[plan.arrays.answers[: batch.num_tokens]]
        assert answered.tolist() == list(range(batch.num_tokens))
        assert plan.arrays.answers.max() < len(queries)


@settings(max_examples=25)
@given(batch=batches())
def test_padding_writes_to_the_scratch_block_only(batch: ForwardBatch) -> None:
    plan = plan_batch(batch, block_size=BLOCK_SIZE, scratch_block=SCRATCH)
    slots = plan.arrays.slots
    assert slots[: batch.num_tokens].tolist() == batch.slots.tolist()
    assert set(slots[batch.num_tokens :].tolist()) <= {SCRATCH * BLOCK_SIZE}
    assert len(slots) == plan.shape.tokens == bucket(batch.num_tokens)
    assert plan.shape.logit_rows == bucket(len(batch.logit_rows))


def test_a_decoding_batch_is_one_group_in_order() -> None:
    rows = [Row(list(range(20)), 19, 20, [5 * i + j for j in range(5)]) for i in range(7)]
    plan = plan_batch(make_batch(rows, BLOCK_SIZE), block_size=BLOCK_SIZE, scratch_block=SCRATCH)
    assert plan.shape.in_order
    assert [(group.rows, group.queries) for group in plan.shape.groups] == [(7, 1)]


def test_a_short_row_is_not_padded_to_a_long_one() -> None:
    long, short = Row(list(range(200)), 199, 200, list(range(50))), Row([1, 2], 1, 2, [50])
    plan = plan_batch(make_batch([long, short], BLOCK_SIZE), block_size=BLOCK_SIZE, scratch_block=SCRATCH)
    assert sorted(group.blocks for group in plan.shape.groups) == [1, 56]


@settings(max_examples=25)
@given(batch=batches())
def test_single_tokens_know_nothing_of_their_company(batch: ForwardBatch) -> None:
    parts = list(single_tokens(batch))
    assert [int(part.tokens[0]) for part in parts] == batch.tokens.tolist()
    assert [int(part.slots[0]) for part in parts] == batch.slots.tolist()
    assert [i for i, part in enumerate(parts) if len(part.logit_rows)] == batch.logit_rows.tolist()
    for part, position in zip(parts, batch.positions.tolist(), strict=True):
        plan = plan_batch(part, block_size=BLOCK_SIZE, scratch_block=SCRATCH)
        assert plan.shape.groups[0].blocks == bucket(position // BLOCK_SIZE + 1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tokens", [1, 2, 99]),
        ("tokens", [1, -1, 3]),
        ("positions", [0, 1, 5000]),
        ("slots", [0, 1, 64 * BLOCK_SIZE]),
        ("slots", [0, 1]),
        ("row_starts", [0, 2]),
        ("row_starts", [0, 0]),
        ("context_lens", [2]),
        ("context_lens", [30]),
        ("logit_rows", [3]),
        ("block_tables", [[64]]),
        ("block_tables", [[-1]]),
    ],
)
def test_a_batch_that_points_outside_is_refused(field: str, value: list[int]) -> None:
    good = make_batch([Row([1, 2, 3], 0, 3, [7])], BLOCK_SIZE)
    check_batch(good, geometry(block_size=BLOCK_SIZE), vocab_size=70)
    bad = ForwardBatch(**{**vars(good), field: np.array(value, np.int32)})
    with pytest.raises(InvariantViolation, match=field):
        check_batch(bad, geometry(block_size=BLOCK_SIZE), vocab_size=70)
