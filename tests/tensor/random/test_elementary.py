"""The elementary functions are precise and do not depend on the index of a number in its array."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from shardwright.tensor.random.elementary import cos_sin_pi, exp, log

floats = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def numbers(count: int, low: float, high: float, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.random.default_rng(1).uniform(low, high, count)).to(dtype)


@floats
def test_log_is_precise_to_a_few_units_in_the_last_place(dtype: torch.dtype) -> None:
    x = torch.cat([numbers(50_000, 0, 1, dtype), 2 ** numbers(50_000, -60, 60, dtype), torch.ones(1, dtype=dtype)])
    expected = np.log(x.numpy().astype(np.longdouble))
    error = np.abs(log(x.clone()).numpy() - expected)
    assert (error <= 5 * torch.finfo(dtype).eps / 2 * np.abs(expected)).all()


@floats
def test_cosine_and_sine_are_precise(dtype: torch.dtype) -> None:
    x = torch.cat([numbers(100_000, -1, 1, dtype), torch.tensor([-1, -0.5, 0, 0.5, 1], dtype=dtype)])
    angle = x.numpy().astype(np.longdouble) * 4 * np.arctan(np.longdouble(1))
    cosine, sine = cos_sin_pi(x)
    bound = 12 * torch.finfo(dtype).eps / 2
    assert np.abs(cosine.numpy() - np.cos(angle)).max() <= bound
    assert np.abs(sine.numpy() - np.sin(angle)).max() <= bound


def test_sine_is_relatively_precise_near_zero() -> None:
    x = 2 ** numbers(10_000, -60, -2, torch.float64)
    expected = np.sin(x.numpy().astype(np.longdouble) * 4 * np.arctan(np.longdouble(1)))
    assert (np.abs(cos_sin_pi(x)[1].numpy() / expected - 1) < 1e-15).all()


def test_exp_is_precise_and_saturates_at_zero_and_infinity() -> None:
    x = numbers(100_000, -700, 700, torch.float64)
    expected = np.exp(x.numpy().astype(np.longdouble))
    assert (np.abs(exp(x.clone()).numpy() / expected - 1) < 4e-16).all()
    edges = torch.tensor([-1e300, -746.0, 0.0, 709.0, 710.0, 1e300], dtype=torch.float64)
    np.testing.assert_allclose(exp(edges.clone()), [0, 0, 1, np.exp(709), np.inf, np.inf], rtol=1e-14)


@floats
@pytest.mark.parametrize("function", [log, lambda x: torch.stack(cos_sin_pi(x)), lambda x: exp(x.double())])
def test_values_do_not_depend_on_their_index(function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    x = numbers(257, 0.001, 1, dtype)
    whole = function(x.clone())
    for start, stop, step in [(0, 1, 1), (3, 10, 1), (1, 257, 1), (100, 257, 7)]:
        assert torch.equal(function(x[start:stop:step].clone()), whole[..., start:stop:step])
