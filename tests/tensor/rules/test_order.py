"""Order, scans, counts and selections along sharded dimensions match torch, with the least communication."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwright as sw
from shardwright import comm
from shardwright.layout import Partial, Placement, Ragged, Replicate, Shard
from shardwright.testing import on_ranks, run_ranks

Function = Callable[[Any], Any]


def numbers(shape: tuple[int, ...]) -> Tensor:
    """Mixed signs, with ties."""
    generator = torch.Generator().manual_seed(sum(shape))
    values = torch.randn(shape, dtype=torch.float64, generator=generator)
    again = torch.rand(shape, generator=generator) < 0.3
    return torch.where(again, values.sign(), values)


def non_finite(shape: tuple[int, ...]) -> Tensor:
    """With infinities and NaN."""
    values = numbers(shape).reshape(-1)
    values[::5] = torch.nan
    values[1::4] = torch.inf
    return values.reshape(shape)


SCANS: list[Function] = [
    *(lambda x, f=f, d=d: f(x, d) for f in (torch.cumsum, torch.cumprod, torch.logcumsumexp) for d in (0, -1)),
    *(lambda x, f=f, d=d: tuple(f(x, d)) for f in (torch.cummax, torch.cummin) for d in (0, -1)),
    lambda x: torch.cumprod(x.round(), 0),  # zeros, which would give NaN in a quotient
    lambda x: x.detach().long().cumsum(0),
    lambda x: torch.cumsum(x.detach().long(), 0, dtype=torch.float64),
]
EXTREMES: list[Function] = [
    *(lambda x, f=f, d=d: tuple(f(x, d)) for f in (torch.max, torch.min) for d in (0, 1)),
    lambda x: tuple(x.max(dim=0, keepdim=True)),
    *(lambda x, f=f, d=d: f(x, d) for f in (torch.argmax, torch.argmin) for d in (None, 0, 1)),
    lambda x: x.argmax(keepdim=True),
    lambda x: x.argmin(1, keepdim=True),
    lambda x: torch.aminmax(x.detach()),
    lambda x: torch.aminmax(x.detach(), dim=0, keepdim=True),
    *(lambda x, k=k: x.topk(min(k, x.shape[0]), 0)[0] for k in (1, 2, 4)),
    lambda x: x.topk(1, 1, largest=False)[0],
    *(lambda x, k=k: x.kthvalue(min(k, x.shape[0]), 0)[0] for k in (1, 3, 7)),
    lambda x: tuple(x.sort(dim=0, stable=True)),
    lambda x: x.mode()[0],
]
COUNTS: list[Function] = [
    lambda x: torch.histc(x.detach(), 5),
    lambda x: torch.histc(x.detach(), 4, -1, 1),
    lambda x: tuple(torch.histogram(x.detach(), 4)),
    lambda x: tuple(torch.histogram(x.detach(), 4, density=True)),
    lambda x: tuple(torch.histogram(x.detach(), 4, weight=x.detach().abs(), range=(-2.0, 2.0))),
    lambda x: torch.histogramdd(x.detach(), 3)[0],
    lambda x: torch.histogramdd(x.detach(), 2, density=True)[0],
    lambda x: torch.bincount(x.detach().flatten().abs().long()),
    lambda x: torch.bincount(x.detach().flatten().abs().long(), x.detach().flatten(), minlength=9),
    lambda x: torch.hash_tensor(x.detach()).long(),
]
SELECTIONS: list[Function] = [
    lambda x: torch.nonzero(x.detach() > 0),
    lambda x: torch.nonzero(x.detach() > 0, as_tuple=True),
    lambda x: torch.nonzero(x.detach() > 99),
    lambda x: torch.argwhere(x.detach() > 0),
    lambda x: torch.nonzero_static(x.detach() > 0, size=3),
    lambda x: torch.nonzero_static(x.detach() > 0, size=40, fill_value=7),
    lambda x: torch.masked_select(x, x > 0),
    lambda x: x.masked_select(x[0] > 0),
    lambda x: torch.unique(x.detach().round(), return_inverse=True, return_counts=True),
    lambda x: x.detach().round().unique(),
    lambda x: torch.unique(x.detach().sign(), dim=0, return_inverse=True, return_counts=True),
    lambda x: torch.unique(x.detach().sign(), dim=1),
    lambda x: torch.unique_consecutive(x.detach().sign(), return_inverse=True, return_counts=True),
    lambda x: torch.unique_consecutive(x.detach().sign() * 0, dim=0, return_counts=True),
    lambda x: x.take(torch.zeros_like(x, dtype=torch.long) - 1),
    lambda x: torch.combinations(x.flatten()),
    lambda x: torch.cartesian_prod(x.flatten(), x.sum(0)),
]
DIFFERENCES: list[Function] = [
    *(lambda x, d=d: torch.diff(x, dim=d) for d in (0, 1)),
    lambda x: torch.diff(x, 2, dim=0, prepend=x, append=x),
    lambda x: torch.diff(x, 99, 0),
    lambda x: torch.diff(x.detach() > 0, dim=0).double(),
    *(lambda x, d=d: torch.trapezoid(x, dim=d) for d in (0, 1)),
    lambda x: torch.trapz(x, x, dim=0),
    lambda x: torch.trapezoid(x, x.sum(1), dim=0),
    lambda x: torch.cumulative_trapezoid(x, dx=0.5, dim=0),
    lambda x: torch.gradient(x),
    lambda x: torch.gradient(x, dim=0, spacing=2.0) if x.shape[0] < 3 else torch.gradient(x, dim=0, edge_order=2),
    lambda x: torch.gradient(x, dim=0, spacing=[x.detach().abs().sum(1).cumsum(0)]),
]
STATISTICS: list[Function] = [
    *(lambda x, d=d: torch.quantile(x, 0.3, dim=d) for d in (None, 0, 1)),
    *(lambda x, i=i: x.quantile(0.6, 0, interpolation=i) for i in ("lower", "higher", "midpoint", "nearest")),
    lambda x: torch.quantile(x, x.detach().sigmoid()[0], dim=0, keepdim=True),
    # `q` with and without a gradient: the same on ranks with empty shards
    *(lambda x, i=i: x.quantile(x.sum(0).sigmoid(), 0, interpolation=i) for i in ("linear", "midpoint", "lower")),
    lambda x: torch.nanquantile(torch.where(x > 1, torch.nan, x), x.detach().sigmoid()[0], dim=0),
    lambda x: torch.cov(x),
    lambda x: torch.corrcoef(x),
    lambda x: torch.cov(x.t(), aweights=x[:, 0].detach().abs(), fweights=x[:, 0].detach().abs().long() + 1),
    lambda x: torch.nanmean(torch.where(x > 1, torch.nan, x), 0),
]
KINDS = {
    "scans": SCANS,
    "extremes": EXTREMES,
    "counts": COUNTS,
    "selections": SELECTIONS,
    "differences": DIFFERENCES,
    "statistics": STATISTICS,
}


def compare(number: int, function: Function, whole: Tensor, mesh: Any, placements: list[Placement]) -> None:
    """Compare values and gradients of the function on a DTensor and on the plain tensor."""
    what = f"function {number} of {tuple(whole.shape)} {placements}"
    plain = whole.clone().requires_grad_()
    unreduced = [Replicate() if p.is_partial() else p for p in placements]
    x = sw.distribute_tensor(whole, mesh, unreduced)
    share = 1 / torch.Size([mesh.shape[m] for m, p in enumerate(placements) if p.is_partial()]).numel()
    x = sw.DTensor.from_local(x.to_local() * share, mesh, placements, shape=whole.shape).requires_grad_()
    expected, found = (each if isinstance(each, tuple) else (each,) for each in (function(plain), function(x)))
    assert len(expected) == len(found), what
    losses: list[Any] = [0, 0]
    for theirs, ours in zip(expected, found, strict=True):
        gathered = ours.full_tensor()
        assert gathered.dtype == theirs.dtype, what
        torch.testing.assert_close(gathered, theirs, rtol=1e-9, atol=1e-9, equal_nan=True, msg=lambda m: f"{what}: {m}")
        if theirs.requires_grad and theirs.isfinite().all():
            losses = [losses[0] + theirs.sin().sum(), losses[1] + ours.sin().sum()]
    if isinstance(losses[0], Tensor):
        (theirs,) = torch.autograd.grad(losses[0], plain)
        (ours,) = torch.autograd.grad(losses[1], x)
        torch.testing.assert_close(ours.full_tensor(), theirs, rtol=1e-8, atol=1e-8, msg=lambda m: f"{what}: {m}")


def on_a_1d_mesh(functions: list[Function]) -> None:
    mesh = sw.init_device_mesh("cpu", (3,))
    for shape in ((7, 5), (2, 4)):
        placements = [Shard(0), Shard(1), Partial(), Ragged(0, (0, shape[0] - 1, 1)), Ragged(1, (shape[1], 0, 0))]
        for placement in placements:
            for number, function in enumerate(functions):
                compare(number, function, numbers(shape), mesh, [placement])


@pytest.mark.parametrize("kind", KINDS)
def test_order_operators_match_torch_along_a_sharded_dimension(kind: str) -> None:
    run_ranks(3, on_a_1d_mesh, KINDS[kind], timeout=240)


def on_a_2d_mesh(functions: list[Function]) -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2))
    for placements in product((Replicate(), Shard(0), Shard(1), Partial()), repeat=2):
        for number, function in enumerate(functions):
            compare(number, function, numbers((5, 3)), mesh, list(placements))


@pytest.mark.parametrize("kind", KINDS)
def test_order_operators_match_torch_on_a_2d_mesh(kind: str) -> None:
    run_ranks(4, on_a_2d_mesh, KINDS[kind], timeout=240)


@on_ranks(3)
def test_nan_is_ordered_as_in_torch() -> None:
    mesh = sw.init_device_mesh("cpu", (3,))
    whole = non_finite((11, 2))
    x = sw.distribute_tensor(whole, mesh, [Shard(0)])
    functions: list[Function] = [
        lambda x: x.max(0), lambda x: x.min(0), lambda x: x.cummax(0), lambda x: x.cummin(0),
        lambda x: x.topk(2, 0)[:1],
        lambda x: (x.argmax(), x.argmin(0), x.kthvalue(11, 0)[0], x.kthvalue(1, 0)[0]),
        lambda x: (x.quantile(0.5, 0), x.nanquantile(0.5, 0), x.quantile(0.5), x.nanmean(0)),
        lambda x: (x.nanmedian(0)[0], x.median(0)[0], x.cumsum(0), x.logcumsumexp(0)),
    ]  # fmt: skip
    for number, function in enumerate(functions):
        for theirs, ours in zip(function(whole), function(x), strict=True):
            torch.testing.assert_close(
                ours.full_tensor(), theirs, equal_nan=True, msg=lambda m, n=number: f"function {n}: {m}"
            )


LONG = 5000


def long_vector(dtype: torch.dtype = torch.float64) -> Tensor:
    values = torch.randn(LONG, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    values[::3] = (values[::3] * 2).round()
    values[7] = 0.0
    values[8] = -0.0
    return (values * 20).to(dtype) if not dtype.is_floating_point else values.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.int16])
def test_long_dimensions_are_sorted_without_gathering(dtype: torch.dtype) -> None:
    def body() -> None:
        mesh = sw.init_device_mesh("cpu", (3,))
        whole = long_vector(dtype)
        if dtype.is_floating_point:
            whole[5::97] = torch.nan
        for placement in (Shard(0), Ragged(0, (0, LONG - 1, 1)), Ragged(0, (LONG, 0, 0)), Ragged(0, (9, LONG - 9, 0))):
            x = sw.distribute_tensor(whole, mesh, [placement])
            for descending in (False, True):
                with sw.trace() as seen:
                    values, indices = x.sort(stable=True, descending=descending)
                expected = whole.sort(stable=True, descending=descending)
                torch.testing.assert_close(values.full_tensor(), expected[0], equal_nan=True, rtol=0, atol=0)
                torch.testing.assert_close(indices.full_tensor(), expected[1])
                assert values.placements == x.placements
                assert seen.received <= x.to_local().numel() * (dtype.itemsize + 8) + 16_000
            assert torch.equal(x.argsort().full_tensor(), whole.argsort(stable=True))
            torch.testing.assert_close(x.msort().full_tensor(), whole.msort(), equal_nan=True)

    run_ranks(3, body)


@on_ranks(4)
def test_order_statistics_of_long_dimensions_do_not_move_elements() -> None:
    functions: list[Function] = [
        lambda x: x.kthvalue(2500)[0], lambda x: x.median(0)[0], lambda x: x.nanmedian(0, keepdim=True)[0],
        lambda x: x.median(), lambda x: x.nanmedian(), lambda x: x.kthvalue(LONG, keepdim=True)[0],
        lambda x: x.kthvalue(3)[0], lambda x: x.topk(5)[0],
    ]  # fmt: skip
    whole = long_vector()
    for shape, placements in (((4,), [Shard(0)]), ((2, 2), [Shard(0), Shard(0)]), ((2, 2), [Replicate(), Shard(0)])):
        mesh = sw.init_device_mesh("cpu", shape)
        for number, function in enumerate(functions):
            for value in (whole, torch.where(whole > 1.5, torch.nan, whole)):
                if value.isnan().any() and number in (1, 3, 5):
                    continue
                plain = value.clone().requires_grad_()
                x = sw.distribute_tensor(value, mesh, placements).requires_grad_()
                with sw.trace() as seen:
                    found = function(x)
                expected = function(plain)
                torch.testing.assert_close(
                    found.full_tensor(), expected, equal_nan=True, rtol=0, atol=0, msg=str(number)
                )
                assert seen.received < 20_000, (number, seen.received)
                assert not any(operation.fell_back for operation in seen.operations)
                (theirs,) = torch.autograd.grad(expected.sum(), plain)
                (ours,) = torch.autograd.grad(found.sum(), x)
                assert float(ours.full_tensor().sum()) == pytest.approx(float(theirs.sum()))
                assert bool((value[ours.full_tensor() != 0] == expected.reshape(-1)[-1]).all()) or number == 7


@on_ranks(4)
def test_quantiles_of_long_dimensions_and_their_gradients_match_torch() -> None:
    whole = long_vector()
    mesh = sw.init_device_mesh("cpu", (4,))
    for function in (
        lambda x: x.quantile(0.25),
        lambda x: x.quantile(0.9, 0),
        lambda x: x.sort(stable=True)[0].cos().cumsum(0),
    ):
        plain = whole.clone().requires_grad_()
        x = sw.distribute_tensor(whole, mesh, [Shard(0)]).requires_grad_()
        expected, found = function(plain), function(x)
        torch.testing.assert_close(found.full_tensor(), expected)
        (theirs,) = torch.autograd.grad(expected.sin().sum(), plain)
        (ours,) = torch.autograd.grad(found.sin().sum(), x)
        torch.testing.assert_close(ours.full_tensor(), theirs)


@pytest.mark.parametrize(
    ("function", "rows"),
    [
        (lambda x: x.cumsum(0), 1), (lambda x: x.cumprod(0), 1), (lambda x: x.logcumsumexp(0), 1),
        (lambda x: x.cummax(0), 2), (lambda x: x.max(0), 2), (lambda x: x.argmin(0), 2), (lambda x: x.topk(3, 0), 6),
        (lambda x: x.kthvalue(2, 0), 4), (lambda x: x.kthvalue(399, 0), 4), (lambda x: x.diff(dim=0), 1),
    ],
)  # fmt: skip
def test_only_a_few_rows_of_every_shard_are_communicated(function: Function, rows: int) -> None:
    def body() -> None:
        mesh = sw.init_device_mesh("cpu", (4,))
        x = sw.distribute_tensor(numbers((400, 3)), mesh, [Shard(0)])
        with sw.trace() as seen:
            function(x)
        assert seen.received <= rows * 3 * 3 * 8, seen.received

    run_ranks(4, body)


@on_ranks(3)
def test_elements_selected_by_value_stay_on_their_rank() -> None:
    mesh = sw.init_device_mesh("cpu", (3,))
    whole = numbers((9, 4))
    x = sw.distribute_tensor(whole, mesh, [Shard(0)])
    with sw.trace() as seen:
        found = x.masked_select(x > 0)
        indices = (x > 0).nonzero()
    assert seen.received <= 2 * 2 * 8
    mine = slice(comm.rank() * 3, comm.rank() * 3 + 3)
    assert torch.equal(found.to_local(), whole[mine].masked_select(whole[mine] > 0))
    assert indices.shape[0] == found.shape[0] == int((whole > 0).sum())


@on_ranks(3)
def test_comparisons_give_the_same_result_on_every_rank() -> None:
    mesh = sw.init_device_mesh("cpu", (3,))
    whole = numbers((7, 2))
    other = whole.clone()
    other[0, 0] += 1
    x, y, z = (
        sw.distribute_tensor(each, mesh, [p]) for each, p in ((whole, Shard(0)), (whole, Shard(1)), (other, Shard(0)))
    )
    assert torch.equal(x, y)
    assert not torch.equal(x, z)
    assert not torch.equal(x, x[:2])
    assert torch.allclose(x, y)
    assert not torch.allclose(x, z)


@on_ranks(3)
def test_second_derivatives_of_scans_match_torch() -> None:
    mesh = sw.init_device_mesh("cpu", (3,))
    whole = numbers((7, 2))
    found = []
    for x in (whole.clone(), sw.distribute_tensor(whole, mesh, [Shard(0)])):
        x.requires_grad_()
        (first,) = torch.autograd.grad(x.cumprod(0).cumsum(0).sin().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        found.append(second)
    torch.testing.assert_close(found[1].full_tensor(), found[0])
