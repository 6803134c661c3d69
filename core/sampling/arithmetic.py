"""The sampler's own exp, log and probability masses: float64 procedures fixed to the bit.

NumPy's and a compiler's exp and log differ in their last bits, and so would the tokens chosen with them.
These use only IEEE additions, multiplications, divisions and bit operations in a stated order, each rounded
on its own (no fused multiply-add), so every backend that follows the same order gets the same bits.

Probability masses are integers. Integer sums don't depend on the order of their terms, which leaves a backend
free to add up, select and skip as it likes.

Sources: argument reduction and the two-part ln 2 as in Cody and Waite, "Software Manual for the Elementary
Functions", 1980; the series are those of Taylor for exp and of atanh for log.
"""

from __future__ import annotations

from math import factorial

import numpy as np
from numpy.typing import NDArray

LOG2_E = float.fromhex("0x1.71547652b82fep+0")
LN2_HIGH = float.fromhex("0x1.62e42feep-1")  # 32 bits, so that n * LN2_HIGH is exact
LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
SQRT_2 = float.fromhex("0x1.6a09e667f3bcdp+0")
ROUND_TO_INTEGER = 1.5 * 2.0**52  # adding it leaves the nearest integer in the low bits of the mantissa

EXP_FLOOR = -64.0
EXP_COEFFICIENTS = tuple(1.0 / factorial(power) for power in range(11, -1, -1))  # highest power first
LOG_COEFFICIENTS = tuple(1.0 / power for power in range(19, 0, -2))  # of f**18, f**16, ..., f**0

MANTISSA_BITS = 52
EXPONENT_BIAS = 1023
MANTISSA_MASK = (1 << MANTISSA_BITS) - 1
ONE_BITS = EXPONENT_BIAS << MANTISSA_BITS  # the bits of 1.0

MASS_UNIT_BITS = 44
MASS_UNITS = 1 << MASS_UNIT_BITS
"""Mass of the most likely token. Sums of 2**18 tokens stay below 2**62."""


def exp(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """e**x for float64[N] up to 0, relative error below 1e-14; below `EXP_FLOOR` the value there."""
    x = np.maximum(x, EXP_FLOOR)
    shifted = x * LOG2_E + ROUND_TO_INTEGER
    power = shifted - ROUND_TO_INTEGER
    rest = (x - power * LN2_HIGH) - power * LN2_LOW
    series = np.zeros_like(x)
    for coefficient in EXP_COEFFICIENTS:
        series = series * rest + coefficient
    scale = ((shifted.view(np.int64) + EXPONENT_BIAS) << MANTISSA_BITS).view(np.float64)
    return series * scale


def log(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Natural logarithm of float64[N], positive and normal; relative error below 1e-15 or so."""
    bits = x.view(np.int64)
    power = (bits >> MANTISSA_BITS) - EXPONENT_BIAS
    mantissa = ((bits & MANTISSA_MASK) | ONE_BITS).view(np.float64)
    large = mantissa > SQRT_2
    mantissa = np.where(large, mantissa * 0.5, mantissa)
    exponent = (power + large).astype(np.float64)
    f = (mantissa - 1.0) / (mantissa + 1.0)
    square = f * f
    series = np.zeros_like(f)
    for coefficient in LOG_COEFFICIENTS:
        series = series * square + coefficient
    return exponent * LN2_HIGH + (exponent * LN2_LOW + (f + f) * series)


def log_scalar(x: float) -> float:
    """`log` of one number."""
    return float(log(np.array([x]))[0])


def masses(x: NDArray[np.float64]) -> NDArray[np.int64]:
    """e**x in units of 2**-44 for float64[N] up to 0, rounded to the nearest integer, ties to even."""
    shifted = exp(x) * float(MASS_UNITS) + 2.0**MANTISSA_BITS
    return shifted.view(np.int64) - np.float64(2.0**MANTISSA_BITS).view(np.int64)
