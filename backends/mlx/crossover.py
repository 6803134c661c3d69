"""Up to how many rows a matrix product is faster row by row than whole, measured on this machine."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import mlx.core as mx

from mvllm.backends.mlx.device import choose_device
from mvllm.backends.mlx.encode import matrices
from mvllm.backends.mlx.options import MlxOptions
from mvllm.backends.mlx.weights import DeviceWeights, Matrix
from mvllm.core.model.spec import ModelSpec
from mvllm.core.tensor import ModelWeights

ROW_COUNTS = (2, 3, 4, 6, 8, 12, 16)
_ENOUGH_GAIN = 0.97  # of the time: less than this is within what repeats differ by


@dataclass(frozen=True)
class RowsMeasured:
    """All products of one pass over a number of rows, both ways."""

    rows: int
    whole_seconds: float
    apart_seconds: float

    @property
    def apart_pays(self) -> bool:
        return self.apart_seconds < _ENOUGH_GAIN * self.whole_seconds


def measure_crossover(
    spec: ModelSpec,
    weights: ModelWeights,
    options: MlxOptions,
    *,
    row_counts: Sequence[int] = ROW_COUNTS,
    repeats: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> list[RowsMeasured]:
    """Time a model's products, one of each shape and form, at each number of rows; the best of `repeats`."""
    device = choose_device(options)
    with mx.stream(device):
        loaded = DeviceWeights(spec, weights, num_positions=1, options=options, device=device)
        kinds: Counter[tuple[str, tuple[int, ...]]] = Counter()
        examples: dict[tuple[str, tuple[int, ...]], Matrix] = {}
        for weight in matrices(weights)[1:]:  # the embedding is looked up, not multiplied with
            matrix = loaded.matrix(weight)
            kinds[matrix.form, weight.shape] += 1
            examples[matrix.form, weight.shape] = matrix
        measured = []
        for rows in row_counts:
            seconds = {False: 0.0, True: 0.0}
            for kind, count in kinds.items():
                x = mx.random.normal((rows, kind[1][1])).astype(loaded.dtype)
                for apart in seconds:
                    run = partial(_products, examples[kind], x, apart)
                    seconds[apart] += count * _best(run, repeats, clock)
            measured.append(RowsMeasured(rows, seconds[False], seconds[True]))
    return measured


def rows_apart_for(measured: Sequence[RowsMeasured]) -> int:
    """The value of `MlxOptions.rows_apart` that the measurements speak for; 0 where it does not pay."""
    threshold = 0
    for result in measured:
        if not result.apart_pays:
            break
        threshold = result.rows
    return threshold


def _products(matrix: Matrix, x: mx.array, apart: bool) -> list[mx.array]:
    return [matrix.product(x[row : row + 1]) for row in range(len(x))] if apart else [matrix.product(x)]


def _best(run: Callable[[], list[mx.array]], repeats: int, clock: Callable[[], float]) -> float:
    """Seconds of the fastest run after one that warms up."""
    mx.eval(run())
    times = []
    for _ in range(repeats):
        start = clock()
        mx.eval(run())
        times.append(clock() - start)
    return min(times)
