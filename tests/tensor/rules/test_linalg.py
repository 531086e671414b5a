"""Norms, distances, extremes and transforms along sharded dimensions, and linear algebra on sharded batches."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # torch's own short name
from torch import Tensor

import shardwright as sw
from shardwright.testing import on_ranks

FULL = os.environ.get("SHARDWRIGHT_BUDGET") == "full"
NAN = float("nan")
INF = float("inf")
ORDERS = (0.5, 1, 2, 3, -1, INF, -INF)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + sum(shape)))


def requiring_grad(*values: Tensor) -> list[Tensor]:
    return [value.clone().requires_grad_() for value in values]


def test_norms_of_every_order_along_sharded_dimensions_match_torch(against_torch: Callable[..., None]) -> None:
    x = randn(5, 3)
    cases: list[Any] = [
        (f"vector {order} {dim}", lambda x, o=order, d=dim: torch.linalg.vector_norm(x, o, d), requiring_grad(x))
        for order, dim in product(ORDERS, (None, 0, (0, 1)))
    ]
    cases += [
        (f"matrix {order}", lambda x, o=order: torch.linalg.matrix_norm(x, o, keepdim=True), requiring_grad(x))
        for order in ("fro", "nuc", 1, -1, 2, -2, INF, -INF)
    ]
    cases += [
        ("norm", lambda x: torch.norm(x), requiring_grad(x)),
        ("norm nuc", lambda x: torch.norm(x, "nuc"), requiring_grad(x)),
        ("linalg.norm", lambda x: torch.linalg.norm(x, 1, dim=(1, 0)), requiring_grad(x)),
        ("linalg.norm of all", lambda x: torch.linalg.norm(x), requiring_grad(x)),
        ("normalize", lambda x: F.normalize(x, dim=0), requiring_grad(x)),
        ("half", lambda x: torch.linalg.vector_norm((x * 300).half(), 2), [x]),
    ]
    against_torch((4,), cases)
    against_torch((2, 2), cases, max_combinations=12)


def compare(call: Callable[[Any], Any], whole: Tensor, mesh_shape: tuple[int, ...]) -> None:
    """Compare values and gradients in every layout but partial ones, whose rounding breaks ties."""
    mesh = sw.init_device_mesh("cpu", mesh_shape)
    plain = whole.clone().requires_grad_()
    expected = call(plain)
    (theirs,) = torch.autograd.grad(expected.sum(), plain, allow_unused=True)
    for placements in product((sw.Replicate(), sw.Shard(0), sw.Shard(1)), repeat=len(mesh_shape)):
        x = sw.distribute_tensor(whole, mesh, placements).requires_grad_()
        result = call(x)
        (ours,) = torch.autograd.grad(result.sum(), x, allow_unused=True)
        torch.testing.assert_close(result.full_tensor(), expected, equal_nan=True)
        if theirs is not None:  # a count has none
            torch.testing.assert_close(ours.full_tensor(), theirs, equal_nan=True)  # type: ignore[attr-defined]  # a DTensor


@pytest.mark.parametrize("order", [0, 0.5, 1, 1.5, 2, 3, INF, -INF])
@on_ranks(4)
def test_gradients_of_norms_at_zero_and_at_ties_match_torch(order: float) -> None:
    some = torch.tensor([[0.0, 1.0], [0.0, -1.0], [2.0, 0.0], [0.0, 0.0], [-2.0, 1.0]], dtype=torch.float64)
    for whole in (torch.zeros(5, 2, dtype=torch.float64), some):
        for dim in (0, 1, None):
            compare(lambda x, d=dim: torch.linalg.vector_norm(x, order, d), whole, (4,))


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)])
@on_ranks(4)
def test_the_gradient_of_an_extreme_is_shared_among_ties(mesh_shape: tuple[int, ...]) -> None:
    ties = torch.tensor([[3, 1], [3, 2], [-4, 2], [0, 2], [3, -4]], dtype=torch.float64)
    endless = torch.tensor([[INF, 1], [3, -INF], [INF, 2]], dtype=torch.float64)
    for function in (torch.amax, torch.amin):
        for dim in (0, 1, (0, 1)):
            for whole in (ties, endless):
                compare(lambda x, f=function, d=dim: f(x, d), whole, mesh_shape)
    holed = torch.tensor([[3, NAN], [5, 2], [NAN, 2]], dtype=torch.float64)
    for function in (torch.max, torch.min):
        for whole in (ties, endless, holed):
            compare(function, whole, mesh_shape)


@on_ranks(4)
def test_a_global_maximum_exchanges_one_value_per_rank() -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    x = sw.distribute_tensor(randn(400, 7), mesh, [sw.Shard(0)]).requires_grad_()
    with sw.trace() as seen:
        x.max().redistribute(placements=[sw.Replicate()]).backward()
    assert 0 < seen.received <= 2 * 3 * 8  # a value and a count from each of the 3 others


def test_distances_and_renorm_match_torch(against_torch: Callable[..., None]) -> None:
    x, y = randn(5, 3), randn(4, 3)
    cases = [
        ("cdist", lambda x, y: torch.cdist(x, y), requiring_grad(x, y)),
        ("cdist of many", lambda x, y: torch.cdist(x, y), requiring_grad(randn(30, 2), randn(28, 2))),
        ("pdist", lambda x: F.pdist(x, 1.0), requiring_grad(x)),
        ("dist", lambda x, y: torch.dist(x, y, 3), requiring_grad(x, randn(5, 3, seed=1))),
        ("renorm", lambda x: torch.renorm(x, 2, 0, 1.0), requiring_grad(x)),
        ("renorm of columns", lambda x: torch.renorm(x, 1, 1, 1.0), requiring_grad(x)),
    ]
    against_torch((4,), cases)


def test_batched_linalg_with_empty_shards_matches_torch(against_torch: Callable[..., None]) -> None:
    matrices = randn(2, 3, 3) + 4 * torch.eye(3, dtype=torch.float64)
    cases = [
        ("inv", torch.linalg.inv, requiring_grad(matrices)),
        ("cond", torch.linalg.cond, requiring_grad(matrices)),
        ("solve", torch.linalg.solve, requiring_grad(matrices, randn(2, 3, 2))),
        ("solve one", torch.linalg.solve, requiring_grad(matrices, randn(2, 3))),
        ("householder", torch.linalg.householder_product, requiring_grad(randn(2, 3, 2), randn(2, 2))),
        ("ormqr", torch.ormqr, requiring_grad(randn(3, 3), randn(3), randn(3, 5))),
        ("fft", lambda x: torch.view_as_real(torch.fft.fft(x)), requiring_grad(randn(2, 5))),
        (
            "stft",
            lambda x, w: torch.stft(x, 4, window=w, return_complex=True).abs(),
            requiring_grad(randn(2, 16), randn(4)),
        ),
        ("fftshift", lambda x: torch.fft.fftshift(x), requiring_grad(randn(2, 5))),
        ("bilinear", F.bilinear, requiring_grad(randn(5, 2), randn(5, 3), randn(4, 2, 3), randn(4))),
        ("baddbmm", torch.baddbmm, requiring_grad(randn(5), randn(2, 3, 4), randn(2, 4, 5))),
    ]
    against_torch((4,), cases, max_combinations=60 if FULL else 24)
    against_torch((2, 2), cases, max_combinations=25 if FULL else 10)


@on_ranks(4)
def test_a_norm_along_a_sharded_dimension_exchanges_one_value_per_row() -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    whole = torch.randn(400, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = sw.distribute_tensor(whole, mesh, [sw.Shard(0)]).requires_grad_()
    for order in (1, 2, 3, INF):
        with sw.trace() as seen:
            torch.linalg.vector_norm(x, order, 0).redistribute(placements=[sw.Replicate()]).sum().backward()
        assert 0 < seen.received <= 2 * 3 * 7 * 8, order  # twice 7 values of 8 bytes from each of the 3 others
    with sw.trace() as seen:
        torch.linalg.inv(x.detach().reshape(400, 7, 1)[:, :1] + 2)
    assert seen.received == 0


@on_ranks(4)
def test_second_derivatives_of_an_extreme_reach_every_rank() -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    whole = torch.tensor([3.0, 1.0, 3.0, 2.0, 3.0], dtype=torch.float64)
    plain = whole.clone().requires_grad_()
    cut = sw.distribute_tensor(whole, mesh, [sw.Shard(0)]).requires_grad_()
    found = []
    for x in (plain, cut):
        (first,) = torch.autograd.grad((torch.amax(x, 0) ** 3), x, create_graph=True)
        (second,) = torch.autograd.grad((first * first).sum(), x)
        found.append(second)
    torch.testing.assert_close(found[1].full_tensor(), found[0])  # type: ignore[attr-defined]  # a DTensor


@on_ranks(4)
def test_undefined_gradients_are_zeros() -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    x = sw.distribute_tensor(randn(5, 3), mesh, [sw.Shard(0)]).requires_grad_()
    (gradient,) = torch.autograd.grad(torch.sgn(x).sum(), x)
    assert torch.equal(gradient.full_tensor(), torch.zeros(5, 3, dtype=torch.float64))  # type: ignore[attr-defined]  # a DTensor


@on_ranks(3)
def test_empty_results_are_empty_on_every_rank() -> None:
    mesh = sw.init_device_mesh("cpu", (3,))
    whole = randn(4, 3, 2)
    x = sw.distribute_tensor(whole, mesh, [sw.Shard(0)])
    q, r = torch.linalg.qr(x, mode="r")
    assert tuple(q.shape) == (0,)
    torch.testing.assert_close(r.full_tensor(), torch.linalg.qr(whole, mode="r").R)  # type: ignore[attr-defined]  # a DTensor
    found = torch.linalg.lstsq(x, sw.distribute_tensor(randn(4, 3, 5), mesh, [sw.Shard(0)]))
    expected = torch.linalg.lstsq(whole, randn(4, 3, 5))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs)
    assert isinstance(found, torch.return_types.linalg_lstsq)
