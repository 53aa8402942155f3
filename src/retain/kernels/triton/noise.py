"""The noise of attention scoring as device functions, equal to `reference/noise.py` but in base 2 like the scores."""

from __future__ import annotations

import triton
import triton.language as tl

from retain.kernels.slots.scoring import GAUSSIAN, GUMBEL

GOLDEN_RATIO = tl.constexpr(0x9E3779B9)
LOG2E = tl.constexpr(1.4426950408889634)
# NOISE: how a step's scoring changes scores: not at all, by a temperature, or also by noise of one kind or of both
PLAIN, TEMPERED, ONLY_GUMBEL, ONLY_GAUSSIAN, MIXED = (tl.constexpr(i) for i in range(5))
_GUMBEL, _GAUSSIAN = tl.constexpr(GUMBEL), tl.constexpr(GAUSSIAN)


@triton.jit
def mix_bits(x):
    """Permute the bits of uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    return (x ^ (x >> 15)) * 0x846CA68B


@triton.jit
def noise_draw(query_pos, period):
    """Return the number of the draw of noise of rows at positions int32 [M]; -1, shared by all, for a period of 0."""
    return tl.where(period > 0, query_pos // tl.maximum(period, 1), -1)


@triton.jit
def noise_key(seed, layer, head, draw):
    """Return the part of the hash that all slots of a row share; `draw` int32 [M] is that of `noise_draw`."""
    x = mix_bits(seed.to(tl.uint32) + GOLDEN_RATIO)
    x = mix_bits(x + GOLDEN_RATIO * (layer + 1).to(tl.uint32))
    x = mix_bits(x + GOLDEN_RATIO * (head + 1).to(tl.uint32))
    return mix_bits(x + GOLDEN_RATIO * (draw + 1).to(tl.uint32))


@triton.jit
def erfinv(x):
    """Return the inverse of the error function (Giles, "Approximating the erfinv function", single precision)."""
    w = -tl.log((1.0 - x) * (1.0 + x))
    a = w - 2.5
    p = a * 2.81022636e-08 + 3.43273939e-07
    p = p * a - 3.5233877e-06
    p = p * a - 4.39150654e-06
    p = p * a + 0.00021858087
    p = p * a - 0.00125372503
    p = p * a - 0.00417768164
    p = p * a + 0.246640727
    p = p * a + 1.50140941
    b = tl.sqrt(tl.maximum(w, 0.0)) - 3.0
    q = b * -0.000200214257 + 0.000100950558
    q = q * b + 0.00134934322
    q = q * b - 0.00367342844
    q = q * b + 0.00573950773
    q = q * b - 0.0076224613
    q = q * b + 0.00943887047
    q = q * b + 1.00167406
    q = q * b + 2.83297682
    return tl.where(w < 5.0, p, q) * x


@triton.jit
def negative_log(u):
    """Return -ln of positive numbers, as exact as tl.log, without its special cases.

    u = 2^e (1 + f) with f in [-1/3, 1/3]; ln(1 + f) = f + f^2 p(f) with the polynomial p that errs least.
    """
    bits = u.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F2AAAAB) & -8388608  # e 2^23
    f = (bits - exponent).to(tl.float32, bitcast=True) - 1.0
    p = f * 0.14025913178920746 - 0.15388622879981995
    p = p * f + 0.13995899260044098
    p = p * f - 0.16415943205356598
    p = p * f + 0.20011162757873535
    p = p * f - 0.2500782012939453
    p = p * f + 0.33333197236061096
    p = p * f - 0.49999937415122986
    return exponent.to(tl.float32) * -8.262958294867817e-08 - (p * (f * f) + f)  # 2^-23 ln 2


@triton.jit
def draws_noise(kind):
    """Return whether a request draws noise that differs from slot to slot."""
    return (kind == _GUMBEL) | (kind == _GAUSSIAN)


@triton.jit
def mean_noise(kind, NOISE: tl.constexpr):
    """Return the mean of what `add_noise` adds: it leaves out the mean of the Gaussian."""
    mean = 0.0
    if NOISE > TEMPERED:
        mean = tl.where(kind == _GUMBEL, 0.5772157 * LOG2E, 0.0)
    return mean


@triton.jit
def add_noise(x, kind, keys, pos, NOISE: tl.constexpr):
    """Add the noise of a request to scores in base 2; keys uint32 and pos int32 broadcast to their shape.

    CONSTANT noise is left out, because it changes no softmax.
    """
    if NOISE > TEMPERED:
        u = mix_bits(keys + GOLDEN_RATIO * pos.to(tl.uint32)) >> 9
        u = (u.to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2^-23: strictly between 0 and 1
        if NOISE != ONLY_GAUSSIAN:
            y = negative_log(negative_log(u))
        if NOISE == ONLY_GAUSSIAN:
            y = 1.2825498 * 1.4142135623730951 * erfinv(2.0 * u - 1.0)
        if NOISE == MIXED:
            y = tl.where(kind == _GAUSSIAN, 1.2825498 * 1.4142135623730951 * erfinv(2.0 * u - 1.0), y)
        x += tl.where(draws_noise(kind), y * LOG2E, 0.0)
    return x


@triton.jit
def draw_gumbel_factors(kind, keys, pos):
    """Return exp of the Gumbel noise of a request, 1 where it draws none; keys uint32 and pos int32 broadcast.

    Noise that is added to scores multiplies the weights of a softmax.
    """
    u = mix_bits(keys + GOLDEN_RATIO * pos.to(tl.uint32)) >> 9
    # 1 + u / 2^23 as bits; the difference is (u + 0.5) / 2^23 without rounding, as in add_noise.
    u = (u | 0x3F800000).to(tl.float32, bitcast=True) - 0.999999940395355224609375
    root = tl.rsqrt(negative_log(u))  # squared it is the reciprocal, in fewer instructions than a division
    return tl.where(kind == _GUMBEL, root * root, 1.0)
