"""Layout of the tables through which Python tells compiled code what to do. All addresses are int64."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np


class Domain(IntEnum):
    """What the rows of a matrix stand for."""

    TOKENS = 0
    LOGIT_ROWS = 1


class Regime(IntEnum):
    """Kinds of batch that need different barriers (see program.py)."""

    ONE_TOKEN = 0
    ONE_LOGIT_ROW = 1  # of several tokens
    MANY = 2


def regime_of(num_tokens: int, num_logit_rows: int) -> Regime:
    """The regime of a batch. Without logit rows the instructions over them do nothing, in any regime."""
    if num_tokens == 1:
        return Regime.ONE_TOKEN
    return Regime.ONE_LOGIT_ROW if num_logit_rows == 1 else Regime.MANY


def has_single_row(domain: Domain, regime: Regime) -> bool:
    """Whether matrices over `domain` have at most one row."""
    return regime is Regime.ONE_TOKEN or (regime is Regime.ONE_LOGIT_ROW and domain is Domain.LOGIT_ROWS)


class Epilogue(IntEnum):
    """What a linear instruction does with its own columns after the product and the bias."""

    NONE = 0
    ADD = 1  # other + out
    SILU = 2  # silu(other) * out
    GELU_TANH = 3  # gelu_tanh(other) * out
    SOFT_CAP = 4  # cap * tanh(out / cap)


def _record(*fields: tuple[str, Any]) -> np.dtype[Any]:
    return np.dtype(list(fields), align=True)


_INT, _FLOAT = np.int64, np.float32

OPERAND = _record(
    ("address", _INT),
    ("stride", _INT),  # bytes from row to row
    ("private", _INT),  # 1: with a single row, each thread has its own copy, in the row of its number
)

INSTRUCTION = _record(
    ("function", _INT),  # address of a compiled void(instruction, worker)
    ("barriers", _INT),  # bit r: all threads meet before this instruction in regime r
    ("domain", _INT),
    ("replicated", _INT),  # 1: with a single row, every thread does the whole work, into its private row
    ("width", _INT),  # floats per row of the output
    ("parameters", _INT),  # address of one of the records below
    ("input", OPERAND),
    ("other", OPERAND),
    ("output", OPERAND),
)

BATCH_FIELDS = (
    ("num_tokens", _INT),
    ("num_rows", _INT),
    ("num_logit_rows", _INT),
    ("table_width", _INT),
    ("vocab_limit", _INT),  # columns of the logits that are wanted
    ("regime", _INT),
    ("tokens", _INT),  # int32[T]
    ("positions", _INT),  # int32[T]
    ("slots", _INT),  # int32[T]
    ("row_starts", _INT),  # int32[R + 1]
    ("context_lens", _INT),  # int32[R]
    ("block_tables", _INT),  # int32[R, table_width]
    ("logit_rows", _INT),  # int32[S]
)
"""Fields of STEP that a batch fills; `StepInputs.set_batch` writes them in this order."""

STEP = _record(
    *BATCH_FIELDS,
    ("instructions", _INT),
    ("num_instructions", _INT),
    ("items", _INT),  # ITEM[num_items]: the attention's work, see attention_plan.py
    ("num_items", _INT),
    ("splits", _INT),  # SPLIT[num_splits]
    ("num_splits", _INT),
    ("states", _INT),  # memory for the states of the splits' parts
    ("states_bytes", _INT),
    ("states_used", _INT),
    ("next_item", _INT),  # int64 counters, one cache line each, one per attention instruction
    ("num_counters", _INT),
    ("scratch", _INT),  # attention scratch of thread 0
    ("scratch_stride", _INT),  # bytes from thread to thread
    ("sampling", _INT),  # the sampler's parameter table, or 0: don't sample
    ("times", _INT),  # int64[threads, num_instructions, NUM_TIMES], or 0: take no times
)

ITEM = _record(
    ("row", _INT),  # of the batch
    ("kv_head", _INT),
    ("first", _INT),  # query row: token * group + head
    ("count", _INT),  # of query rows
    ("first_part", _INT),  # of the positions, see PART in attention.py
    ("last_part", _INT),  # exclusive
    ("split", _INT),  # address of the SPLIT of the items that cover the other parts; 0: there are none
)

SPLIT = _record(
    ("items", _INT),  # that share the query rows
    ("done", _INT),  # of them; atomic
    ("num_parts", _INT),
    ("states", _INT),  # the parts' states, see attention.py
)

ARRIVED, STARTED, ENDED = range(3)
NUM_TIMES = 3
"""Times of one instruction on one thread, ns: it waits from `ARRIVED` on, and works from `STARTED` on."""

EMBED = _record(("descriptor", _INT))

NORM = _record(
    ("gain", _INT),  # float32[group]
    ("group", _INT),
    ("eps", _FLOAT),
)

QUANTIZE = _record(("layout", _INT))  # one of `layout.LAYOUT_NUMBERS`

LINEAR = _record(
    ("descriptor", _INT),
    ("bias", _INT),  # float32[width], or 0
    ("blocks", _INT),
    ("lanes", _INT),  # columns per block
    ("epilogue", _INT),
    ("cap", _FLOAT),
)

ROTATE = _record(
    ("cos", _INT),  # float32[max_context, half]
    ("sin", _INT),
    ("half", _INT),  # head_dim / 2
)

SCALAR = _record(("value", _FLOAT))

GATE = _record(("epilogue", _INT))

ATTENTION = _record(
    ("layer", _INT),  # address of the layer's blocks, see kv_pool.py
    ("block_bytes", _INT),
    ("head_bytes", _INT),
    ("value_offset", _INT),  # bytes from a head's keys to its values
    ("block_size", _INT),
    ("tile", _INT),  # positions interleaved in the keys
    ("head_dim", _INT),
    ("padded_dim", _INT),
    ("kv_heads", _INT),
    ("group", _INT),  # query heads per kv head
    ("is_half", _INT),
    ("score", _INT),  # addresses of the code for this type of KV, see attention_kernels.py
    ("add_values", _INT),
    ("window", _INT),  # 0: none
    ("counter", _INT),  # index of this instruction's counter in STEP.next_item
    ("scale", _FLOAT),
    ("soft_cap", _FLOAT),  # 0: none
)

ATTENTION_WORK = _record(  # what a thread knows of the item it works on; addresses in its scratch
    ("attention", _INT),
    ("table", _INT),  # the sequence's block table
    ("head", _INT),  # address of the kv head in block 0
    ("value_bytes", _INT),
    ("rows", _INT),  # query rows
    ("first", _INT),  # positions that any of them sees
    ("last", _INT),
    ("begins", _INT),  # int64[MAX_ROWS]: the positions that each of them sees
    ("ends", _INT),
    ("units", _INT),  # table of a span's tiles and of runs of its values, see attention_kernels.py
    ("runs", _INT),  # table of runs that not all query rows see
    ("scores", _INT),  # float32[MAX_ROWS, SPAN], SCORES_BYTES from row to row
    ("keys", _INT),  # a tile put together from smaller ones
    ("queries", _INT),  # float32, those taken at once side by side: [head_dim, width] after each other
    ("totals", _INT),  # states of the query rows
    ("parts", _INT),  # and of a part of their positions
    ("state_bytes", _INT),
)
