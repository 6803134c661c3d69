"""A comparison as tables for a terminal, or as one JSON object."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from mvllm.bench.compare.measures import Difference, Divergence, Result, first_above, first_off_scale
from mvllm.bench.compare.run import Comparison
from mvllm.core.errors import ConfigError
from mvllm.core.types import TokenId

TokenText = Callable[[TokenId], str]

_MIB = 2**20


@dataclass(frozen=True)
class Thresholds:
    """Which layers are named.

    Raises:
        ConfigError: one is not a positive number.
    """

    added: float = 5e-3  # those that add more than this relative error
    scale: float = 4e-3  # those whose scale is off by more than this

    def __post_init__(self) -> None:
        if not all(0 < value < math.inf for value in (self.added, self.scale)):
            raise ConfigError(f"thresholds are positive numbers; got {self.added:g} and {self.scale:g}")


def to_json(comparison: Comparison, thresholds: Thresholds, text: TokenText) -> dict[str, Any]:
    """Plain values; a number that is not finite becomes None, which JSON can express."""
    plan = comparison.plan
    return {
        "base": comparison.base,
        "max_tokens": plan.max_tokens,
        "layer_threshold": thresholds.added,
        "scale_threshold": thresholds.scale,
        "prompts": [{"name": p.name, "token_ids": list(p.token_ids)} for p in plan.prompts],
        "backends": {
            result.backend: _result_fields(result, thresholds, text) for result in comparison.results
        },
        "failures": {failure.backend: failure.reason for failure in comparison.failures},
    }


def _result_fields(result: Result, thresholds: Thresholds, text: TokenText) -> dict[str, Any]:
    footprint = result.footprint
    return {
        "load_seconds": footprint.load_seconds,
        "first_step_seconds": footprint.first_step_seconds,
        "weight_bytes": footprint.weight_bytes,
        "resident_bytes": footprint.resident_bytes,
        "kv_dtype": footprint.kv_dtype,
        "tokens_per_second": [
            {"sequences": speed.sequences, "prefill": speed.prefill, "decode": speed.decode}
            for speed in result.speeds
        ],
        "difference": result.difference and _difference_fields(result.difference, thresholds, text),
    }


def _difference_fields(difference: Difference, thresholds: Thresholds, text: TokenText) -> dict[str, Any]:
    error = difference.logprob_error
    return {
        "greedy_agreement": difference.agreement,
        "same_answers": difference.same_answers,
        "divergences": [_divergence_fields(divergence, text) for divergence in difference.divergences],
        "logprob_error": {
            "mean": _finite(error.mean),
            "largest": _finite(error.largest),
            "kl_divergence": _finite(error.divergence),
        },
        "first_layer_above_threshold": _layer_name(first_above(difference.layers, thresholds.added)),
        "first_layer_off_scale": _layer_name(first_off_scale(difference.layers, thresholds.scale)),
        "layers": [
            {
                "layer": _layer_name(border),
                "error": _finite(layer.total),
                "added": _finite(layer.added),
                "scale": _finite(layer.scale),
            }
            for border, layer in enumerate(difference.layers)
        ],
    }


def _divergence_fields(divergence: Divergence, text: TokenText) -> dict[str, Any]:
    return {
        "prompt": divergence.prompt,
        "position": divergence.position,
        "base_token": divergence.base_token,
        "base_text": text(divergence.base_token),
        "base_margin": _finite(divergence.base_margin),
        "token": divergence.token,
        "text": text(divergence.token),
        "margin": _finite(divergence.margin),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _layer_name(border: int | None) -> int | str | None:
    """The layer that ends at a border; None for no border."""
    if border is None:
        return None
    return border - 1 if border else "embedding"


# --- tables -------------------------------------------------------------------------------------------------


def tables(comparison: Comparison, thresholds: Thresholds, text: TokenText) -> Iterator[Table]:
    """Speed and memory, then what differs from the base: tokens, first divergences, layers."""
    yield _speed_table(comparison)
    others = [
        (result.backend, result.difference) for result in comparison.results if result.difference is not None
    ]
    if not others:
        return
    yield _difference_table(comparison, others, thresholds)
    if any(difference.divergences for _, difference in others):
        yield _divergence_table(comparison, others, text)
    yield _layer_table(comparison, others)


def _speed_table(comparison: Comparison) -> Table:
    batches = comparison.plan.batch_sizes
    table = Table(title="Speed and memory", title_justify="left")
    table.add_column("backend")
    for heading in ("load s", "first step s", "weights MiB", "resident MiB", "KV"):
        table.add_column(heading, justify="right")
    for kind in ("prefill", "decode"):
        for batch in batches:
            table.add_column(f"{kind} x{batch}\ntokens/s", justify="right")
    for result in comparison.results:
        footprint = result.footprint
        resident = footprint.resident_bytes
        table.add_row(
            result.backend,
            f"{footprint.load_seconds:.2f}",
            f"{footprint.first_step_seconds:.2f}",
            f"{footprint.weight_bytes / _MIB:.0f}",
            "?" if resident is None else f"{resident / _MIB:.0f}",
            footprint.kv_dtype,
            *(f"{speed.prefill:.1f}" for speed in result.speeds),
            *(f"{speed.decode:.1f}" for speed in result.speeds),
        )
    for failure in comparison.failures:
        table.add_row(failure.backend, "can't")
    reasons = [f"{failure.backend} can't run this model: {failure.reason}" for failure in comparison.failures]
    table.caption = "\n".join(map(_escaped, reasons)) or None
    table.caption_justify = "left"
    return table


def _difference_table(
    comparison: Comparison, others: list[tuple[str, Difference]], thresholds: Thresholds
) -> Table:
    table = Table(title=f"Difference from {comparison.base}", title_justify="left")
    table.add_column("backend")
    headings = ("same greedy token", "same answers", "logprob error", "largest", "KL, nats")
    layers = (f"first layer above {thresholds.added:g}", f"first off scale by {thresholds.scale:g}")
    for heading in (*headings, *layers):
        table.add_column(heading, justify="right")
    for name, difference in others:
        error = difference.logprob_error
        first = (
            first_above(difference.layers, thresholds.added),
            first_off_scale(difference.layers, thresholds.scale),
        )
        table.add_row(
            name,
            f"{100 * difference.agreement:.1f} %",
            f"{difference.same_answers} of {len(comparison.plan.prompts)}",
            *(f"{value:.2e}" for value in (error.mean, error.largest, error.divergence)),
            *("none" if border is None else str(_layer_name(border)) for border in first),
        )
    return table


def _divergence_table(comparison: Comparison, others: list[tuple[str, Difference]], text: TokenText) -> Table:
    table = Table(title="First different greedy token (margin, nats)", title_justify="left")
    for heading in ("prompt", "backend", "token", f"{comparison.base} prefers", "it prefers"):
        table.add_column(heading)
    for name, difference in others:
        for found in difference.divergences:
            table.add_row(
                _escaped(comparison.plan.prompts[found.prompt].name),
                name,
                str(found.position),
                f"{_escaped(repr(text(found.base_token)))} ({found.base_margin:.3g})",
                f"{_escaped(repr(text(found.token)))} ({found.margin:.3g})",
            )
    return table


def _layer_table(comparison: Comparison, others: list[tuple[str, Difference]]) -> Table:
    table = Table(
        title=f"Error after each layer, relative to {comparison.base} (added by the layer; its scale)",
        title_justify="left",
    )
    table.add_column("layer")
    for name, _ in others:
        table.add_column(name, justify="right")
    for border in range(len(others[0][1].layers)):
        errors = [difference.layers[border] for _, difference in others]
        cells = (f"{e.total:.2e} ({e.added:.2e}; {e.scale:+.1e})" for e in errors)
        table.add_row(str(_layer_name(border)), *cells)
    return table


def _escaped(text: str) -> str:
    """Text that a table shows as it is: brackets are markup, control characters move the cursor."""
    printable = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return printable.replace("[", r"\[")
