"""The parameter table that the compiled sampler reads: what each column holds, and how to fill it.

The sampler runs inside the backend's one compiled step, so its inputs and outputs are raw addresses. They are
checked here, once per step; the kernels don't check.
"""

from __future__ import annotations

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


_SAMPLING = _arrays(SamplingArrays)
_OUTPUT = _arrays(StepOutput)
COLUMNS = (*_NUMBERS_BEFORE, *_SAMPLING, *_OUTPUT, *_NUMBERS_AFTER)
"""Columns of the table: numbers, and addresses of the packed arrays of SamplingArrays and StepOutput."""

NUM_COLUMNS = len(COLUMNS)
PARAMETERS = np.dtype([(name, np.int64) for name in COLUMNS])
"""The table as a record, for the kernels."""


def sampler_scratch_bytes(vocab: int) -> int:
    """Bytes of scratch that one worker needs for rows of `vocab` logits, a multiple of a cache line."""
    blocks = ceil_div(vocab, BLOCK)
    return 8 * NUM_BUCKETS + MAXIMA * blocks * BLOCK + round_up(4 * blocks)


def empty_output(sampling: SamplingArrays) -> StepOutput:
    """A StepOutput for the rows of `sampling`, filled as for rows that ask for nothing."""
    rows, width = len(sampling.temperature), max(0, int(sampling.num_logprobs.max(initial=0)))
    return StepOutput(
        tokens=_no_tokens(rows),
        status=np.zeros(rows, np.int32),
        logprob=np.zeros(rows, np.float32),
        rank=np.zeros(rows, np.int32),
        target_logprob=np.zeros(rows, np.float32),
        top_tokens=_no_tokens(rows, width),
        top_logprobs=np.zeros((rows, width), np.float32),
    )


def _no_tokens(*shape: int) -> NDArray[np.int32]:
    tokens = np.empty(shape, np.int32)
    tokens.fill(NO_TOKEN)
    return tokens


class Addresses:
    """Where arrays lie. Owns a memo of the last ones by name: most of a step's arrays are those of the step
    before, and looking takes longer than anything else about them."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[NDArray[Any], int]] = {}

    def of(self, name: str, array: NDArray[Any], dtype: np.dtype[Any]) -> int:
        """The address of `array`, which stays alive until another one of that name comes.

        Raises:
            InvariantViolation: it isn't packed or has another dtype.
        """
        known = self._known.get(name)
        if known is not None and known[0] is array:
            return known[1]
        address = _address(name, array, dtype)
        self._known[name] = (array, address)
        return address


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
    addresses: Addresses | None = None,  # one that is kept from step to step saves time
) -> None:
    """Fill `table`. The caller keeps every array alive, and in place, while the kernel runs.

    Raises:
        InvariantViolation: an array isn't packed or has another dtype than the kernel will read.
    """
    addresses = addresses or Addresses()
    inputs = [addresses.of(name, getattr(sampling, name), dtype) for name, dtype in _SAMPLING.items()]
    outputs = [_address(name, getattr(output, name), dtype) for name, dtype in _OUTPUT.items()]
    top_width = output.top_tokens.shape[1]
    table[:] = [logits, row_stride, vocab, *inputs, *outputs, top_width, scratch, scratch_stride]


def _address(name: str, array: NDArray[Any], dtype: np.dtype[Any]) -> int:
    if array.dtype != dtype or not array.flags.c_contiguous:
        raise InvariantViolation(
            f"sampler: {name} must be packed {dtype}, got {array.dtype} with strides {array.strides}"
        )
    return address_of(array)
