"""The parameter table that the compiled sampler reads: what each column holds, and how to fill it.

The sampler runs inside the backend's one compiled step, so its inputs and outputs are raw addresses. They are
checked here, once per step; the kernels don't check.
"""

from __future__ import annotations

import functools
import struct
from typing import Any, get_args, get_type_hints

import numpy as np
from numpy.typing import NDArray

from mvllm.backends.cpu.memory import address_of, round_up
from mvllm.core.errors import InvariantViolation
from mvllm.core.sampling.sampler import NO_TOKEN
from mvllm.core.step import SamplingArrays, StepOutput
from mvllm.core.types import ceil_div

BLOCK = 64  # tokens per entry of the block maxima
BUCKET_BITS = 12
NUM_BUCKETS = 1 << BUCKET_BITS

# Parts of a worker's scratch behind the buckets (int64), named by the bytes per token before them.
WEIGHTS = 0  # int64 per candidate
IDS = 8  # int32 per candidate
KEYS = 12  # int32 per candidate
ROW_COPY = 16  # float32 per token: the row after penalties and bias
UNDECIDED = 20  # int32 per candidate
MAXIMA = 24  # int32 per block

_NUMBERS_BEFORE = (
    "logits",  # address of float32 rows
    "row_stride",  # floats from one row of logits to the next
    "vocab",  # V: ids from it on can't be drawn
)
_NUMBERS_AFTER = (
    "top_width",  # K, columns of top_tokens and top_logprobs
    "scratch",  # address of worker 0's scratch
    "scratch_stride",  # bytes from one worker's scratch to the next
)


def _arrays(message: type) -> dict[str, np.dtype[Any]]:
    """The array fields of a message of core/step.py, with the dtypes of their annotations."""
    hints = get_type_hints(message)
    return {name: np.dtype(get_args(get_args(hint)[1])[0]) for name, hint in hints.items()}


COLUMNS = (*_NUMBERS_BEFORE, *_arrays(SamplingArrays), *_arrays(StepOutput), *_NUMBERS_AFTER)
"""Columns of the table: numbers, and addresses of the packed arrays of SamplingArrays and StepOutput."""

NUM_COLUMNS = len(COLUMNS)
PARAMETERS = np.dtype([(name, np.int64) for name in COLUMNS])
"""The table as a record, for the kernels."""

_TABLE = struct.Struct(f"{NUM_COLUMNS}q")


def sampler_scratch_bytes(vocab: int) -> int:
    """Bytes of scratch that one worker needs for rows of `vocab` logits, a multiple of a cache line."""
    blocks = ceil_div(vocab, BLOCK)
    return 8 * NUM_BUCKETS + MAXIMA * blocks * BLOCK + round_up(4 * blocks)


def empty_output(sampling: SamplingArrays) -> StepOutput:
    """A StepOutput for the rows of `sampling`, filled as for rows that ask for nothing.

    If none asks for log-probabilities, their arrays are shared by all such outputs and can't be written.
    """
    rows = len(sampling.temperature)
    if asks_for_logprobs(sampling):
        logprobs = _no_logprobs(rows, max(sampling.num_logprobs.tolist()))
    else:
        logprobs = _shared_no_logprobs(rows)
    return StepOutput(_no_tokens(rows), np.zeros(rows, np.int32), **logprobs)


def asks_for_logprobs(sampling: SamplingArrays) -> bool:
    """Whether any row wants the log-probability of a token."""
    return max(sampling.num_logprobs.tolist(), default=-1) >= 0 or asks_for_other_logprobs(sampling)


def asks_for_other_logprobs(sampling: SamplingArrays) -> bool:
    """Whether any row wants the log-probability of a token that was not chosen."""
    return (
        max(sampling.num_logprobs.tolist(), default=-1) > 0 or max(sampling.target.tolist(), default=-1) >= 0
    )


def _no_logprobs(rows: int, width: int) -> dict[str, NDArray[Any]]:
    """What a StepOutput says of log-probabilities, with `width` columns for the most likely tokens."""
    shape = (rows, max(0, width))
    return {
        "logprob": np.zeros(rows, np.float32),
        "rank": np.zeros(rows, np.int32),
        "target_logprob": np.zeros(rows, np.float32),
        "top_tokens": _no_tokens(*shape),
        "top_logprobs": np.zeros(shape, np.float32),
    }


@functools.lru_cache(maxsize=32)
def _shared_no_logprobs(rows: int) -> dict[str, NDArray[Any]]:
    logprobs = _no_logprobs(rows, 0)
    for array in logprobs.values():
        array.flags.writeable = False
    return logprobs


def _no_tokens(*shape: int) -> NDArray[np.int32]:
    tokens = np.empty(shape, np.int32)
    tokens.fill(NO_TOKEN)
    return tokens


class Addresses:
    """Where the arrays of messages of one kind lie. Owns a memo of the last ones: most of a step's arrays are
    those of the step before, and looking takes longer than anything else about them."""

    def __init__(self, message: type[SamplingArrays | StepOutput]) -> None:
        self._dtypes = list(_arrays(message).items())
        self._known: list[NDArray[Any] | None] = [None] * len(self._dtypes)
        self._addresses = [0] * len(self._dtypes)

    def of(self, message: SamplingArrays | StepOutput) -> list[int]:
        """The addresses of its arrays, in order; each stays alive until another one takes its place.

        Raises:
            InvariantViolation: one isn't packed or has another dtype.
        """
        known = self._known
        for index, array in enumerate(vars(message).values()):
            if array is not known[index]:
                self._addresses[index] = _address(*self._dtypes[index], array)
                known[index] = array
        return self._addresses


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
    inputs: Addresses | None = None,  # one for SamplingArrays that is kept from step to step saves time
    outputs: Addresses | None = None,  # and one for StepOutputs
) -> None:
    """Fill `table`. The caller keeps every array alive, and in place, while the kernel runs.

    Raises:
        InvariantViolation: an array isn't packed or has another dtype than the kernel will read.
    """
    numbers_before = logits, row_stride, vocab
    numbers_after = output.top_tokens.shape[1], scratch, scratch_stride
    sampled = (inputs or Addresses(SamplingArrays)).of(sampling)
    written = (outputs or Addresses(StepOutput)).of(output)
    _TABLE.pack_into(table.data, 0, *numbers_before, *sampled, *written, *numbers_after)


def _address(name: str, dtype: np.dtype[Any], array: NDArray[Any]) -> int:
    if array.dtype != dtype or not array.flags.c_contiguous:
        raise InvariantViolation(
            f"sampler: {name} must be packed {dtype}, got {array.dtype} with strides {array.strides}"
        )
    return address_of(array)
