"""The sampler's arithmetic and noise, compiled: those of core/sampling, operation by operation.

The *key* of a logit is an int32 with the order of the floats, 0.0 and -0.0 being one. NaN has a key beyond
either infinity's.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mvllm.backends.cpu.jit import kernel
from mvllm.core.sampling.arithmetic import (
    EXP_COEFFICIENTS,
    EXP_FLOOR,
    EXPONENT_BIAS,
    LN2_HIGH,
    LN2_LOW,
    LOG2_E,
    LOG_COEFFICIENTS,
    MANTISSA_BITS,
    MANTISSA_MASK,
    MASS_UNITS,
    ONE_BITS,
    ROUND_TO_INTEGER,
    SQRT_2,
)
from mvllm.core.sampling.keyed_noise import GAMMA, MIX_1, MIX_2, UNIFORM_BITS

_INFINITY_BITS = 0x7F800000
INFINITY_KEY = np.int32(_INFINITY_BITS)
MINUS_INFINITY_KEY = np.int32(-_INFINITY_BITS - 1)
LOWEST_FINITE_KEY = np.int32(-_INFINITY_BITS)
MIN_INT32 = np.int32(-(2**31))
MAX_INT32 = np.int32(2**31 - 1)

_SIGN_SHIFT = np.int32(31)
_MASS_SCALE = float(MASS_UNITS)
_MASS_SHIFT = 2.0**MANTISSA_BITS
_MASS_SHIFT_BITS = int(np.float64(_MASS_SHIFT).view(np.int64))
_MANTISSA_STEP = 2.0**-MANTISSA_BITS
_UNIFORM_STEP = 2.0**-UNIFORM_BITS
_LN2 = LN2_HIGH + LN2_LOW
_BOUND_SLACK = 1e-9  # far above the rounding errors of the bound and of the noise

_GAMMA, _MIX_1, _MIX_2, _ONE = np.uint64(GAMMA), np.uint64(MIX_1), np.uint64(MIX_2), np.uint64(1)
_SHIFT_30, _SHIFT_27, _SHIFT_31 = np.uint64(30), np.uint64(27), np.uint64(31)
_SHIFT_UNIFORM = np.uint64(64 - UNIFORM_BITS)


@kernel("int32(float32)")
def key_of(logit: Any) -> Any:
    """The key of a logit."""
    bits = np.float32(logit + np.float32(0.0)).view(np.int32)
    return np.int32(bits ^ ((bits >> _SIGN_SHIFT) & MAX_INT32))


@kernel("float64(int32)")
def logit_of(key: Any) -> Any:
    """The logit that has `key`, widened."""
    bits = np.int32(key ^ ((key >> _SIGN_SHIFT) & MAX_INT32))
    return np.float64(bits.view(np.float32))


@kernel("int64(float64)")
def mass(x: Any) -> Any:
    """e**x, x up to 0, in units of 2**-44."""
    x = max(x, EXP_FLOOR)
    shifted = x * LOG2_E + ROUND_TO_INTEGER
    power = shifted - ROUND_TO_INTEGER
    rest = (x - power * LN2_HIGH) - power * LN2_LOW
    series = 0.0
    for coefficient in EXP_COEFFICIENTS:
        series = series * rest + coefficient
    scale = np.int64((np.float64(shifted).view(np.int64) + EXPONENT_BIAS) << MANTISSA_BITS).view(np.float64)
    return np.float64(series * scale * _MASS_SCALE + _MASS_SHIFT).view(np.int64) - _MASS_SHIFT_BITS


@kernel("float64(float64)")
def log(x: Any) -> Any:
    """Natural logarithm of a positive normal number."""
    bits = np.float64(x).view(np.int64)
    power = (bits >> MANTISSA_BITS) - EXPONENT_BIAS
    mantissa = np.int64((bits & MANTISSA_MASK) | ONE_BITS).view(np.float64)
    if mantissa > SQRT_2:
        mantissa *= 0.5
        power += 1
    exponent = np.float64(power)
    f = (mantissa - 1.0) / (mantissa + 1.0)
    square = f * f
    series = 0.0
    for coefficient in LOG_COEFFICIENTS:
        series = series * square + coefficient
    return exponent * LN2_HIGH + (exponent * LN2_LOW + (f + f) * series)


@kernel("uint64(uint64)")
def mix(z: Any) -> Any:
    """SplitMix64's output function."""
    z = (z ^ (z >> _SHIFT_30)) * _MIX_1
    z = (z ^ (z >> _SHIFT_27)) * _MIX_2
    return z ^ (z >> _SHIFT_31)


@kernel("uint64(uint64, int64)")
def row_state(seed: Any, position: Any) -> Any:
    """State of a row's generator."""
    return mix(mix(seed + _GAMMA) + np.uint64(position + 1) * _GAMMA)


@kernel("float64(uint64, int64)")
def uniform(state: Any, token: Any) -> Any:
    """The uniform number of a token in a row."""
    raw = mix(state + (np.uint64(token) + _ONE) * _GAMMA)
    return (np.float64(np.int64(raw >> _SHIFT_UNIFORM)) + 0.5) * _UNIFORM_STEP


@kernel("float64(float64)")
def noise_bound(number: Any) -> Any:
    """At least the noise -log(-log(u)) of a uniform `number`, without a logarithm: it is at most -log(1 - u),
    and the bits of a float, read as a number, bound its logarithm from below.
    """
    log2_bound = np.float64(np.float64(1.0 - number).view(np.int64) - ONE_BITS) * _MANTISSA_STEP
    return _BOUND_SLACK - log2_bound * _LN2
