"""Where one form of a matrix product overtakes another: times of all forms over the number of tokens."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mvllm.backends.cpu import linear
from mvllm.backends.cpu.crossover import NEVER, measure
from mvllm.backends.cpu.isa import selected
from mvllm.backends.cpu.jit import native_function
from mvllm.backends.cpu.layout import (
    DENSE,
    GROUP,
    NARROW,
    QUANTIZED,
    ActivationLayout,
    packed_format,
)
from mvllm.backends.cpu.memory import aligned_zeros
from mvllm.backends.cpu.pack import Arena, PackedMatrix, pack_matrix
from mvllm.backends.cpu.pointers import i64_at
from mvllm.backends.cpu.record import Linear, Recorder, sensitive_weights
from mvllm.backends.cpu.team import Team, meet, share_of
from mvllm.core.errors import ConfigError
from mvllm.core.load.contents import Checkpoint
from mvllm.core.load.mlx_format import MLX_FORMATS
from mvllm.core.load.quantized import QUANT_FORMATS
from mvllm.core.load.weights import DENSE_DTYPES, AffineWeight, DenseWeight, HostWeight, QuantizedWeight
from mvllm.core.model.decoder import forward
from mvllm.core.types import ceil_div

TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
FORMS = ("rows", "tiles", "panels")

_MAX_WEIGHTS = 1 << 31
_COLD_BYTES = 64 << 20  # weights per round: more than the caches hold, as in a forward pass
_MAX_COPIES = 64
_OPERATIONS_AT_ONCE = 2e9  # of a round, if it takes more than one product
_SHAPE = re.compile(r"([A-Z0-9_]+)(?:/(narrow|wide))?:([0-9]{1,9})x([0-9]{1,9})")


@dataclass(frozen=True)
class ProductShape:
    """A matrix in a packed format, and how finely its activations are rounded (nothing for a dense one)."""

    format_name: str
    rows: int
    inputs: int
    records: ActivationLayout = NARROW

    def __str__(self) -> str:
        wide = "/wide" if self.records.is_wide else ""
        return f"{self.format_name}{wide}:{self.rows}x{self.inputs}"


@dataclass(frozen=True)
class Timing:
    """Seconds of one product in each of the forms that this many tokens can take."""

    tokens: int
    seconds: dict[str, float]


@dataclass(frozen=True)
class Crossover:
    """The forms of one product compared. `panels_from` is what the backend would choose; None: no panels."""

    shape: ProductShape
    timings: tuple[Timing, ...]
    panels_from: int | None

    def operations_per_second(self, timing: Timing, form: str) -> float:
        """A multiplication and an addition count as two."""
        return 2 * timing.tokens * self.shape.rows * self.shape.inputs / timing.seconds[form]


def parse_shape(text: str) -> ProductShape:
    """FORMAT:ROWSxINPUTS or FORMAT/wide:ROWSxINPUTS.

    Raises:
        ConfigError: it isn't, or such a matrix can't be.
    """
    match = _SHAPE.fullmatch(text)
    if match is None or match[1] not in (*QUANTIZED, *DENSE):
        known = ", ".join([*QUANTIZED, *DENSE])
        raise ConfigError(f"a shape is FORMAT:ROWSxINPUTS, of the formats {known}; got {text!r}")
    name, rows, inputs = match[1], int(match[3]), int(match[4])
    multiple = GROUP * QUANTIZED[name].superblock if name in QUANTIZED else 1
    if rows < 1 or inputs < 1 or inputs % multiple or rows * inputs > _MAX_WEIGHTS:
        raise ConfigError(
            f"{text}: needs rows, a multiple of {multiple} inputs, and fewer than 2**31 weights"
        )
    return ProductShape(name, rows, inputs, selected().wide if match[2] == "wide" else NARROW)


def shapes_of(checkpoint: Checkpoint) -> list[ProductShape]:
    """The different products of a model, in the order they come in."""
    recorder = Recorder(sensitive_weights(checkpoint.weights), selected().wide)
    forward(recorder, checkpoint.spec, checkpoint.weights)
    products = [node.operation for node in recorder.nodes if isinstance(node.operation, Linear)]
    shapes = []
    for product in products:
        format_name = packed_format(product.weight.format_name)
        assert format_name is not None, "the loader refuses unknown formats"
        rows, inputs = product.weight.shape
        shapes.append(ProductShape(format_name, rows, inputs, product.activations or NARROW))
    return list(dict.fromkeys(shapes))


def compare_forms(
    shapes: Sequence[ProductShape], threads: int, seconds: float, tokens: Sequence[int] = TOKENS
) -> Iterator[Crossover]:
    """Time every shape, about `seconds` for each form and number of tokens."""
    team = Team(threads, native_function("void(int64, int64)", _multiply_all).address)
    try:
        for shape in shapes:
            matrices = _matrices(shape)
            timings = tuple(_time_forms(team, matrices, shape, count, seconds) for count in tokens)
            threshold = measure(matrices[0], shape.records)
            yield Crossover(shape, timings, None if threshold == NEVER else threshold)
    finally:
        team.close()


_JOB = ("descriptors", "count", "blocks", "activations", "stride", "out", "out_stride", "tokens", "at_once")
_DESCRIPTORS, _COUNT, _BLOCKS, _ACTIVATIONS, _STRIDE, _OUT, _OUT_STRIDE, _TOKENS, _AT_ONCE = range(len(_JOB))


def _multiply_all(argument: Any, worker: Any) -> None:
    """This thread's share of `count` products, `at_once` tokens together; all meet after each. Compiled."""
    job = i64_at(argument)
    first, last = share_of(worker, job[_BLOCKS])
    for index in range(job[_COUNT]):
        for token in range(0, job[_TOKENS], job[_AT_ONCE]):
            linear.matmul(  # type: ignore[no-untyped-call]
                i64_at(job[_DESCRIPTORS])[index],
                job[_ACTIVATIONS] + token * job[_STRIDE],
                job[_STRIDE],
                job[_OUT] + token * job[_OUT_STRIDE],
                job[_OUT_STRIDE],
                job[_AT_ONCE],
                first,
                last,
            )
        meet(worker)


def _time_forms(
    team: Team, matrices: Sequence[PackedMatrix], shape: ProductShape, tokens: int, seconds: float
) -> Timing:
    matrix = matrices[0]
    stride = 4 * shape.inputs if shape.format_name in DENSE else shape.records.row_bytes(shape.inputs)
    out_stride = 4 * matrix.padded_rows
    activations = aligned_zeros(tokens * stride, "activations")
    out = aligned_zeros(tokens * out_stride, "outputs")
    operations = 2 * tokens * shape.rows * shape.inputs
    count = max(1, min(len(matrices), int(_OPERATIONS_AT_ONCE / operations)))
    jobs = {}
    for form in FORMS if tokens > 1 else FORMS[:1]:
        panels_from = 2 if form == "panels" else NEVER
        descriptors = np.array([m.product_descriptor(shape.records, panels_from) for m in matrices], np.int64)
        at_once = 1 if form == "rows" else tokens
        fields = (
            descriptors.ctypes.data,
            count,
            matrix.num_blocks,
            activations.ctypes.data,
            stride,
            out.ctypes.data,
            out_stride,
            tokens,
            at_once,
        )
        jobs[form] = (descriptors, np.array(fields, np.int64))
    times: dict[str, list[float]] = {form: [] for form in jobs}
    end = time.perf_counter() + seconds * len(jobs)
    while len(times["rows"]) < 3 or time.perf_counter() < end:
        for form, (_, job) in jobs.items():
            start = time.perf_counter()
            team.run(job.ctypes.data)
            times[form].append((time.perf_counter() - start) / count)
    return Timing(tokens, {form: statistics.median(found) for form, found in times.items()})


def _matrices(shape: ProductShape) -> list[PackedMatrix]:
    """Copies of one matrix, more than the caches hold. All rows are the same."""
    isa = selected()
    [pattern] = pack_matrix([_weight(shape.format_name, isa.lanes, shape.inputs)], Arena(), isa=isa).data
    num_blocks = ceil_div(shape.rows, isa.lanes)
    nbytes = num_blocks * pattern.nbytes
    arena, matrices = Arena(), []
    for _ in range(max(1, min(_MAX_COPIES, _COLD_BYTES // nbytes))):
        data = arena.allocate(nbytes).reshape(num_blocks, -1)
        data[:] = pattern
        names = (str(shape),)
        matrices.append(
            PackedMatrix(names, shape.format_name, isa, shape.rows, shape.inputs, num_blocks, data)
        )
    return matrices


def _weight(format_name: str, rows: int, inputs: int) -> HostWeight:
    """Zeros, which take as long as other values."""
    if format_name in DENSE:
        return DenseWeight("zeros", format_name, np.zeros((rows, inputs), DENSE_DTYPES[format_name]))
    if format_name not in QUANT_FORMATS:
        return _affine_weight(format_name, rows, inputs)
    format = QUANT_FORMATS[format_name]
    stored = np.zeros((rows, inputs // format.block_size * format.block_bytes), np.uint8)
    return QuantizedWeight("zeros", format, stored)


def _affine_weight(packed_name: str, rows: int, inputs: int) -> AffineWeight:
    """Zeros in a format of MLX's that is packed as `packed_name`, with groups of 32."""
    format = next(
        format
        for name, format in MLX_FORMATS.items()
        if packed_format(name) == packed_name and format.group_size == GROUP
    )
    codes = np.zeros((rows, inputs * format.bits // 32), np.uint32)
    factors = np.zeros((rows, inputs // GROUP), DENSE_DTYPES[format.name.rpartition("_")[-1]])
    return AffineWeight("zeros", format, codes, factors, factors)
