"""Random local tensors: the value of an element depends on seed, offset and global index alone.

Every function fills `out`, which holds `region` of a global tensor of `shape`, and returns it. For any regions, the
parts form bitwise the same global tensor, on CPU and CUDA, for every distribution (see `elementary`). The table shows
how a lane (see `philox`) becomes a value; `signed` lanes are uniform over -2^(n-1) to 2^(n-1) - 1:

| distribution | lanes | value |
|---|---|---|
| uniform | 32; 64 for float64 | u = (low 24 bits) / 2^24; (low 53 bits) / 2^53; low + u * (high - low), below high |
| normal | 32; 64 for float64 | lanes 2k, 2k+1 make r = sqrt(-2 log v), v of lane 2k, and a = lane 2k+1 over 2^(n-1); |
| | | element 2k is r cos(pi a), element 2k+1 is r sin(pi a) |
| Bernoulli, keep mask | 32 | signed lane < round(p * 2^32) - 2^31: p is exact to 2^-33 |
| integers | 64 | low + (unsigned lane * (high - low)) / 2^64: no probability is wrong by more than 2^-64 |
| exponential | 64 | -log(v) / rate |
| log-normal | 64 | exp(mean + std * normal) |
| Cauchy | 64 | median + sigma * cot(pi (lane + 1/2) / 2^64) |
| geometric | 64 | ceil(log(v) / log(1 - p)) |

where v = ((lane without its sign bit) + 1/2) / 2^(n-1) is in (0, 1]. float16, bfloat16 and float32 are computed in
float32, float64 in float64; the distributions with 64-bit lanes always in float64; all rounded at the end. A complex
tensor is filled as a real one with a last dimension of 2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shardwright.layout import Region
from shardwright.tensor.random.arguments import check_bounds, check_dtype, check_integers, check_that, largest_below
from shardwright.tensor.random.elementary import cos_sin_pi, exp, log, square_root_
from shardwright.tensor.random.lanes import fill
from shardwright.tensor.random.philox import Key, multiply_high

__all__ = [
    "fill_bernoulli",
    "fill_cauchy",
    "fill_exponential",
    "fill_geometric",
    "fill_integers",
    "fill_log_normal",
    "fill_normal",
    "fill_scaled_mask",
    "fill_uniform",
    "keep_mask",
    "permutation",
]

_LANE_VALUES = 1 << 32  # the number of values of a 32-bit lane


def fill_uniform(
    out: Tensor, region: Region, shape: Sequence[int], seed: int, offset: int, low: float = 0.0, high: float = 1.0
) -> Tensor:
    """Fill `out` with uniform numbers in [low, high) of 24 random bits, 53 in float64; never `high`, for any dtype.

    >>> fill_uniform(torch.empty(4), Region((2,), (4,)), (8,), seed=0, offset=0)
    tensor([0.1760, 0.1289, 0.5238, 0.9041])
    """
    check_dtype("uniform", out.dtype, complex_too=True)
    out_real, region, shape = _as_reals(out, region, shape)
    dtype = out_real.dtype
    check_bounds(low, high, dtype)
    compute, lane = _formats(dtype)
    digits = 53 if compute is torch.float64 else 24
    is_unit = (low, high) == (0.0, 1.0)
    # Rounding could reach `high`, except for [0, 1) in the dtype of the computation.
    limit = None if is_unit and compute is dtype else max(low, largest_below(high, dtype))

    def values(lanes: Tensor) -> Tensor:
        numbers = lanes.bitwise_and_((1 << digits) - 1).to(compute).mul_(2.0**-digits)
        if not is_unit:
            numbers.mul_(high - low).add_(low)
        return numbers if limit is None else numbers.to(dtype).clamp_max_(limit)

    fill(out_real, region, shape, Key(seed, offset), lane, values)
    return out


def fill_normal(
    out: Tensor, region: Region, shape: Sequence[int], seed: int, offset: int, mean: float = 0.0, std: float = 1.0
) -> Tensor:
    """Fill `out` with normal numbers. In a complex tensor both parts have this mean and std / sqrt(2), as in torch.

    >>> fill_normal(torch.empty(4), Region((2,), (4,)), (8,), seed=0, offset=0)
    tensor([ 0.4056, -0.5164,  0.4083, -0.6141])
    """
    check_dtype("normal", out.dtype, complex_too=True)
    check_that(std >= 0, "normal", "std", std, "at least 0")
    scale = std / math.sqrt(2) if out.is_complex() else std
    out_real, region, shape = _as_reals(out, region, shape)
    compute, lane = _formats(out_real.dtype)
    fill(out_real, region, shape, Key(seed, offset), lane, lambda lanes: _normals(lanes, compute, mean, scale))
    return out


def fill_log_normal(
    out: Tensor, region: Region, shape: Sequence[int], seed: int, offset: int, mean: float = 1.0, std: float = 2.0
) -> Tensor:
    """Fill `out` with log-normal numbers, whose logarithms have this mean and standard deviation.

    >>> fill_log_normal(torch.empty(3), Region((0,), (3,)), (3,), seed=0, offset=0, mean=0.0, std=0.1)
    tensor([1.1224, 0.8633, 0.9170])
    """
    check_dtype("log_normal", out.dtype)
    check_that(std > 0, "log_normal", "std", std, "positive")
    return fill(
        out, region, shape, Key(seed, offset), torch.int64, lambda lanes: exp(_normals(lanes, torch.float64, mean, std))
    )


def fill_exponential(
    out: Tensor, region: Region, shape: Sequence[int], seed: int, offset: int, rate: float = 1.0
) -> Tensor:
    """Fill `out` with exponential numbers of this rate: their mean is 1 / rate, and none is 0.

    >>> fill_exponential(torch.empty(3), Region((0,), (3,)), (3,), seed=0, offset=0, rate=0.5)
    tensor([3.4919, 0.6795, 0.7516])
    """
    check_dtype("exponential", out.dtype)
    check_that(rate > 0, "exponential", "rate", rate, "positive")

    def values(lanes: Tensor) -> Tensor:
        return log(_above_zero(lanes, torch.float64)).mul_(-1).clamp_min_(2.0**-54).mul_(1 / rate)

    return fill(out, region, shape, Key(seed, offset), torch.int64, values)


def fill_cauchy(
    out: Tensor, region: Region, shape: Sequence[int], seed: int, offset: int, median: float = 0.0, sigma: float = 1.0
) -> Tensor:
    """Fill `out` with Cauchy numbers: half of them are within `sigma` of the median.

    >>> fill_cauchy(torch.empty(3), Region((0,), (3,)), (3,), seed=0, offset=0)
    tensor([ 3.5569, -2.0571, -1.8656])
    """
    check_dtype("cauchy", out.dtype)
    check_that(sigma > 0, "cauchy", "sigma", sigma, "positive")

    def values(lanes: Tensor) -> Tensor:
        cosine, sine = cos_sin_pi(lanes.to(torch.float64).add_(0.5).mul_(2.0**-64))
        return cosine.div_(sine).mul_(sigma).add_(median)

    return fill(out, region, shape, Key(seed, offset), torch.int64, values)


def fill_geometric(out: Tensor, region: Region, shape: Sequence[int], seed: int, offset: int, p: float) -> Tensor:
    """Fill `out`, of any real dtype, with the number of trials (1 or more) until a success of probability p.

    >>> fill_geometric(torch.empty(6, dtype=torch.int64), Region((0,), (6,)), (6,), seed=0, offset=0, p=0.3)
    tensor([ 5,  1,  2,  1, 11,  3])
    """
    check_that(0 < p < 1, "geometric", "p", p, "in (0, 1)")
    is_float = out.dtype.is_floating_point
    if is_float or out.is_complex():
        check_dtype("geometric", out.dtype)
    largest = math.inf if is_float else 1 if out.dtype is torch.bool else torch.iinfo(out.dtype).max
    per_trial = 1 / math.log1p(-p)

    def values(lanes: Tensor) -> Tensor:
        return log(_above_zero(lanes, torch.float64)).mul_(per_trial).ceil_().clamp_(1, largest)

    return fill(out, region, shape, Key(seed, offset), torch.int64, values)


def fill_bernoulli(
    out: Tensor, region: Region, shape: Sequence[int], seed: int, offset: int, p: float | Tensor = 0.5
) -> Tensor:
    """Fill `out`, of any real dtype, with 1 with probability p, else 0; p is a number or a tensor like `out`.

    >>> fill_bernoulli(torch.empty(8), Region((0,), (8,)), (8,), seed=0, offset=0, p=0.5)
    tensor([1., 0., 0., 1., 1., 1., 1., 0.])
    """
    if isinstance(p, float | int):
        return _fill_choice(out, region, shape, Key(seed, offset), p, 1.0)
    check_that(p.device.type != "cpu" or bool(((p >= 0) & (p <= 1)).all()), "bernoulli", "p", p, "in [0, 1]")
    lanes = torch.empty(out.shape, dtype=torch.int32, device=out.device)
    fill(lanes, region, shape, Key(seed, offset), torch.int32, lambda lanes: lanes)
    thresholds = p.detach().to(torch.float64).mul(_LANE_VALUES).round_().sub_(_LANE_VALUES // 2)
    with torch.no_grad():
        return out.copy_(lanes.to(torch.float64) < thresholds)


def fill_scaled_mask(
    out: Tensor, region: Region, shape: Sequence[int], seed: int, offset: int, keep_probability: float
) -> Tensor:
    """Fill `out` with 1 / keep_probability with that probability, else 0: the factor of dropout.

    >>> fill_scaled_mask(torch.empty(8), Region((0,), (8,)), (8,), seed=0, offset=0, keep_probability=0.5)
    tensor([2., 0., 0., 2., 2., 2., 2., 0.])
    """
    check_dtype("dropout", out.dtype, complex_too=True)
    scale = 1 / keep_probability if keep_probability else 0.0
    return _fill_choice(out, region, shape, Key(seed, offset), keep_probability, scale)


def keep_mask(
    region: Region,
    shape: Sequence[int],
    seed: int,
    offset: int,
    keep_probability: float,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Return a new bool tensor, True with this probability: True exactly where `fill_scaled_mask` is not 0.

    >>> keep_mask(Region((4,), (4,)), (8,), seed=0, offset=0, keep_probability=0.5)
    tensor([ True,  True,  True, False])
    """
    out = torch.empty(region.size, dtype=torch.bool, device=device)
    return _fill_choice(out, region, shape, Key(seed, offset), keep_probability, 1.0)


def fill_integers(
    out: Tensor, region: Region, shape: Sequence[int], seed: int, offset: int, low: int, high: int
) -> Tensor:
    """Fill `out`, of any real dtype, with integers in [low, high), equally likely to within 2^-64.

    >>> fill_integers(torch.empty(6, dtype=torch.int64), Region((0,), (6,)), (6,), seed=0, offset=0, low=1, high=7)
    tensor([1, 6, 6, 3, 1, 2])
    """
    check_integers(low, high, out.dtype)
    span, start = high - low, (low + 2**63) % 2**64 - 2**63

    def values(lanes: Tensor) -> Tensor:
        return (lanes if span == 2**64 else multiply_high(lanes, span)).add_(start)

    return fill(out, region, shape, Key(seed, offset), torch.int64, values)


def permutation(n: int, seed: int, offset: int, device: torch.device | str = "cpu") -> Tensor:
    """Return a random permutation of 0 to n - 1 as int64: the order of 64-bit lanes, the same on every rank.

    >>> permutation(6, seed=0, offset=0)
    tensor([2, 1, 4, 0, 5, 3])
    """
    check_that(n >= 0, "permutation", "n", n, "at least 0")
    lanes = torch.empty(n, dtype=torch.int64, device=device)
    fill(lanes, Region.whole((n,)), (n,), Key(seed, offset), torch.int64, lambda lanes: lanes)
    return torch.argsort(lanes, stable=True)


def _fill_choice(out: Tensor, region: Region, shape: Sequence[int], key: Key, p: float, chosen: float) -> Tensor:
    """Fill `out` with `chosen` with probability p, else 0."""
    check_that(0 <= p <= 1, "bernoulli", "probability", p, "in [0, 1]")
    threshold = round(p * _LANE_VALUES) - _LANE_VALUES // 2
    # The thresholds of probability 0 and 1 do not fit the dtype of the lanes.
    certain = {-_LANE_VALUES // 2: 0.0, _LANE_VALUES // 2: chosen}.get(threshold)
    compute = torch.float64 if out.dtype.itemsize > 4 else torch.float32

    def values(lanes: Tensor) -> Tensor:
        if certain is not None:
            return torch.full(lanes.shape, certain, device=lanes.device)
        taken = lanes.lt_(threshold)  # in place, as int32 0 and 1: takes half the time of bools
        return taken if chosen == 1 else taken.to(compute).mul_(chosen)

    return fill(out, region, shape, key, torch.int32, values)


def _formats(dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtype of the computation, and that of its lanes."""
    return (torch.float64, torch.int64) if dtype is torch.float64 else (torch.float32, torch.int32)


def _as_reals(out: Tensor, region: Region, shape: Sequence[int]) -> tuple[Tensor, Region, Sequence[int]]:
    if not out.is_complex():
        return out, region, shape
    return torch.view_as_real(out.detach()), Region((*region.offset, 0), (*region.size, 2)), (*shape, 2)


def _above_zero(lanes: Tensor, compute: torch.dtype) -> Tensor:
    """Return numbers in (0, 1], from lanes without their sign bit."""
    bits = lanes.dtype.itemsize * 8 - 1
    return (lanes & ((1 << bits) - 1)).to(compute).add_(0.5).mul_(2.0**-bits)


def _normals(lanes: Tensor, compute: torch.dtype, mean: float, std: float) -> Tensor:
    """Return normal numbers by the Box-Muller transform of pairs of lanes."""
    pairs = lanes.view(len(lanes), -1, 2)
    radius = square_root_(log(_above_zero(pairs[..., 0], compute)).mul_(-2))
    cosine, sine = cos_sin_pi(pairs[..., 1].to(compute).mul_(2.0 ** (1 - 8 * lanes.dtype.itemsize)))
    normals = torch.stack((cosine.mul_(radius), sine.mul_(radius)), dim=-1).view(len(lanes), -1)
    return normals if (mean, std) == (0.0, 1.0) else normals.mul_(std).add_(mean)
