"""A row with drafts asks the backend for exactly what decoding its drafts token by token would ask for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mvllm.core.batch.batcher import Batcher, BatchRow
from mvllm.core.batch.row_sampling import RowSampling
from mvllm.core.batch.sampling_row import SamplingRow
from mvllm.core.batch.token_counts import TokenCounts
from mvllm.core.request import Request, SamplingParams
from mvllm.core.step import ForwardBatch
from mvllm.core.types import BlockId, RequestId, ceil_div

BLOCK_SIZE = 3
token_lists = st.lists(st.integers(0, 5), max_size=5)


@st.composite
def sampling_rows(draw: st.DrawFn, prompt: tuple[int, ...]) -> SamplingRow:
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.7])),
        presence_penalty=draw(st.sampled_from([0.0, 1.0])),
        logit_bias=draw(st.dictionaries(st.integers(0, 5), st.just(2.0), max_size=2)),
        min_tokens=draw(st.integers(0, 8)),
        max_tokens=20,
        stop_token_ids=(4,),
        logprobs=draw(st.sampled_from([None, 2])),
    )
    seed = draw(st.integers(0, 3))
    return SamplingRow.of(Request(RequestId("r"), prompt, params, seed, 20, frozenset({5})))


@st.composite
def rows(draw: st.DrawFn, index: int) -> BatchRow:
    """A row that reaches its last committed token, with drafts and a logit row for each."""
    prompt = tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=6)))
    output, drafts = draw(token_lists), tuple(draw(token_lists))
    tokens = [*prompt, *output]
    row = draw(sampling_rows(prompt))
    return BatchRow(
        id=RequestId(str(index)),
        table=tuple(BlockId(100 * index + i) for i in range(ceil_div(len(tokens) + len(drafts), BLOCK_SIZE))),
        token_ids=tokens,
        drafts=drafts,
        start=draw(st.integers(0, len(tokens) - 1)),
        end=len(tokens) + len(drafts),
        sampling=RowSampling(row, counts_of(row, prompt, output), len(prompt)),
        num_logit_rows=1 + len(drafts),
    )


def counts_of(row: SamplingRow, prompt: Sequence[int], output: Sequence[int]) -> TokenCounts | None:
    if not row.has_penalties:
        return None
    counts = TokenCounts(prompt)
    counts.add_output(output)
    return counts


def decoded_alone(row: BatchRow, num_drafts: int) -> BatchRow:
    """The row if its first `num_drafts` drafts were its output and the last of these were to be computed."""
    assert row.sampling is not None
    tokens = [*row.token_ids, *row.drafts[:num_drafts]]
    num_prompt = row.sampling.num_prompt_tokens
    counts = counts_of(row.sampling.row, tokens[:num_prompt], tokens[num_prompt:])
    sampling = RowSampling(row.sampling.row, counts, num_prompt)
    start = row.start if num_drafts == 0 else len(tokens) - 1
    return BatchRow(row.id, row.table, tokens, (), start, len(tokens), sampling, 1)


def asked(batch: ForwardBatch) -> list[tuple[object, ...]]:
    """Everything that is asked for each logit row."""
    s = batch.sampling
    found = []
    for row, index in enumerate(batch.logit_rows.tolist()):
        counts, biases = slice(*s.count_offsets[row : row + 2]), slice(*s.bias_offsets[row : row + 2])
        constants = (s.temperature, s.top_k, s.top_p, s.min_p, s.repetition_penalty, s.presence_penalty)
        constants += (s.frequency_penalty, s.seed, s.position, s.num_logprobs, s.target)
        ragged = (s.count_tokens[counts], s.prompt_counts[counts], s.output_counts[counts])
        ragged += (s.bias_tokens[biases], s.bias_values[biases])
        place = (int(batch.tokens[index]), int(batch.positions[index]), int(batch.slots[index]))
        found.append((place, *[a[row].item() for a in constants], *[tuple(a.tolist()) for a in ragged]))
    return found


several_rows = st.integers(1, 3).flatmap(lambda count: st.tuples(*map(rows, range(count))))


@given(several_rows)
def test_m10_each_logit_row_is_the_one_of_decoding_token_by_token(batch_rows: tuple[BatchRow, ...]) -> None:
    """M10, L3, L5: penalties, bias, min_tokens and noise as if the drafts so far were output."""
    check_logit_rows(batch_rows)


def check_logit_rows(batch_rows: Sequence[BatchRow]) -> None:
    together = asked(Batcher(BLOCK_SIZE).pack(batch_rows))
    apart = [
        asked(Batcher(BLOCK_SIZE).pack([decoded_alone(row, count)]))[0]
        for row in batch_rows
        for count in range(len(row.drafts) + 1)
    ]
    assert together == apart


@given(rows(0))
def test_drafts_are_computed_like_tokens(row: BatchRow) -> None:
    """The same arithmetic as a chunk of the whole sequence."""
    whole = BatchRow(
        row.id, row.table, [*row.token_ids, *row.drafts], (), row.start, row.end, row.sampling, 1
    )
    one, two = Batcher(BLOCK_SIZE).pack([row]), Batcher(BLOCK_SIZE).pack([whole])
    for name in ("tokens", "positions", "slots", "row_starts", "context_lens", "block_tables"):
        assert np.array_equal(getattr(one, name), getattr(two, name)), name
    assert one.logit_rows.tolist() == list(range(row.end - row.start))[-row.num_logit_rows :]


@given(rows(0), st.data())
def test_fewer_logit_rows_are_the_last_ones(row: BatchRow, data: st.DataObject) -> None:
    """A drafter's row: it draws after its last draft only."""
    count = data.draw(st.integers(0, row.num_logit_rows))
    fewer = BatchRow(row.id, row.table, row.token_ids, row.drafts, row.start, row.end, row.sampling, count)
    all_rows = asked(Batcher(BLOCK_SIZE).pack([row]))
    assert asked(Batcher(BLOCK_SIZE).pack([fewer])) == all_rows[len(all_rows) - count :]


@given(st.lists(rows(0), min_size=2, max_size=4))
def test_the_memos_never_show(history: list[BatchRow]) -> None:
    """K8: whatever was packed before, a batch is a function of its rows."""
    batcher = Batcher(BLOCK_SIZE)
    for row in history:
        kept, fresh = batcher.pack([row]), Batcher(BLOCK_SIZE).pack([row])
        assert asked(kept) == asked(fresh)
        assert kept.block_tables.tolist() == fresh.block_tables.tolist()
