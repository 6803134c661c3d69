"""Packing of planned rows into arrays."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mvllm.core.batch.batcher import Batcher
from mvllm.core.batch.sampling_row import SamplingRow
from mvllm.core.engine.forward import batch_rows
from mvllm.core.engine.request_table import RequestState, RequestTable
from mvllm.core.request import Request, SamplingParams
from mvllm.core.step import ForwardBatch, KvGrant, PlannedRow, RowDecision
from mvllm.core.types import BlockId, RequestId


def running(
    table: RequestTable,
    id: str,
    prompt: tuple[int, ...],
    output: tuple[int, ...] = (),
    *,
    seed: int = 0,
    eos: tuple[int, ...] = (),
    **params: Any,
) -> RequestState:
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 16, **params})
    request = Request(RequestId(id), prompt, sampling, seed, 16, frozenset(eos))
    state = table.add(request, SamplingRow.of(request), None)
    table.admit(request.id, 0)
    if output:
        table.commit(RowDecision(request.id, len(prompt) + len(output) - 1, output), None)
    return state


def pack(
    batcher: Batcher, rows: list[tuple[RequestState, int, int]], tables: dict[str, tuple[int, ...]]
) -> ForwardBatch:
    planned = [PlannedRow(state.id, start, count) for state, start, count in rows]
    granted = {RequestId(id): tuple(map(BlockId, blocks)) for id, blocks in tables.items()}
    states = [state for state, _, _ in rows]
    return batcher.pack(batch_rows(planned, states, KvGrant(granted, {}), [()] * len(rows)))


def ragged(offsets: NDArray[np.int32], values: NDArray[np.generic], row: int) -> list[float]:
    return list(values[offsets[row] : offsets[row + 1]].tolist())


def test_chunk_and_decode_rows_are_laid_out_one_after_the_other() -> None:
    table = RequestTable()
    decode = running(table, "decode", (5, 6, 7), (8,))
    chunk = running(table, "chunk", (1, 2, 3, 4, 5, 6))
    batch = pack(Batcher(2), [(decode, 3, 1), (chunk, 1, 3)], {"decode": (9, 4), "chunk": (0, 7)})
    assert batch.tokens.tolist() == [8, 2, 3, 4]
    assert batch.positions.tolist() == [3, 1, 2, 3]
    assert batch.slots.tolist() == [9, 1, 14, 15]
    assert batch.row_starts.tolist() == [0, 1, 4]
    assert batch.context_lens.tolist() == [4, 4]
    assert batch.block_tables.tolist() == [[9, 4], [0, 7]]


def test_only_rows_planned_to_their_last_token_get_a_logit_row() -> None:
    """S13, K4: nothing is sampled in the middle of a prompt."""
    table = RequestTable()
    middle = running(table, "middle", (1, 2, 3, 4))
    whole = running(table, "whole", (1, 2, 3), seed=2**64 - 1)
    batch = pack(Batcher(4), [(middle, 0, 3), (whole, 0, 3)], {"middle": (0,), "whole": (1,)})
    assert batch.logit_rows.tolist() == [5]
    assert batch.sampling.seed.tolist() == [2**64 - 1]
    assert batch.sampling.position.tolist() == [3]


def test_a_batch_without_logit_rows_has_empty_sampling_arrays() -> None:
    table = RequestTable()
    middle = running(table, "middle", (1, 2, 3, 4))
    sampling = pack(Batcher(4), [(middle, 0, 3)], {"middle": (0,)}).sampling
    assert sampling.temperature.shape == sampling.count_tokens.shape == (0,)
    assert sampling.count_offsets.tolist() == sampling.bias_offsets.tolist() == [0]


def test_each_sampling_parameter_reaches_its_own_array() -> None:
    table = RequestTable()
    state = running(
        table,
        "r",
        (1,),
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.75,
        logprobs=3,
    )
    sampling = pack(Batcher(4), [(state, 0, 1)], {"r": (0,)}).sampling
    found = {
        name: getattr(sampling, name).tolist()
        for name in ("temperature", "top_p", "top_k", "min_p", "num_logprobs", "target")
    }
    assert found == {
        "temperature": [0.5],
        "top_p": [0.25],
        "top_k": [7],
        "min_p": [0.125],
        "num_logprobs": [3],
        "target": [-1],
    }
    assert sampling.repetition_penalty.tolist() == [1.5]
    assert sampling.presence_penalty.tolist() == [-0.5]
    assert sampling.frequency_penalty.tolist() == [0.75]


def test_arrays_have_the_declared_types_and_are_contiguous() -> None:
    table = RequestTable()
    states = [running(table, f"r{i}", (1, 2), presence_penalty=1.0, logit_bias={3: 1.0}) for i in range(3)]
    batch = pack(Batcher(2), [(s, 0, 2) for s in states], {f"r{i}": (i,) for i in range(3)})
    floats = {
        "temperature",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "bias_values",
    }
    for holder in (batch, batch.sampling):
        for name, value in vars(holder).items():
            if isinstance(value, np.ndarray):
                expected = np.float32 if name in floats else np.uint64 if name == "seed" else np.int32
                assert value.dtype == expected, name
                assert value.flags.c_contiguous, name


def test_counts_tell_prompt_from_output_and_only_rows_with_penalties_have_them() -> None:
    """REQUIREMENTS D1, M10."""
    table = RequestTable()
    plain = running(table, "plain", (4, 4), (4,))
    penalized = running(table, "penalized", (7, 2, 7), (9, 7, 0), repetition_penalty=1.1)
    table.preempt(penalized.id)
    table.admit(penalized.id, 0)
    sampling = pack(
        Batcher(8), [(plain, 2, 1), (penalized, 0, 6)], {"plain": (0,), "penalized": (1,)}
    ).sampling
    assert sampling.count_offsets.tolist() == [0, 0, 4]
    assert sampling.count_tokens.tolist() == [0, 2, 7, 9]
    assert sampling.prompt_counts.tolist() == [0, 1, 2, 0]
    assert sampling.output_counts.tolist() == [1, 0, 1, 1]


def test_min_tokens_bans_what_would_end_the_output_until_it_is_long_enough() -> None:
    """L8: end of sequence and stop tokens; a ban outweighs the caller's bias."""
    table = RequestTable()
    early = running(
        table, "early", (1,), (2,), min_tokens=2, stop_token_ids=(6,), eos=(3,), logit_bias={6: 5, 4: 1}
    )
    late = running(
        table, "late", (1,), (2, 2), min_tokens=2, stop_token_ids=(6,), eos=(3,), logit_bias={4: 1}
    )
    ignoring = running(table, "ignoring", (1,), min_tokens=2, ignore_eos=True, eos=(3,))
    sampling = pack(
        Batcher(4),
        [(early, 1, 1), (late, 2, 1), (ignoring, 0, 1)],
        {"early": (0,), "late": (1,), "ignoring": (2,)},
    ).sampling
    assert ragged(sampling.bias_offsets, sampling.bias_tokens, 0) == [3, 4, 6]
    assert ragged(sampling.bias_offsets, sampling.bias_values, 0) == [-math.inf, 1.0, -math.inf]
    assert ragged(sampling.bias_offsets, sampling.bias_tokens, 1) == [4]
    assert ragged(sampling.bias_offsets, sampling.bias_tokens, 2) == []


def test_the_memo_of_block_tables_never_shows() -> None:
    """K8: grown, rewritten and re-admitted tables are packed as they are now."""
    table = RequestTable()
    first, second = running(table, "first", (1,) * 6), running(table, "second", (1,) * 6)
    batcher = Batcher(2)
    steps: list[dict[str, tuple[int, ...]]] = [
        {"first": (0, 1), "second": (2, 3, 4)},
        {"first": (0, 1, 5), "second": (2, 3, 4)},
        {"first": (9, 1, 5), "second": (2,)},
    ]
    for tables in steps:
        rows = [(first, 0, 2), (second, 0, 2)]
        kept, fresh = pack(batcher, rows, tables), pack(Batcher(2), rows, tables)
        assert kept.block_tables.tolist() == fresh.block_tables.tolist()
        width = max(map(len, tables.values()))
        assert kept.block_tables.tolist() == [
            [*blocks, *[-1] * (width - len(blocks))] for blocks in tables.values()
        ]
