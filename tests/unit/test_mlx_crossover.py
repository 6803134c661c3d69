"""The measurement behind --mlx-rows-apart: what is timed, and what is concluded from it."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("mlx.core")

from mvllm.backends.mlx.options import MlxOptions
from mvllm.bench.micro.mlx_crossover import ProductTimes, measure, rows_apart, table
from tests.conformance.random_models import ModelShape, random_model


def kind(apart: dict[int, float], per_step: int = 1) -> ProductTimes:
    """A product that takes one second whole, whatever the number of rows."""
    return ProductTimes(64, 32, "float32", per_step, dict.fromkeys(apart, 1.0), apart)


@pytest.mark.parametrize(
    ("apart", "expected"),
    [
        ({2: 0.5, 4: 0.9, 8: 2.0}, 4),
        ({2: 0.5, 4: 0.9, 8: 0.9}, 8),
        ({2: 1.5, 4: 0.5, 8: 0.5}, 0),  # a gain beyond a loss can't be had with one threshold
        ({2: 0.99, 4: 3.0}, 0),  # within noise
    ],
)
def test_apart_is_recommended_as_far_as_it_is_faster(apart: dict[int, float], expected: int) -> None:
    assert rows_apart([kind(apart)]) == expected


def test_products_count_as_often_as_a_step_makes_them() -> None:
    gains, loses = kind({2: 0.8}, per_step=10), kind({2: 2.0})
    assert rows_apart([gains, loses]) == 2
    assert rows_apart([loses, kind({2: 0.8})]) == 0


def test_every_shape_is_timed_once_and_counted() -> None:
    _, weights = random_model(ModelShape(num_layers=3, hidden_size=64, intermediate_size=96), seed=0)
    ticks = itertools.count(0.0, 0.25)
    results = measure(weights, MlxOptions(), row_counts=(2, 3), repeats=3, clock=lambda: next(ticks))
    counts = {(result.outputs, result.inputs): result.per_step for result in results}
    assert counts == {(64, 64): 6, (32, 64): 6, (96, 64): 6, (64, 96): 3, (70, 64): 1}
    assert all(result.whole == result.apart == {2: 0.25, 3: 0.25} for result in results)
    assert "96x64" in table(results)
