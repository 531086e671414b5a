"""Numbers follow their distribution and stay in range."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from shardwright import Region
from shardwright.errors import ArgumentTypeError
from shardwright.tensor.random import (
    RandomArgumentError,
    fill_bernoulli,
    fill_cauchy,
    fill_exponential,
    fill_geometric,
    fill_integers,
    fill_log_normal,
    fill_normal,
    fill_scaled_mask,
    fill_uniform,
    keep_mask,
    permutation,
)

N = 200_000
REALS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
reals = pytest.mark.parametrize("dtype", REALS)


def drawn(
    fill: Callable[..., Tensor], *parameters: float, dtype: torch.dtype = torch.float32, offset: int = 0
) -> Tensor:
    return fill(torch.empty(N, dtype=dtype), Region.whole((N,)), (N,), 123, offset, *parameters)


def assert_distributed(numbers: Tensor, cumulative: Callable[[np.ndarray], np.ndarray]) -> None:
    """Kolmogorov-Smirnov test at a significance level of 1e-5."""
    ordered = np.sort(numbers.double().numpy())
    expected = cumulative(ordered)
    steps = np.arange(len(ordered) + 1) / len(ordered)
    distance = max(np.abs(expected - steps[1:]).max(), np.abs(expected - steps[:-1]).max())
    assert distance < 2.5 / math.sqrt(len(ordered))


def normal_cumulative(x: np.ndarray) -> np.ndarray:
    return (1 + torch.erf(torch.from_numpy(x) / math.sqrt(2)).numpy()) / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_follow_their_distribution(dtype: torch.dtype) -> None:
    assert_distributed(drawn(fill_uniform, dtype=dtype), lambda x: x)
    assert_distributed(drawn(fill_uniform, -2.0, 6.0, dtype=dtype), lambda x: (x + 2) / 8)
    assert_distributed(drawn(fill_normal, dtype=dtype), normal_cumulative)
    assert_distributed(drawn(fill_normal, 3.0, 0.5, dtype=dtype), lambda x: normal_cumulative((x - 3) / 0.5))
    assert_distributed(drawn(fill_exponential, 2.0, dtype=dtype), lambda x: 1 - np.exp(-2 * x))
    log_normal = drawn(fill_log_normal, 0.5, 0.25, dtype=dtype)
    assert_distributed(log_normal, lambda x: normal_cumulative((np.log(x) - 0.5) / 0.25))
    assert_distributed(drawn(fill_cauchy, 1.0, 2.0, dtype=dtype), lambda x: 0.5 + np.arctan((x - 1) / 2) / np.pi)


@reals
def test_moments_are_right_for_every_dtype(dtype: torch.dtype) -> None:
    uniform = drawn(fill_uniform, dtype=dtype).double()
    assert abs(uniform.mean() - 0.5) < 0.003
    assert abs(uniform.var() - 1 / 12) < 0.001
    normal = drawn(fill_normal, 1.0, 2.0, dtype=dtype).double()
    assert abs(normal.mean() - 1) < 0.02
    assert abs(normal.var() - 4) < 0.05


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_normals_have_unit_variance_and_independent_parts(dtype: torch.dtype) -> None:
    numbers = drawn(fill_normal, dtype=dtype)
    assert abs(numbers.abs().double().square().mean() - 1) < 0.01
    assert_distributed(numbers.real * math.sqrt(2), normal_cumulative)
    assert_distributed(numbers.imag * math.sqrt(2), normal_cumulative)
    assert abs((numbers.real * numbers.imag).mean()) < 0.01


def test_normal_numbers_reach_the_tails() -> None:
    assert 4.2 < drawn(fill_normal).abs().max() < 6.8
    assert drawn(fill_normal).isfinite().all()


@pytest.mark.parametrize("fill", [fill_uniform, fill_normal])
def test_adjacent_indices_offsets_and_seeds_are_uncorrelated(fill: Callable[..., Tensor]) -> None:
    def standard(seed: int, offset: int) -> Tensor:
        x = fill(torch.empty(N, dtype=torch.float64), Region.whole((N,)), (N,), seed, offset)
        return (x - x.mean()) / x.std()

    first = standard(0, 0)
    others = {"index": first.roll(1), "two on": first.roll(2), "offset": standard(0, 1), "seed": standard(1, 0)}
    for what, other in others.items():
        assert abs((first * other).mean()) < 5 / math.sqrt(N), what
        assert abs((first.square() * other.square()).mean() - 1) < 15 / math.sqrt(N), what


@reals
@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (1, 2), (-1, 0), (-1, 1), (0.1, 0.3), (100, 101), (1000, 1001), (-1e-7, 1e-7), (0, 1e4)]
)
def test_uniform_never_reaches_high(dtype: torch.dtype, low: float, high: float) -> None:
    numbers = drawn(fill_uniform, low, high, dtype=dtype).double()
    nearest_low = torch.tensor(low, dtype=dtype).item()
    assert nearest_low <= numbers.min()
    assert numbers.max() < high or numbers.max() == nearest_low  # the dtype may have no number in between


def test_uniform_on_an_empty_interval_is_its_bound() -> None:
    assert drawn(fill_uniform, 1.5, 1.5).unique().tolist() == [1.5]


def test_float64_has_more_bits_than_float32() -> None:
    scaled = drawn(fill_uniform) * 2**24
    assert torch.equal(scaled, scaled.round())
    assert ((scaled % 2) == 1).any()
    scaled = drawn(fill_uniform, dtype=torch.float64) * 2**53
    assert ((scaled % 2) == 1).any()


def test_exponential_numbers_are_positive() -> None:
    assert drawn(fill_exponential, 1e-3).min() > 0


@pytest.mark.parametrize("p", [1e-3, 0.3, 0.5, 0.999])
def test_bernoulli_has_its_probability(p: float) -> None:
    deviation = 5 * math.sqrt(p * (1 - p) / N)
    assert abs(drawn(fill_bernoulli, p).mean() - p) < deviation
    assert abs(keep_mask(Region.whole((N,)), (N,), 5, 6, p).double().mean() - p) < deviation
    assert abs(drawn(fill_scaled_mask, p).double().mean() - 1) < deviation / p


def test_bernoulli_with_probability_0_or_1_is_constant() -> None:
    assert drawn(fill_bernoulli, 0.0).unique().tolist() == [0]
    assert drawn(fill_bernoulli, 1.0).unique().tolist() == [1]
    assert drawn(fill_scaled_mask, 0.0).unique().tolist() == [0]
    assert drawn(fill_scaled_mask, 1.0).unique().tolist() == [1]
    assert keep_mask(Region.whole((9,)), (9,), 5, 6, 1.0).all()


def test_integers_cover_their_range_evenly() -> None:
    numbers = drawn(fill_integers, -3, 7, dtype=torch.int64)
    values, counts = numbers.unique(return_counts=True)
    assert values.tolist() == list(range(-3, 7))
    assert ((counts - N / 10) ** 2 / (N / 10)).sum() < 40  # chi squared of 9 degrees of freedom


@pytest.mark.parametrize(
    ("dtype", "low", "high"),
    [
        (torch.bool, 0, 2),
        (torch.uint8, 0, 256),
        (torch.int8, -128, 128),
        (torch.int16, -(2**15), 2**15),
        (torch.uint16, 0, 2**16),
        (torch.uint32, 0, 2**32),
        (torch.int64, -(2**63), 2**63),
        (torch.int64, 0, 2**63),
        (torch.uint64, 0, 2**64),
        (torch.float16, -2048, 2049),
    ],
)
def test_integers_cover_the_full_range_of_the_dtype(dtype: torch.dtype, low: int, high: int) -> None:
    numbers = np.array(drawn(fill_integers, low, high, dtype=dtype).tolist(), dtype=object)
    quarters = np.bincount(((numbers - low) * 4 // (high - low)).astype(int), minlength=4)
    if high - low > 4:
        assert abs(quarters / N - 0.25).max() < 0.01
    assert low <= numbers.min()
    assert numbers.max() < high


def test_geometric_numbers_count_trials() -> None:
    numbers = drawn(fill_geometric, 0.25, dtype=torch.int64)
    assert numbers.min() == 1
    for trials in range(1, 6):
        assert abs((numbers == trials).double().mean() - 0.25 * 0.75 ** (trials - 1)) < 0.006
    assert drawn(fill_geometric, 1e-4, dtype=torch.int8).max() == 127


@pytest.mark.parametrize("n", [0, 1, 2, 17, 1000])
def test_permutation_contains_every_number_once(n: int) -> None:
    assert permutation(n, 3, 4).sort().values.tolist() == list(range(n))


def test_permutations_differ_and_are_uniform() -> None:
    orders = torch.stack([permutation(10, 3, offset) for offset in range(3000)])
    assert abs(orders.double().mean(0) - 4.5).max() < 0.3
    assert len(orders.unique(dim=0)) > 2990


REFUSED = {
    "uniform: [low, high) = [2, 1) is reversed": (fill_uniform, (2, 1), torch.float32),
    "uniform: [low, high) = [0, 70000.0) exceeds the range of torch.float16": (fill_uniform, (0, 7e4), torch.float16),
    "uniform: [low, high) = [nan, 1) exceeds the range of": (fill_uniform, (math.nan, 1), torch.float32),
    "normal: std must be at least 0, got -1": (fill_normal, (0, -1), torch.float32),
    "log_normal: std must be positive, got 0": (fill_log_normal, (0, 0), torch.float32),
    "exponential: rate must be positive, got 0": (fill_exponential, (0,), torch.float32),
    "cauchy: sigma must be positive, got -2": (fill_cauchy, (0, -2), torch.float32),
    "geometric: p must be in (0, 1), got 1": (fill_geometric, (1,), torch.float32),
    "bernoulli: probability must be in [0, 1], got 1.5": (fill_bernoulli, (1.5,), torch.float32),
    "integers: [3, 3) is empty: low must be less than high": (fill_integers, (3, 3), torch.int64),
    "integers: [0, 300) is not in [0, 256), the integers that torch.uint8": (fill_integers, (0, 300), torch.uint8),
    "integers: [0, 5000) is not in [-2048, 2049)": (fill_integers, (0, 5000), torch.float16),
}


@pytest.mark.parametrize("message", REFUSED)
def test_invalid_parameters_raise(message: str) -> None:
    fill, parameters, dtype = REFUSED[message]
    with pytest.raises(RandomArgumentError) as caught:
        drawn(fill, *parameters, dtype=dtype)
    assert message in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, RuntimeError)


@pytest.mark.parametrize("p", [-0.1, 1.1, math.nan])
def test_tensor_of_invalid_probabilities_raises(p: float) -> None:
    with pytest.raises(RandomArgumentError, match=r"must be in \[0, 1\]"):
        fill_bernoulli(torch.empty(2), Region.whole((2,)), (2,), 0, 0, torch.tensor([0.5, p]))


@pytest.mark.parametrize(
    "fill",
    [fill_uniform, fill_normal, fill_exponential, fill_cauchy, fill_log_normal, lambda *a: fill_scaled_mask(*a, 0.5)],
)
def test_invalid_dtypes_raise(fill: Callable[..., Tensor]) -> None:
    with pytest.raises(ArgumentTypeError, match=r"the dtype must be floating.*, got torch.int32"):
        drawn(fill, dtype=torch.int32)
