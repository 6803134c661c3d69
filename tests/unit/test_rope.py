"""Rotary frequencies against the formulas written out dimension by dimension."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any

import numpy as np
import pytest

from mvllm.core.errors import ModelFileError
from mvllm.core.load.rope import rope_from_config, rope_from_gguf
from mvllm.core.load.settings import Settings
from mvllm.core.model.spec import RopeSpec

HEAD_DIM = 64
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}


def config_rope(context: int = 32768, **config: Any) -> RopeSpec:
    return rope_from_config(Settings("config.json", config), HEAD_DIM, context)


def gguf_rope(divisors: np.ndarray[Any, Any] | None = None, context: int = 32768, **keys: Any) -> RopeSpec:
    values = {f"llama.rope.{key.replace('__', '.')}": value for key, value in keys.items()}
    return rope_from_gguf(Settings("x.gguf", values, "llama."), HEAD_DIM, context, divisors)


def plain(base: float, index: int) -> float:
    return 1.0 / math.pow(base, 2 * index / HEAD_DIM)


def assert_frequencies(rope: RopeSpec, expected: list[float]) -> None:
    np.testing.assert_allclose(rope.inverse_frequencies, expected, rtol=1e-12)


def test_without_scaling_frequencies_are_powers_of_the_base() -> None:
    expected = [plain(500_000.0, index) for index in range(HEAD_DIM // 2)]
    for rope in (
        config_rope(rope_theta=500_000.0),
        config_rope(rope_theta=500_000, rope_scaling=None),
        config_rope(rope_theta=500_000, rope_scaling={"rope_type": "default"}),
        config_rope(rope_parameters={"rope_theta": 500_000.0, "rope_type": "default"}),
        gguf_rope(freq_base=500_000.0),
        gguf_rope(freq_base=500_000.0, scaling__type="none", scaling__factor=4.0),
    ):
        assert_frequencies(rope, expected)
        assert rope.magnitude == 1.0


def test_a_missing_base_is_ten_thousand() -> None:
    expected = [plain(10_000.0, index) for index in range(HEAD_DIM // 2)]
    assert_frequencies(config_rope(), expected)
    assert_frequencies(gguf_rope(), expected)


def test_linear_scaling_divides_every_frequency() -> None:
    expected = [plain(10_000.0, index) / 4 for index in range(HEAD_DIM // 2)]
    for rope in (
        config_rope(rope_scaling={"type": "linear", "factor": 4.0}),
        config_rope(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}),
        gguf_rope(scaling__type="linear", scaling__factor=4.0),
        gguf_rope(scaling__factor=4.0),
        gguf_rope(scale_linear=4.0),
    ):
        assert_frequencies(rope, expected)


def llama3_reference(base: float, index: int) -> float:
    """By wave length, as Meta's reference code has it."""
    frequency = plain(base, index)
    wave_length = 2 * math.pi / frequency
    if wave_length < 8192 / 4.0:
        return frequency
    if wave_length > 8192 / 1.0:
        return frequency / 8.0
    smooth = (8192 / wave_length - 1.0) / (4.0 - 1.0)
    return (1 - smooth) * frequency / 8.0 + smooth * frequency


def test_llama3_scaling_follows_the_wave_length() -> None:
    expected = [llama3_reference(500_000.0, index) for index in range(HEAD_DIM // 2)]
    for rope in (
        config_rope(rope_theta=500_000.0, rope_scaling=LLAMA3),
        config_rope(rope_parameters={**LLAMA3, "rope_theta": 500_000.0}),
    ):
        assert_frequencies(rope, expected)
    changed = [value != plain(500_000.0, index) for index, value in enumerate(expected)]
    assert any(changed) and not all(changed)


def test_gguf_divisors_express_llama3_scaling() -> None:
    expected = [llama3_reference(500_000.0, index) for index in range(HEAD_DIM // 2)]
    divisors = np.array([plain(500_000.0, index) / value for index, value in enumerate(expected)], np.float32)
    rope = gguf_rope(divisors, freq_base=500_000.0)
    np.testing.assert_allclose(rope.inverse_frequencies, expected, rtol=1e-6)


def yarn_reference(base: float, index: int, *, factor: float, original: int, truncate: bool = True) -> float:
    """Interpolation and extrapolation mixed by a ramp over dimension indices, one index at a time."""

    def index_of(rotations: float) -> float:
        return HEAD_DIM * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = index_of(32), index_of(1)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, HEAD_DIM - 1)
    interpolated = min(max((index - low) / (high - low), 0.0), 1.0)
    return interpolated * plain(base, index) / factor + (1 - interpolated) * plain(base, index)


def test_yarn_mixes_kept_and_divided_frequencies_and_sharpens_attention() -> None:
    expected = [yarn_reference(1e6, index, factor=4.0, original=4096) for index in range(HEAD_DIM // 2)]
    gguf_keys: dict[str, Any] = {
        "scaling__type": "yarn",
        "scaling__factor": 4.0,
        "scaling__original_context_length": 4096,
    }
    for rope in (
        config_rope(rope_theta=1e6, rope_scaling=YARN),
        config_rope(rope_parameters={**YARN, "rope_theta": 1e6}),
        gguf_rope(freq_base=1e6, **gguf_keys),
    ):
        assert_frequencies(rope, expected)
        assert rope.magnitude == pytest.approx(0.1 * math.log(4.0) + 1.0)
    assert expected[0] == plain(1e6, 0)
    assert expected[-1] == plain(1e6, HEAD_DIM // 2 - 1) / 4.0


def test_yarn_keeps_what_turns_often_and_divides_what_turns_less_than_once() -> None:
    """The paper's own conditions: r(d) = context / wave length above beta_fast, and below beta_slow."""
    rope = config_rope(rope_theta=1e6, rope_scaling={**YARN, "truncate": False})
    for index, frequency in enumerate(rope.inverse_frequencies):
        turns = 4096 * plain(1e6, index) / (2 * math.pi)
        if turns > 32:
            assert frequency == pytest.approx(plain(1e6, index), rel=1e-12)
        elif turns < 1:
            assert frequency == pytest.approx(plain(1e6, index) / 4.0, rel=1e-12)
        else:
            assert plain(1e6, index) / 4.0 < frequency < plain(1e6, index)


def test_yarn_without_an_original_context_takes_the_models() -> None:
    without = {"rope_type": "yarn", "factor": 4.0}
    expected = [yarn_reference(1e4, index, factor=4.0, original=2048) for index in range(HEAD_DIM // 2)]
    assert_frequencies(config_rope(context=2048, rope_scaling=without), expected)
    assert_frequencies(gguf_rope(context=2048, scaling__type="yarn", scaling__factor=4.0), expected)


def test_yarn_options_of_a_config_are_heeded() -> None:
    given = config_rope(rope_scaling={**YARN, "attention_factor": 1.25})
    assert given.magnitude == 1.25
    both = config_rope(rope_scaling={**YARN, "mscale": 2.0, "mscale_all_dim": 0.5})
    log = math.log(4.0)
    assert both.magnitude == pytest.approx((0.2 * log + 1) / (0.05 * log + 1))
    expected = [
        yarn_reference(1e4, index, factor=4.0, original=4096, truncate=False)
        for index in range(HEAD_DIM // 2)
    ]
    assert_frequencies(config_rope(rope_scaling={**YARN, "truncate": False}), expected)
    narrower = config_rope(rope_scaling={**YARN, "beta_fast": 8.0, "beta_slow": 2.0})
    assert narrower.inverse_frequencies != config_rope(rope_scaling=YARN).inverse_frequencies


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "dynamic", "factor": 2.0},
        {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]},
        {"rope_type": "linear"},
        {"rope_type": "linear", "factor": 0},
        {"rope_type": "linear", "factor": -2.0},
        {"rope_type": "linear", "factor": "4"},
        {"rope_type": "linear", "factor": float("nan")},
        {"rope_type": "linear", "factor": 1e-320},
        {key: value for key, value in LLAMA3.items() if key != "factor"},
        {key: value for key, value in LLAMA3.items() if key != "original_max_position_embeddings"},
        {**LLAMA3, "low_freq_factor": 4.0},
        {"rope_type": ["linear"], "factor": 2.0},
        {"rope_type": "default", "partial_rotary_factor": 0.5},
        "linear",
    ],
)
def test_an_unknown_or_incomplete_scaling_of_a_config_is_refused(scaling: object) -> None:
    with pytest.raises(ModelFileError, match=r"config\.json"):
        config_rope(rope_scaling=scaling)


@pytest.mark.parametrize(
    "keys",
    [
        {"scaling__type": "longrope"},
        {"scaling__type": "yarn", "scaling__factor": 4.0, "scaling__yarn_ext_factor": 0.5},
        {"scaling__type": "yarn", "scaling__factor": 4.0, "scaling__yarn_log_multiplier": 0.1},
        {"scaling__type": "yarn", "scaling__factor": 4.0, "freq_base": 1.0},
        {"scaling__attn_factor": 2.0},
        {"freq_base": 0.0},
    ],
)
def test_an_unknown_scaling_of_a_gguf_file_is_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(ModelFileError, match=r"x\.gguf"):
        gguf_rope(**keys)


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf])
def test_useless_divisors_are_refused(bad: float) -> None:
    divisors = np.ones(HEAD_DIM // 2, np.float32)
    divisors[3] = bad
    with pytest.raises(ModelFileError, match="rope_freqs"):
        gguf_rope(divisors)


def test_tables_of_long_positions_use_float64_angles() -> None:
    cos, sin = config_rope(rope_scaling=YARN).table(5001)
    magnitude = 0.1 * math.log(4.0) + 1.0
    for index in (0, 5, HEAD_DIM // 2 - 1):
        angle = 5000 * yarn_reference(1e4, index, factor=4.0, original=4096)
        assert cos[5000, index] == pytest.approx(magnitude * math.cos(angle), abs=1e-6)
        assert sin[5000, index] == pytest.approx(magnitude * math.sin(angle), abs=1e-6)


def test_a_long_table_takes_little_more_memory_than_its_result() -> None:
    spec = config_rope()
    tracemalloc.start()
    try:
        cos, sin = spec.table(100_001)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1.3 * (cos.nbytes + sin.nbytes)
    angles = np.outer(np.arange(100_001.0)[-3:], spec.inverse_frequencies)
    assert np.array_equal(cos[-3:], np.cos(angles).astype(np.float32))
    assert np.array_equal(sin[-3:], np.sin(angles).astype(np.float32))
