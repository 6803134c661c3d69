"""Rotary frequencies from a file's settings, with every scaling that is understood already applied.

An unknown scaling is an error: short prompts would look right and long ones go wrong. Formulas are those of
Hugging Face transformers (`modeling_rope_utils.py`), which the checkpoints were made with; all in float64.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mvllm.core.load.settings import Settings
from mvllm.core.model.spec import RopeSpec

DEFAULT_BASE = 10_000.0

Frequencies = NDArray[np.float64]  # [head_dim / 2]

_GGUF_SCALINGS = ("none", "linear", "yarn")
_CONFIG_SCALINGS = ("default", "linear", "llama3", "yarn")


def plain_frequencies(base: float, head_dim: int) -> Frequencies:
    """base ** (-2i / head_dim) for i < head_dim / 2 (Su et al., 2021, RoFormer, arXiv:2104.09864)."""
    exponents = -np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    frequencies: Frequencies = np.power(base, exponents)
    return frequencies


def llama3_frequencies(
    frequencies: Frequencies, *, factor: float, low: float, high: float, original_context: int
) -> Frequencies:
    """Llama 3.1's scaling: by the number of turns within the original context, frequencies with fewer than
    `low` turns are divided by `factor`, those with more than `high` kept, those between blended."""
    turns = original_context * frequencies / (2 * math.pi)
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequencies * (keep + (1.0 - keep) / factor)


def yarn_frequencies(
    base: float,
    head_dim: int,
    *,
    factor: float,
    original_context: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
) -> Frequencies:
    """YaRN's "NTK by parts" (Peng et al., 2023, arXiv:2309.00071, section 3.2).

    Dimensions that turn more than `beta_fast` times within the original context are kept, those that turn
    less than `beta_slow` times are divided by `factor`. Between them the paper's text blends linearly in the
    number of turns; its published code and what followed it blend linearly in the dimension's index, with
    the bounds rounded outwards (`truncate`). The code's way is the one the models were trained with.
    """

    def index_with_turns(turns: float) -> float:
        return head_dim * math.log(original_context / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = index_with_turns(beta_fast), index_with_turns(beta_slow)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first if last != first else 0.001
    scaled: Frequencies = np.clip((np.arange(head_dim // 2) - first) / width, 0.0, 1.0)
    return plain_frequencies(base, head_dim) * ((1.0 - scaled) + scaled / factor)


def yarn_magnitude(factor: float, strength: float = 1.0) -> float:
    """Factor on cos and sin that stands for YaRN's attention temperature: 0.1 ln(factor) + 1."""
    return 0.1 * strength * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def rope_from_config(config: Settings, head_dim: int, context_length: int) -> RopeSpec:
    """Rotary embedding of a Hugging Face config: `rope_parameters` (transformers 5) or `rope_theta` and
    `rope_scaling` (before).

    Raises:
        ModelFileError: the scaling is unknown or lacks a value, or the embedding is partial.
    """
    scaling = config.section("rope_parameters") or config.section("rope_scaling")
    base = (scaling and scaling.number("rope_theta")) or config.number("rope_theta") or DEFAULT_BASE
    for section in (config, scaling):
        if section and section.number("partial_rotary_factor") not in (None, 1.0):
            raise section.error("partial_rotary_factor other than 1 is not supported")
    kind = (scaling and (scaling.text("rope_type") or scaling.text("type"))) or "default"
    if scaling is None or kind == "default":
        return _spec(plain_frequencies(base, head_dim))
    if kind == "linear":
        return _spec(plain_frequencies(base, head_dim) / scaling.require_number("factor"))
    if kind == "llama3":
        return _spec(_llama3_from_config(scaling, plain_frequencies(base, head_dim)))
    if kind == "yarn":
        return _yarn_from_config(scaling, base, head_dim, context_length)
    raise scaling.error(f"unknown rotary scaling {kind!r}; supported: {', '.join(_CONFIG_SCALINGS)}")


def _llama3_from_config(scaling: Settings, frequencies: Frequencies) -> Frequencies:
    low, high = scaling.require_number("low_freq_factor"), scaling.require_number("high_freq_factor")
    if low >= high:
        raise scaling.error(f"low_freq_factor {low} must be less than high_freq_factor {high}")
    return llama3_frequencies(
        frequencies,
        factor=scaling.require_number("factor"),
        low=low,
        high=high,
        original_context=scaling.require_integer("original_max_position_embeddings"),
    )


def _yarn_from_config(scaling: Settings, base: float, head_dim: int, context_length: int) -> RopeSpec:
    factor = scaling.require_number("factor")
    truncate = scaling.flag("truncate")
    frequencies = _yarn_checked(
        scaling,
        base,
        head_dim,
        factor=factor,
        original_context=scaling.integer("original_max_position_embeddings") or context_length,
        beta_fast=scaling.number("beta_fast") or 32.0,
        beta_slow=scaling.number("beta_slow") or 1.0,
        truncate=True if truncate is None else truncate,
    )
    magnitude = scaling.number("attention_factor")
    if magnitude is None:
        strength, strength_all = scaling.number("mscale"), scaling.number("mscale_all_dim")
        magnitude = yarn_magnitude(factor)
        if strength and strength_all:
            magnitude = yarn_magnitude(factor, strength) / yarn_magnitude(factor, strength_all)
    return _spec(frequencies, magnitude)


def rope_from_gguf(
    metadata: Settings, head_dim: int, context_length: int, divisors: NDArray[np.float32] | None
) -> RopeSpec:
    """Rotary embedding of a GGUF file.

    Args:
        metadata: look-ups under the architecture's prefix.
        divisors: f32[head_dim / 2], the tensor `rope_freqs.weight`, by which the frequencies are divided
            (how converters store Llama 3.1's scaling), or None.

    Raises:
        ModelFileError: the scaling is unknown or has settings that are not supported.
    """
    base = metadata.number("rope.freq_base") or DEFAULT_BASE
    factor = metadata.number("rope.scaling.factor") or metadata.number("rope.scale_linear") or 1.0
    kind = metadata.text("rope.scaling.type") or "linear"
    if kind not in _GGUF_SCALINGS:
        raise metadata.error(f"unknown rotary scaling {kind!r}; supported: {', '.join(_GGUF_SCALINGS)}")
    magnitude = 1.0
    if kind == "yarn":
        frequencies = _yarn_from_gguf(metadata, base, head_dim, context_length, factor)
        magnitude = yarn_magnitude(factor)
    else:
        frequencies = plain_frequencies(base, head_dim) / (factor if kind == "linear" else 1.0)
    _refuse_unless(metadata, "rope.scaling.attn_factor", 1.0)
    if divisors is not None:
        if not (np.isfinite(divisors).all() and (divisors > 0).all()):
            raise metadata.error("rope_freqs.weight must hold finite positive numbers")
        frequencies = frequencies / divisors
    return _spec(frequencies, magnitude)


def _yarn_from_gguf(
    metadata: Settings, base: float, head_dim: int, context_length: int, factor: float
) -> Frequencies:
    _refuse_unless(metadata, "rope.scaling.yarn_ext_factor", 1.0)
    _refuse_unless(metadata, "rope.scaling.yarn_attn_factor", 1.0)
    _refuse_unless(metadata, "rope.scaling.yarn_log_multiplier", 0.0)
    return _yarn_checked(
        metadata,
        base,
        head_dim,
        factor=factor,
        original_context=metadata.integer("rope.scaling.original_context_length") or context_length,
        beta_fast=metadata.number("rope.scaling.yarn_beta_fast") or 32.0,
        beta_slow=metadata.number("rope.scaling.yarn_beta_slow") or 1.0,
    )


def _yarn_checked(settings: Settings, base: float, head_dim: int, **options: Any) -> Frequencies:
    if base <= 1.0:
        raise settings.error(f"YaRN needs a rotary base above 1, found {base}")
    return yarn_frequencies(base, head_dim, **options)


def _refuse_unless(settings: Settings, key: str, expected: float) -> None:
    value = settings.number(key, minimum=-math.inf)
    if value is not None and value != expected:
        raise settings.error(f"{settings.name(key)} is {value}; only {expected} is supported")


def _spec(frequencies: Frequencies, magnitude: float = 1.0) -> RopeSpec:
    return RopeSpec(tuple(frequencies.tolist()), magnitude)
