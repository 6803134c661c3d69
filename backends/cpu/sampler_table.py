"""The parameter table that the compiled sampler reads: what each column holds, and how to fill it.

The sampler runs inside the backend's one compiled step, so its inputs and outputs are raw addresses. They are
checked here, once per step; the kernels don't check.
"""

from __future__ import annotations

from enum import IntEnum, auto
from typing import Any, get_args, get_type_hints

import numpy as np
from numpy.typing import NDArray

from mvllm.core.errors import InvariantViolation
from mvllm.core.sampling.sampler import NO_TOKEN
from mvllm.core.step import SamplingArrays, StepOutput
from mvllm.core.types import ceil_div

BLOCK = 64  # tokens per entry of the block maxima
BUCKET_BITS = 12
NUM_BUCKETS = 1 << BUCKET_BITS

_LINE_BYTES = 64
_BYTES_PER_TOKEN = 8 + 4 * 4  # a candidate's weight, id and key; a copy of the logit; an undecided candidate


class Column(IntEnum):
    """Columns of the int64 table. Plain numbers are marked; all others are addresses of packed arrays."""

    @staticmethod
    def _generate_next_value_(name: str, start: int, count: int, last_values: list[int]) -> int:
        return count

    LOGITS = auto()  # float32, S rows
    ROW_STRIDE = auto()  # number: floats from one row of logits to the next
    VOCAB = auto()  # number: V
    # the fields of SamplingArrays, in their order
    TEMPERATURE = auto()
    TOP_K = auto()
    TOP_P = auto()
    MIN_P = auto()
    REPETITION_PENALTY = auto()
    PRESENCE_PENALTY = auto()
    FREQUENCY_PENALTY = auto()
    SEED = auto()
    POSITION = auto()
    NUM_LOGPROBS = auto()
    TARGET = auto()
    COUNT_OFFSETS = auto()
    COUNT_TOKENS = auto()
    PROMPT_COUNTS = auto()
    OUTPUT_COUNTS = auto()
    BIAS_OFFSETS = auto()
    BIAS_TOKENS = auto()
    BIAS_VALUES = auto()
    # the fields of StepOutput, in their order
    TOKENS = auto()
    STATUS = auto()
    LOGPROB = auto()
    RANK = auto()
    TARGET_LOGPROB = auto()
    TOP_TOKENS = auto()
    TOP_LOGPROBS = auto()
    TOP_WIDTH = auto()  # number: K, columns of the two arrays above
    SCRATCH = auto()  # of worker 0
    SCRATCH_STRIDE = auto()  # number: bytes from one worker's scratch to the next


NUM_COLUMNS = len(Column)


def _columns(message: type) -> list[tuple[str, int, np.dtype[Any]]]:
    """Name, column and dtype of every array in a message of core/step.py, as its annotations say."""
    fields = get_type_hints(message)
    return [
        (name, int(Column[name.upper()]), np.dtype(get_args(get_args(hint)[1])[0]))
        for name, hint in fields.items()
    ]


_SAMPLING_COLUMNS = _columns(SamplingArrays)
_OUTPUT_COLUMNS = _columns(StepOutput)


def sampler_scratch_bytes(vocab: int) -> int:
    """Bytes of scratch that one worker needs for rows of `vocab` logits, a multiple of a cache line."""
    blocks = ceil_div(vocab, BLOCK)
    return (
        8 * NUM_BUCKETS + blocks * BLOCK * _BYTES_PER_TOKEN + ceil_div(4 * blocks, _LINE_BYTES) * _LINE_BYTES
    )


def empty_output(sampling: SamplingArrays) -> StepOutput:
    """A StepOutput for the rows of `sampling`, filled as for rows that ask for nothing."""
    rows, width = len(sampling.temperature), max(0, int(sampling.num_logprobs.max(initial=0)))
    return StepOutput(
        tokens=np.full(rows, NO_TOKEN, np.int32),
        status=np.zeros(rows, np.int32),
        logprob=np.zeros(rows, np.float32),
        rank=np.zeros(rows, np.int32),
        target_logprob=np.zeros(rows, np.float32),
        top_tokens=np.full((rows, width), NO_TOKEN, np.int32),
        top_logprobs=np.zeros((rows, width), np.float32),
    )


def pack_parameters(
    table: NDArray[np.int64],  # [NUM_COLUMNS], overwritten
    *,
    logits: int,  # address of float32 rows
    row_stride: int,  # floats from row to row, at least vocab
    vocab: int,
    sampling: SamplingArrays,
    output: StepOutput,  # from `empty_output`; the kernel writes into its arrays
    scratch: int,  # address, a multiple of 8
    scratch_stride: int,  # bytes per worker, at least sampler_scratch_bytes(vocab)
) -> None:
    """Fill `table`. The caller keeps every array alive, and in place, while the kernel runs.

    Raises:
        InvariantViolation: an array isn't packed or has another dtype than the kernel will read.
    """
    table[Column.LOGITS], table[Column.ROW_STRIDE], table[Column.VOCAB] = logits, row_stride, vocab
    table[Column.SCRATCH], table[Column.SCRATCH_STRIDE] = scratch, scratch_stride
    table[Column.TOP_WIDTH] = output.top_tokens.shape[1]
    for message, columns in ((sampling, _SAMPLING_COLUMNS), (output, _OUTPUT_COLUMNS)):
        for name, column, dtype in columns:
            table[column] = _address(name, getattr(message, name), dtype)


def _address(name: str, array: NDArray[Any], dtype: np.dtype[Any]) -> int:
    if array.dtype != dtype or not array.flags.c_contiguous:
        raise InvariantViolation(
            f"sampler: {name} must be packed {dtype}, got {array.dtype} with strides {array.strides}"
        )
    return int(array.__array_interface__["data"][0])
