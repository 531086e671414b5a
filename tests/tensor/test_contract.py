"""Gradients and second gradients of every redistribution match those of a single device.

Everything is float64 and agrees to 1e-12. Sizes are not divisible by the mesh: shards are uneven, some are empty.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright import comm
from shardwright.layout import Partial, Placement, Replicate, Shard
from shardwright.testing import run_ranks

R, P = Replicate(), Partial()
ROWS, COLUMNS = Shard(0), Shard(1)
# Redistributions that users ask for, as the design's table has them: (from, to).
TABLE: list[tuple[Placement, Placement]] = [
    (R, ROWS),
    (COLUMNS, R),
    (P, R),
    (P, ROWS),
    (ROWS, COLUMNS),
    (R, P),
    (ROWS, P),
    (R, R),
    (P, P),
]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def placed(whole: Tensor, mesh: Any, placements: tuple[Placement, ...]) -> sw.DTensor:
    """Return a DTensor of this value that requires grad; its partial values differ between ranks."""
    settled = [R if p.is_partial() else p for p in placements]
    local = sw.distribute_tensor(whole, mesh, settled).to_local().clone()
    for mesh_dim, placement in enumerate(placements):
        if placement.is_partial():
            here, ranks = mesh.get_coordinate()[mesh_dim], mesh.shape[mesh_dim]
            local = local * (here + 1) * (2 / (ranks * (ranks + 1)))
    return sw.DTensor.from_local(local.requires_grad_(), mesh, placements, shape=whole.shape)


def twice(function: Callable[..., Tensor], inputs: list[Tensor], weights: list[Any]) -> list[Tensor]:
    """Return the gradients of a function, and those of a weighted sum of them."""
    first = torch.autograd.grad(function(*inputs), inputs, create_graph=True)
    total = sum((gradient * weight).sin().sum() for gradient, weight in zip(first, weights, strict=True))
    return [*first, *torch.autograd.grad(total, inputs)]


def check(
    function: Callable[..., Tensor], wholes: list[Tensor], mesh: Any, placements: list[tuple[Placement, ...]], what: str
) -> None:
    weights = [randn(*whole.shape, seed=9) for whole in wholes]
    expected = twice(function, [whole.clone().requires_grad_() for whole in wholes], weights)
    inputs = [placed(whole, mesh, p) for whole, p in zip(wholes, placements, strict=True)]
    found = twice(function, inputs, [sw.distribute_tensor(weight, mesh) for weight in weights])
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        input_placements = placements[number % len(placements)]
        assert isinstance(ours, sw.DTensor)
        assert ours.placements == tuple(R if p.is_partial() else p for p in input_placements), what
        torch.testing.assert_close(ours.full_tensor(), theirs, rtol=1e-12, atol=1e-12, msg=lambda m: f"{what}: {m}")


def mesh_of(*shape: int) -> Any:
    return sw.init_device_mesh("cpu", shape)


def moved(target: tuple[Placement, ...]) -> Callable[[Tensor], Tensor]:
    """A non-linear function of a tensor with a redistribution inside."""

    def function(x: Tensor) -> Tensor:
        y = x.sin() if not isinstance(x, sw.DTensor) or not x.sharding.is_partial else x * 1.5
        y = y.redistribute(placements=target) if isinstance(y, sw.DTensor) else y
        return (y.sin() * (y + y)).sum()

    return function


def linear_before(x: Tensor) -> Tensor:
    return ((x * 1.5).sin() * (x * 3.0)).sum()


def check_rows(shape: tuple[int, ...]) -> None:
    mesh, whole = mesh_of(*shape), randn(6, 5)
    pairs = list(product(TABLE, repeat=len(shape)))
    for rows in pairs:
        source, target = tuple(row[0] for row in rows), tuple(row[1] for row in rows)
        what = f"{source} -> {target} on {shape}"
        if P in source:
            # A sum is moved before anything that is not linear, on both sides alike.
            weights = [randn(6, 5, seed=9)]
            expected = twice(linear_before, [whole.clone().requires_grad_()], weights)
            found = twice(moved(target), [placed(whole, mesh, source)], [sw.distribute_tensor(weights[0], mesh)])
            for ours, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(ours.full_tensor(), theirs, rtol=1e-12, atol=1e-12, msg=what)  # type: ignore[attr-defined]  # a DTensor
        else:
            check(moved(target), [whole], mesh, [source], what)


def test_gradients_of_every_redistribution_on_one_mesh_dimension() -> None:
    run_ranks(4, check_rows, (4,))


def test_gradients_of_every_pair_of_redistributions_on_two_mesh_dimensions() -> None:
    run_ranks(4, check_rows, (2, 2))


def product_of(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).sin().sum()


def test_operands_of_a_product_get_the_gradients_of_a_single_device() -> None:
    """`x[S(0)] @ w[R]` is R → Re, `x[S(0)] @ w[S(0)]` is S → Re; and all other placements of the two."""

    def body() -> None:
        wholes = [randn(6, 5), randn(5, 3, seed=1)]
        every: list[Placement] = [R, P, ROWS, COLUMNS]
        line = mesh_of(4)
        for x, w in product(every, repeat=2):
            check(product_of, wholes, line, [(x,), (w,)], f"x {x} @ w {w}")
        square = mesh_of(2, 2)
        for x, w in [
            ((ROWS, R), (R, COLUMNS)),
            ((ROWS, COLUMNS), (R, ROWS)),
            ((ROWS, R), (ROWS, COLUMNS)),
            ((ROWS, R), (ROWS, ROWS)),
            ((ROWS, ROWS), (R, R)),
            ((P, ROWS), (R, ROWS)),
            ((R, R), (P, R)),
            ((R, R), (R, R)),
        ]:
            check(product_of, wholes, square, [x, w], f"x {x} @ w {w}")

    run_ranks(4, body)


def reductions(traffic: comm.Traffic) -> int:
    """Return the number of sums over ranks: an all-reduce may consist of a reduce-scatter and an all-gather."""
    return traffic.calls["all_reduce"] + traffic.calls["reduce_scatter"]


def test_a_parameter_used_several_times_in_a_step_is_reduced_once() -> None:
    def body() -> int:
        mesh = mesh_of(4)
        x = sw.distribute_tensor(randn(6, 5), mesh, [Shard(0)])
        w = nn.Parameter(sw.distribute_tensor(randn(5, 5, seed=1), mesh))
        loss = ((x @ w).sin() @ w + nn.functional.linear(x, w)).sum()
        with comm.count() as traffic:
            loss.backward()
        plain, weight = randn(6, 5), randn(5, 5, seed=1).requires_grad_()
        ((plain @ weight).sin() @ weight + nn.functional.linear(plain, weight)).sum().backward()
        torch.testing.assert_close(w.grad.full_tensor(), weight.grad, rtol=1e-12, atol=1e-12)
        return reductions(traffic)

    assert run_ranks(4, body) == [1] * 4


def test_a_sharded_parameter_gathered_for_several_uses_is_reduced_once() -> None:
    """Fully sharded training: gathered once, used twice, one reduce-scatter."""

    def body() -> tuple[Any, Any]:
        mesh = mesh_of(4)
        x = sw.distribute_tensor(randn(8, 4), mesh, [Shard(0)])
        w = nn.Parameter(sw.distribute_tensor(randn(4, 4, seed=1), mesh, [Shard(0)]))
        with comm.count() as forward:
            loss = ((x @ w).sin() @ w).sum()
        with comm.count() as backward:
            loss.backward()
        plain, weight = randn(8, 4), randn(4, 4, seed=1).requires_grad_()
        ((plain @ weight).sin() @ weight).sum().backward()
        torch.testing.assert_close(w.grad.full_tensor(), weight.grad, rtol=1e-12, atol=1e-12)
        return dict(forward.calls), dict(backward.calls)

    for forward, backward in run_ranks(4, body):
        assert forward == {"all_gather": 1}
        assert backward == {"reduce_scatter": 1}


def test_deferred_gradients_are_reduced_once_per_parameter_at_the_end() -> None:
    def body() -> tuple[int, int]:
        mesh = mesh_of(4)
        whole, sharded = randn(4, 4, seed=1), randn(4, 4, seed=2)
        w = nn.Parameter(sw.distribute_tensor(whole, mesh))
        v = nn.Parameter(sw.distribute_tensor(sharded, mesh, [Shard(0)]))
        batches = [randn(8, 4, seed=10 + n) for n in range(3)]
        with comm.count() as all_of_it, sw.defer_gradient_reduction():
            with comm.count() as before:
                for batch in batches:
                    x = sw.distribute_tensor(batch, mesh, [Shard(0)], src_data_rank=None)
                    ((x @ w).sin() @ v).sum().backward()
            assert w.grad is None
        plain_w, plain_v = whole.clone().requires_grad_(), sharded.clone().requires_grad_()
        for batch in batches:
            ((batch @ plain_w).sin() @ plain_v).sum().backward()
        torch.testing.assert_close(w.grad.full_tensor(), plain_w.grad, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(v.grad.full_tensor(), plain_v.grad, rtol=1e-12, atol=1e-12)
        return reductions(before), reductions(all_of_it)

    assert run_ranks(4, body) == [(0, 2)] * 4  # two parameters
