"""Transcendental functions on vectors, as fixed sequences of float32 operations.

The same operations in the same order give the same bits on every instruction set, which a library's functions
don't promise.
"""

from __future__ import annotations

from mvllm.backends.cpu.isa import Isa
from mvllm.backends.cpu.vector import F16, F32, I16, I32, Emitter, Value, constant, vector

ROUND_TO_INTEGER = 1.5 * 2.0**23
"""Added to a float32 it leaves the nearest integer, ties to even, in the low bits of the mantissa."""
ROUND_TO_INTEGER_BITS = 0x4B400000

# exp(x) = 2**n * exp(r) with n = round(x / ln 2) and r = x - n * ln 2, |r| <= ln 2 / 2. ln 2 is split so that
# n * LN2_HIGH is exact; the polynomial approximates (exp(r) - 1 - r) / r**2, with the minimax coefficients of
# Cephes' expf.
_LOG2_E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_POLYNOMIAL = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
_LOWEST, _HIGHEST = -87.3, 88.3  # n stays within the exponents of normal numbers
_EXPONENT_BIAS, _MANTISSA_BITS = 127, 23

_GELU_SCALE = -2.0 * 0.7978845608028654  # -2 * sqrt(2 / pi)
_GELU_CUBIC = 0.044715


def exponential(emitter: Emitter, x: Value) -> Value:
    """exp(x), relative error below 2e-7; arguments are clamped to [-87.3, 88.3], NaN stays NaN."""
    builder, count = emitter.builder, x.type.count

    def splat(value: float) -> Value:
        return constant(F32, count, value)

    x = builder.select(builder.fcmp_ordered("<", x, splat(_LOWEST)), splat(_LOWEST), x)
    x = builder.select(builder.fcmp_ordered(">", x, splat(_HIGHEST)), splat(_HIGHEST), x)
    shifted = emitter.fma(x, splat(_LOG2_E), splat(ROUND_TO_INTEGER))
    power = builder.fsub(shifted, splat(ROUND_TO_INTEGER))
    rest = emitter.fma(power, splat(-_LN2_HIGH), x)
    rest = emitter.fma(power, splat(-_LN2_LOW), rest)
    series = splat(_POLYNOMIAL[0])
    for coefficient in _POLYNOMIAL[1:]:
        series = emitter.fma(series, rest, splat(coefficient))
    series = emitter.fma(series, builder.fmul(rest, rest), builder.fadd(rest, splat(1.0)))
    ints = vector(I32, count)
    exponent = builder.sub(
        builder.bitcast(shifted, ints), constant(I32, count, ROUND_TO_INTEGER_BITS - _EXPONENT_BIAS)
    )
    scale = builder.bitcast(builder.shl(exponent, constant(I32, count, _MANTISSA_BITS)), x.type)
    return builder.fmul(series, scale)


def _divide_by_one_plus_exponential(emitter: Emitter, x: Value, argument: Value) -> Value:
    builder = emitter.builder
    return builder.fdiv(x, builder.fadd(exponential(emitter, argument), constant(F32, x.type.count, 1.0)))


def silu(emitter: Emitter, x: Value) -> Value:
    """x / (1 + exp(-x))."""
    return _divide_by_one_plus_exponential(emitter, x, emitter.builder.fneg(x))


def gelu_tanh(emitter: Emitter, x: Value) -> Value:
    """x / 2 * (1 + tanh(u)) = x / (1 + exp(-2 u)) with u = sqrt(2 / pi) * (x + 0.044715 * x**3)."""
    builder, count = emitter.builder, x.type.count
    cubic = emitter.fma(builder.fmul(x, x), constant(F32, count, _GELU_CUBIC), constant(F32, count, 1.0))
    argument = builder.fmul(builder.fmul(x, cubic), constant(F32, count, _GELU_SCALE))
    return _divide_by_one_plus_exponential(emitter, x, argument)


def soft_cap(emitter: Emitter, x: Value, cap: Value) -> Value:
    """cap * tanh(x / cap), with tanh(u) = 1 - 2 / (exp(2 u) + 1); absolute error below 2e-7 * cap."""
    builder, count = emitter.builder, x.type.count
    ratio = builder.fdiv(x, cap)
    power = exponential(emitter, builder.fadd(ratio, ratio))
    one, two = constant(F32, count, 1.0), constant(F32, count, 2.0)
    tanh = builder.fsub(one, builder.fdiv(two, builder.fadd(power, one)))
    return builder.fmul(cap, tanh)


def round_to_half(emitter: Emitter, isa: Isa, x: Value) -> Value:
    """float32[n] -> float16[n], to nearest, ties to even; beyond the largest finite value infinity."""
    builder, count = emitter.builder, x.type.count
    if isa.native_half:
        return builder.fptrunc(x, vector(F16, count))
    ints = vector(I32, count)

    def splat(value: int) -> Value:
        return constant(I32, count, value)

    bits = builder.bitcast(x, ints)
    magnitude = builder.and_(bits, splat(0x7FFFFFFF))
    sign = builder.and_(builder.lshr(bits, splat(16)), splat(0x8000))
    # Normal: move the exponent, round by adding just under half of the last place, or half if that is odd.
    odd = builder.and_(builder.lshr(magnitude, splat(13)), splat(1))
    normal = builder.add(builder.sub(magnitude, splat(112 << 23)), builder.add(splat(0xFFF), odd))
    normal = builder.lshr(normal, splat(13))
    # Subnormal: adding 0.5 leaves exactly the bits that float16 has, rounded by the addition itself.
    half_one = constant(F32, count, 0.5)
    small = builder.bitcast(builder.fadd(builder.bitcast(magnitude, x.type), half_one), ints)
    small = builder.sub(small, splat(0x3F000000))
    result = builder.select(builder.icmp_unsigned("<", magnitude, splat(0x38800000)), small, normal)
    large = builder.icmp_unsigned(">=", magnitude, splat(0x47800000))
    is_nan = builder.icmp_unsigned(">", magnitude, splat(0x7F800000))
    result = builder.select(large, builder.select(is_nan, splat(0x7E00), splat(0x7C00)), result)
    shorts = builder.trunc(builder.or_(result, sign), vector(I16, count))
    return builder.bitcast(shorts, vector(F16, count))
