"""Up to how many rows a product on MLX is faster row by row: the value of `--mlx-rows-apart`.

    mvllm bench crossover MODEL --backend mlx

Every shape and form of matrix in the model is timed with 2 to 16 rows, whole and apart, taking turns. What is
recommended is the largest number of rows up to which apart is faster, summed over all products of a step.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import numpy as np

from mvllm.backends.mlx.device import DTYPES, choose_device
from mvllm.backends.mlx.encode import matrices
from mvllm.backends.mlx.options import MlxOptions
from mvllm.backends.mlx.tensor_ops import row_by_row
from mvllm.backends.mlx.weights import Matrix, place_matrix
from mvllm.core.tensor import ModelWeights, Weight

ROW_COUNTS = (2, 3, 4, 6, 8, 12, 16)
REPEATS = 5
MARGIN = 0.97
"""Apart has to take at most this share of the time, so that noise turns nothing on."""

Clock = Callable[[], float]


@dataclass(frozen=True)
class ProductTimes:
    """Medians of seconds for one kind of matrix, by number of rows."""

    outputs: int
    inputs: int
    form: str
    per_step: int  # products with such a matrix in one step
    whole: dict[int, float]
    apart: dict[int, float]


def measure(
    weights: ModelWeights,
    options: MlxOptions,
    *,
    row_counts: Sequence[int] = ROW_COUNTS,
    repeats: int = REPEATS,
    clock: Clock = time.perf_counter,
) -> list[ProductTimes]:
    """Time one matrix of each format and shape, whole and row by row, on the device of the options.

    Raises:
        CapacityError: memory for a matrix can't be had.
        BackendUnavailable: the options ask for a GPU, and MLX has none here.
    """
    device = choose_device(options)
    used = matrices(weights)[1:]  # the embedding is looked up, not multiplied; a tied head stands last
    per_step = Counter(map(_kind, used))
    examples = {_kind(weight): weight for weight in used}
    results = []
    for kind, weight in examples.items():
        with mx.stream(device):
            matrix = place_matrix(weight, options, device)
            whole, apart = _times(matrix, weight.shape[1], options, row_counts, repeats, clock)
        outputs, inputs = weight.shape
        results.append(ProductTimes(outputs, inputs, matrix.form, per_step[kind], whole, apart))
    return results


def rows_apart(results: Iterable[ProductTimes]) -> int:
    """The largest measured number of rows up to which a step's products are faster row by row; 0: none is."""
    results = list(results)
    best = 0
    for count in sorted(results[0].whole):
        whole = sum(kind.per_step * kind.whole[count] for kind in results)
        apart = sum(kind.per_step * kind.apart[count] for kind in results)
        if apart > MARGIN * whole:
            break
        best = count
    return best


def table(results: Sequence[ProductTimes]) -> str:
    """Time row by row over time whole: below 1, apart is faster."""
    counts = sorted(results[0].whole)
    lines = [
        "time row by row / time whole, by number of rows",
        f"{'matrix':>16} {'form':24} {'per step':>8}" + "".join(f"{count:>7}" for count in counts),
    ]
    for kind in results:
        ratios = "".join(f"{kind.apart[count] / kind.whole[count]:>7.2f}" for count in counts)
        lines.append(f"{kind.outputs:>8}x{kind.inputs:<7} {kind.form:24} {kind.per_step:>8}{ratios}")
    return "\n".join(lines)


def _kind(weight: Weight) -> tuple[str, tuple[int, ...]]:
    return weight.format_name, tuple(weight.shape)


def _times(
    matrix: Matrix,
    inputs: int,
    options: MlxOptions,
    row_counts: Sequence[int],
    repeats: int,
    clock: Clock,
) -> tuple[dict[int, float], dict[int, float]]:
    """Medians of seconds whole and apart, by number of rows."""
    whole: dict[int, float] = {}
    apart: dict[int, float] = {}
    for count in row_counts:
        values = np.random.default_rng(count).standard_normal((count, inputs), np.float32)
        x = mx.array(values).astype(DTYPES[options.activations])
        mx.eval(x, matrix.product(x), row_by_row(matrix, x))  # compile and warm up
        seconds: tuple[list[float], list[float]] = ([], [])
        ways: tuple[Callable[[mx.array], mx.array], ...] = (matrix.product, partial(row_by_row, matrix))
        for _ in range(repeats):
            for taken, product in zip(seconds, ways, strict=True):
                start = clock()
                mx.eval(product(x))
                taken.append(clock() - start)
        whole[count], apart[count] = map(statistics.median, seconds)
    return whole, apart
