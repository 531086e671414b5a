"""Numbers follow the specification, computed here from the words, and do not change between versions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from shardwright import Region
from shardwright.tensor.random import (
    fill_bernoulli,
    fill_cauchy,
    fill_exponential,
    fill_geometric,
    fill_integers,
    fill_log_normal,
    fill_normal,
    fill_uniform,
    permutation,
)

SEED, OFFSET, N = 2026, 3, 40

# Never change these: checkpointed seeds rely on them.
GOLDEN: dict[str, tuple[Callable[..., Tensor], torch.dtype, tuple[float, ...], list[complex]]] = {
    "uniform, float32": (
        fill_uniform,
        torch.float32,
        (),
        [0.022198379039764404, 0.006723940372467041, 0.3516443967819214, 0.2946997284889221],
    ),
    "uniform, float64": (
        fill_uniform,
        torch.float64,
        (),
        [0.05379154351018067, 0.35759813776546046, 0.014931137065163913, 0.1536879130946418],
    ),
    "uniform, bfloat16": (
        fill_uniform,
        torch.bfloat16,
        (-1.0, 1.0),
        [-0.95703125, -0.98828125, -0.296875, -0.41015625],
    ),
    "uniform, complex64": (
        fill_uniform,
        torch.complex64,
        (),
        [
            (0.022198379039764404 + 0.006723940372467041j),
            (0.3516443967819214 + 0.2946997284889221j),
            (0.1733715534210205 + 0.37686634063720703j),
            (0.0664970874786377 + 0.644210934638977j),
        ],
    ),
    "normal, float32": (
        fill_normal,
        torch.float32,
        (),
        [2.148272752761841, -0.5377375483512878, 0.29186883568763733, 1.5248863697052002],
    ),
    "normal, float64": (
        fill_normal,
        torch.float64,
        (),
        [0.07579971802668259, 0.3960198476936659, -0.4603510788966059, 0.9347981045124534],
    ),
    "normal, float16": (
        fill_normal,
        torch.float16,
        (0.0, 0.02),
        [0.04296875, -0.0107574462890625, 0.00583648681640625, 0.0305023193359375],
    ),
    "bernoulli": (fill_bernoulli, torch.float32, (0.3,), [0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0]),
    "integers": (fill_integers, torch.int64, (0, 50257), [48295, 11051, 39729, 16224]),
    "exponential": (
        fill_exponential,
        torch.float32,
        (2.0,),
        [0.0406443290412426, 0.41071492433547974, 0.2714426517486572, 0.2187427431344986],
    ),
    "log-normal": (
        fill_log_normal,
        torch.float32,
        (0.0, 1.0),
        [1.0787465572357178, 1.4858988523483276, 0.6310620307922363, 2.546699285507202],
    ),
    "cauchy": (
        fill_cauchy,
        torch.float32,
        (0.0, 1.0),
        [-8.113296508789062, 1.2095568180084229, -1.293673038482666, 0.6222221851348877],
    ),
    "geometric": (fill_geometric, torch.int64, (0.2,), [1, 4, 3, 2]),
}
GOLDEN_PERMUTATION = [7, 6, 2, 5, 0, 4, 1, 3]


def first_numbers(fill: Callable[..., Tensor], dtype: torch.dtype, parameters: tuple[float, ...], n: int = N) -> Tensor:
    return fill(torch.empty(n, dtype=dtype), Region.whole((n,)), (n,), SEED, OFFSET, *parameters)


def lanes(bits: int) -> list[int]:
    """Return signed lanes of the key, from numpy's documented generator."""
    generator = np.random.Philox(key=SEED + (OFFSET << 64), counter=2**256 - 1)
    words = [int(word) for word in generator.random_raw(N)]
    if bits == 32:
        words = [half for word in words for half in (word % 2**32, word >> 32)][:N]
    return [(word + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1) for word in words]


def above_zero(lane: int, bits: int) -> float:
    return (lane % 2 ** (bits - 1) + 0.5) / 2 ** (bits - 1)


def normals(bits: int) -> Iterator[float]:
    found = lanes(bits)
    for even, odd in zip(found[::2], found[1::2], strict=True):
        radius, angle = math.sqrt(-2 * math.log(above_zero(even, bits))), math.pi * odd / 2 ** (bits - 1)
        yield from (radius * math.cos(angle), radius * math.sin(angle))


@pytest.mark.parametrize("name", GOLDEN)
def test_first_numbers_of_a_seed_match_the_golden_values(name: str) -> None:
    fill, dtype, parameters, expected = GOLDEN[name]
    assert first_numbers(fill, dtype, parameters, n=len(expected)).tolist() == expected


def test_permutation_of_a_seed_matches_the_golden_values() -> None:
    assert permutation(8, SEED, OFFSET).tolist() == GOLDEN_PERMUTATION


def test_uniform_integers_and_bernoulli_match_the_specification_exactly() -> None:
    found = first_numbers(fill_uniform, torch.float32, ()).tolist()
    assert found == [(lane % 2**24) / 2**24 for lane in lanes(32)]
    found = first_numbers(fill_uniform, torch.float64, ()).tolist()
    assert found == [(lane % 2**53) / 2**53 for lane in lanes(64)]
    found = first_numbers(fill_integers, torch.int64, (-5, 1000)).tolist()
    assert found == [-5 + (lane % 2**64) * 1005 // 2**64 for lane in lanes(64)]
    found = first_numbers(fill_bernoulli, torch.int64, (0.3,)).tolist()
    assert found == [int(lane < round(0.3 * 2**32) - 2**31) for lane in lanes(32)]
    order = sorted(range(N), key=lanes(64).__getitem__)
    assert permutation(N, SEED, OFFSET).tolist() == order


def test_other_distributions_match_the_specification_closely() -> None:
    close = {torch.float32: 2e-6, torch.float64: 1e-14}
    for dtype, bits in ((torch.float32, 32), (torch.float64, 64)):
        found = first_numbers(fill_normal, dtype, (1.0, 2.0))
        np.testing.assert_allclose(found, [1 + 2 * z for z in normals(bits)], atol=close[dtype], rtol=0)
    expected = {
        fill_exponential: [-math.log(above_zero(lane, 64)) for lane in lanes(64)],
        fill_cauchy: [1 / math.tan(math.pi * (lane + 0.5) / 2**64) for lane in lanes(64)],
    }
    for fill, numbers in expected.items():
        np.testing.assert_allclose(first_numbers(fill, torch.float64, ()), numbers, rtol=1e-12)
    found = first_numbers(fill_log_normal, torch.float64, (0.5, 0.25))
    np.testing.assert_allclose(found, [math.exp(0.5 + 0.25 * z) for z in normals(64)], rtol=1e-13)
    trials = [math.ceil(math.log(above_zero(lane, 64)) / math.log(1 - 0.1)) for lane in lanes(64)]
    assert first_numbers(fill_geometric, torch.int64, (0.1,)).tolist() == trials
