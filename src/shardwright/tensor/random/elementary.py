"""Logarithm, exponential, sine and cosine that give the same bits on every machine, device and alignment.

Vendor libraries round these functions differently on different processors, and even in the middle and at the ends of
one array, so that a number would depend on its shard. Here they are Taylor series of additions, multiplications,
divisions and square roots, whose rounding IEEE 754 defines. Every step is a separate operator, so that no compiler can
fuse two roundings into one. Errors are below ten units in the last place (of 1, for sine and cosine).

All functions take float64, all but `exp` also float32, and may overwrite their argument.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

__all__ = ["cos_sin_pi", "exp", "log", "square_root_"]


class _Format(NamedTuple):
    """The format of a float dtype, and the number of terms of each series that reach its precision."""

    bits: torch.dtype
    mantissa: int
    root_half: int  # the bits of the square root of 1/2
    log_terms: int
    sin_terms: int


_FORMATS = {
    torch.float32: _Format(torch.int32, 23, 0x3F3504F3, 5, 5),
    torch.float64: _Format(torch.int64, 52, 0x3FE6A09E667F3BCD, 11, 8),
}
_EXP_TERMS = 14
_LN2 = 0.6931471805599453
_LN2_HIGH = 0x162E42FEE / 2**33  # 33 bits of ln 2: its product with any exponent is exact
_LN2_LOW = 1.90821492927058770002e-10  # the remainder of ln 2
# The series of sin(pi x / 4), by multiplications and divisions only: pow is not portable either.
_QUARTER_SINE = [math.pi / 4]
for _k in range(2, 16, 2):
    _QUARTER_SINE.append(_QUARTER_SINE[-1] * -(math.pi / 4 * (math.pi / 4)) / (_k * (_k + 1)))


def log(x: Tensor) -> Tensor:
    """Return the natural logarithm of positive normal numbers.

    >>> log(torch.tensor([1.0, 0.5, 10.0]))
    tensor([ 0.0000, -0.6931,  2.3026])
    """
    form = _FORMATS[x.dtype]
    # x = m * 2^e with m in [sqrt(1/2), sqrt(2)); log(m) = 2 atanh(s) with s = (m - 1) / (m + 1).
    bits = x.view(form.bits)
    exponent = (bits - form.root_half) >> form.mantissa
    m = (bits - (exponent << form.mantissa)).view(x.dtype)
    s = (m - 1).div_(m.add_(1))
    series = _polynomial(s * s, [2 / (2 * k + 1) for k in range(form.log_terms)])
    return series.mul_(s).add_(exponent.to(x.dtype).mul_(_LN2))


def cos_sin_pi(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos(pi x) and sin(pi x) for x in [-1, 1].

    >>> cosine, sine = cos_sin_pi(torch.tensor([0.0, 0.25, 0.5, -1.0], dtype=torch.float64))
    >>> cosine.round(decimals=8) + 0.0, sine.round(decimals=8) + 0.0
    (tensor([ 1.0000,  0.7071,  0.0000, -1.0000], dtype=torch.float64),
     tensor([0.0000, 0.7071, 1.0000, 0.0000], dtype=torch.float64))
    """
    # The series gives the sine of a quarter of the angle; the angle is then doubled twice.
    sine = _polynomial(x * x, _QUARTER_SINE[: _FORMATS[x.dtype].sin_terms]).mul_(x)
    square = sine * sine
    cosine = square_root_(1 - square)
    sine.mul_(cosine).mul_(2)
    cosine = square.mul_(-2).add_(1)
    square = sine * sine
    sine.mul_(cosine).mul_(2)
    return square.mul_(-2).add_(1), sine


def square_root_(x: Tensor) -> Tensor:
    """Take the square root in place, correctly rounded as IEEE 754 requires; torch's, from MKL on CPU, is not.

    >>> square_root_(torch.tensor([4.0, 2.0]))
    tensor([2.0000, 1.4142])
    """
    if x.device.type != "cpu":
        return x.sqrt_()
    np.sqrt(x.numpy(), out=x.numpy())
    return x


def exp(x: Tensor) -> Tensor:
    """Return the exponential of float64 numbers; infinity on overflow, zero on underflow.

    >>> exp(torch.tensor([0.0, 1.0, -800.0, 800.0], dtype=torch.float64))
    tensor([1.0000, 2.7183, 0.0000,    inf], dtype=torch.float64)
    """
    x = x.clamp_(-1400, 1400)
    power = (x * (1 / _LN2)).round_()
    remainder = (x - power * _LN2_HIGH).sub_(power * _LN2_LOW)
    series = _polynomial(remainder, [1 / math.factorial(k) for k in range(_EXP_TERMS)])
    # Two factors: 2^power alone may overflow where its product with the series does not.
    half = power.to(torch.int64) >> 1
    return series.mul_(_power_of_two(half)).mul_(_power_of_two(power.to(torch.int64) - half))


def _power_of_two(exponent: Tensor) -> Tensor:
    return ((exponent + 1023) << 52).view(torch.float64)


def _polynomial(x: Tensor, coefficients: list[float]) -> Tensor:
    """Return c0 + c1 x + c2 x^2 + ..., by Horner's rule."""
    *rest, last = coefficients
    total = x * last
    for coefficient in reversed(rest[1:]):
        total.add_(coefficient).mul_(x)
    return total.add_(rest[0])
