"""Composed operators along sharded dimensions match torch in values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # torch's own short name
from torch import Tensor

import shardwright as sw
from shardwright import comm
from shardwright.layout import Partial, Placement, Ragged, Replicate, Shard
from shardwright.testing import run_ranks

Function = Callable[[Any], Any]

SOFTMAX: list[Function] = [
    *(lambda x, f=f, d=d: f(x, dim=d) for f in (torch.softmax, torch.log_softmax, F.softmin) for d in (0, 1, -1)),
    lambda x: F.softmax(x, dim=0, dtype=torch.float64),
    lambda x: x.log_softmax(-2),
]
SPREAD: list[Function] = [
    *(lambda x, f=f: f(x) for f in (torch.var, torch.std)),
    *(lambda x, f=f: f(x)[0] * f(x)[1] for f in (torch.var_mean, torch.std_mean)),
    *(lambda x, f=f, d=d: f(x, dim=d) for f in (torch.var, torch.std) for d in (0, -1, (0, 1))),
    lambda x: x.var(0, unbiased=False),
    lambda x: x.var(False),
    lambda x: x.std(1, keepdim=True, correction=0),
    lambda x: torch.var_mean(x, dim=0, keepdim=True)[1],
]
NORMS: list[Function] = [
    *(
        lambda x, o=o, d=d: torch.linalg.vector_norm(x, o, d)
        for o in (1, 2, 3, float("inf"), float("-inf"))
        for d in (None, 0, 1)
    ),
    lambda x: torch.linalg.vector_norm(x, 0, 1).detach(),  # a count: its gradient is zero
    lambda x: x.norm(),
    lambda x: x.norm(p=1, dim=0, keepdim=True),
    lambda x: torch.norm(x, 3, dim=1),
    lambda x: torch.norm(x * 0.0),  # a zero gradient, not NaN
    lambda x: torch.logsumexp(x, 0),
    lambda x: torch.logsumexp(x * 1000.0, dim=(0, 1)),  # does not overflow
    lambda x: x.logsumexp(-1, keepdim=True),
]
SHAPES: list[Function] = [
    lambda x: x.sum(0, keepdim=True).expand_as(x),
    lambda x: torch.broadcast_to(x, (2, *x.shape)),
    lambda x: torch.broadcast_tensors(x, x.sum(0, keepdim=True))[1] * x,
    lambda x: x.view_as(x) * x.reshape_as(x),
    lambda x: x.t().flatten().view(x.shape[1], -1) @ x,
]


def randn(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def distribute(whole: Tensor, placement: Placement) -> tuple[Tensor, sw.DTensor]:
    """Return a local tensor that requires grad, and its DTensor."""
    mesh = sw.init_device_mesh("cpu", (comm.world().size,))
    if placement.is_partial():
        local = whole * (comm.world().rank + 1) * (1 / 6)
    else:
        local = sw.distribute_tensor(whole, mesh, [placement]).to_local().clone()
    local.requires_grad_()
    return local, sw.DTensor.from_local(local, mesh, [placement], shape=whole.shape)


def compare(functions: list[Function], shape: tuple[int, ...], placement: Placement) -> None:
    for number, function in enumerate(functions):
        what = f"function {number} of {shape} {placement}"
        whole = randn(shape).requires_grad_()
        expected = function(whole)
        _, x = distribute(whole.detach(), placement)
        found = function(x)
        torch.testing.assert_close(found.full_tensor(), expected, rtol=1e-11, atol=1e-11, equal_nan=True, msg=what)
        if not expected.requires_grad or not torch.isfinite(expected).all():
            continue
        (theirs,) = torch.autograd.grad((expected.sin()).sum(), whole)
        (ours,) = torch.autograd.grad(found.sin().sum(), x)
        torch.testing.assert_close(
            ours.full_tensor(),
            theirs,
            rtol=1e-10,
            atol=1e-10,
            msg=what,
        )  # type: ignore[attr-defined]  # a DTensor


def body(functions: list[Function]) -> None:
    for shape in ((7, 5), (4, 2), (1, 4)):
        placements: list[Placement] = [Replicate(), Shard(0), Shard(1), Partial(), Ragged(0, (shape[0] - 1, 0, 1))]
        for placement in placements:
            compare(functions, shape, placement)


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("functions", [SOFTMAX, SPREAD, NORMS, SHAPES], ids=["softmax", "spread", "norms", "shapes"])
def test_composed_operators_match_torch(functions: list[Function]) -> None:
    run_ranks(3, body, functions)


def test_softmax_sharded_over_both_dimensions_of_a_mesh() -> None:
    def on_mesh() -> None:
        mesh = sw.init_device_mesh("cpu", (2, 2))
        whole = randn((5, 3))
        for placements in product((Replicate(), Shard(0), Shard(1)), repeat=2):
            x = sw.distribute_tensor(whole, mesh, placements).requires_grad_()
            plain = whole.clone().requires_grad_()
            for dim in (0, 1):
                ours, theirs = torch.softmax(x, dim), torch.softmax(plain, dim)
                torch.testing.assert_close(
                    ours.full_tensor(),
                    theirs,
                    rtol=1e-12,
                    atol=1e-12,
                )  # type: ignore[attr-defined]  # a DTensor
                (gradient,) = torch.autograd.grad(ours.sin().sum(), x)
                (expected,) = torch.autograd.grad(theirs.sin().sum(), plain)
                torch.testing.assert_close(
                    gradient.full_tensor(),
                    expected,
                    rtol=1e-12,
                    atol=1e-12,
                )  # type: ignore[attr-defined]  # a DTensor

    run_ranks(4, on_mesh)
