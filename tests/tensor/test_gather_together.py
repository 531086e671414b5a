"""A parameter that belongs to a unit is gathered by its unit wherever an operator needs it gathered."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import shardwright as sw
from shardwright import comm
from shardwright.layout import Replicate, Shard
from shardwright.tensor.base.gradient_types import ENTERED, dual
from shardwright.tensor.base.parameter_use import ParameterUse, set_parameter_use
from shardwright.tensor.base.tagging import no_torch_function
from shardwright.tensor.redistribute.autograd import redistribute_local
from shardwright.testing import on_ranks
from tests.tensor.values import close, line, randn, spread

R = Replicate()


class Unit:
    """A unit that gathers its parameters one by one, keeps them until it is told to release them, and counts."""

    mesh_dims = frozenset({0})

    def __init__(self, *parameters: Any) -> None:
        self.parameters, self.tensors = parameters, None
        self.gathered = self.reduced = self.saved = 0
        for index, parameter in enumerate(parameters):
            set_parameter_use(parameter, ParameterUse(self.mesh_dims))
            parameter.__dict__["_unit"] = (self, index)

    def demand(self, index: int) -> Tensor:
        if self.tensors is None:
            self.tensors = _Gather.apply(self, *self.parameters)
        return self.tensors[index]

    @contextmanager
    def saving(self) -> Iterator[None]:
        self.saved += 1
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            yield

    def layouts(self) -> Iterator[tuple[Any, Any]]:
        for parameter in self.parameters:
            source = parameter.sharding
            yield source, source.replace(placements=[ENTERED, *source.placements[1:]])


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, unit: Unit, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.unit = unit
        unit.gathered += 1
        both = zip(parameters, unit.layouts(), strict=True)
        return tuple(redistribute_local(p.detach(), *layouts) for p, layouts in both)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.unit.reduced += 1
        both = zip(gradients, ctx.unit.layouts(), strict=True)
        with no_torch_function():
            return None, *(redistribute_local(g, dual(target), dual(source)) for g, (source, target) in both)


def parameters(*placements: sw.Placement, mesh: Any = None) -> tuple[list[nn.Parameter], list[Tensor]]:
    plain = [randn(6, 8).requires_grad_(), randn(6, seed=1).requires_grad_()]
    return [nn.Parameter(sw.distribute_tensor(p.detach(), mesh or line(), placements)) for p in plain], plain


@pytest.mark.parametrize("batch", [Shard(0), R])
def test_uses_in_a_step_share_one_gathering_and_one_reduction(batch: sw.Placement) -> None:
    @on_ranks(2)
    def work() -> None:
        (w, b), plain = parameters(Shard(0))
        unit = Unit(w, b)
        for _ in range(2):
            x = spread(randn(4, 8), batch)
            loss = functional.linear(x, w, b).sin().sum() + (x @ w.T).cos().sum() * 0 + functional.linear(x, w).sum()
            loss.backward()
            functional.linear(randn(4, 8), *plain).sin().sum().backward()
            functional.linear(randn(4, 8), plain[0]).sum().backward()
            for mine, other in zip((w, b), plain, strict=True):
                close(mine.grad, other.grad)
            assert (unit.gathered, unit.reduced, unit.saved) == (1, 1, 2)  # w.T has its own shards
            unit.__init__(w, b)
            for parameter in (w, b, *plain):
                parameter.grad = None

    work()


@on_ranks(2)
def test_a_unit_serves_evaluation_without_gradients() -> None:
    (w, b), plain = parameters(Shard(0))
    unit = Unit(w, b)
    with torch.no_grad():
        for batch in (Shard(0), R):
            close(functional.linear(spread(randn(4, 8), batch), w, b), functional.linear(randn(4, 8), *plain).detach())
    assert unit.gathered == 1


@on_ranks(4)
def test_parameters_of_a_unit_stay_sharded_over_other_mesh_dimensions() -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for tensor_parallel in (Shard(0), R):
        (w, b), plain = parameters(Shard(0), tensor_parallel, mesh=mesh)
        unit = Unit(w, b)
        for batch in ([Shard(0), R], [Shard(0), Shard(1)], [R, Shard(1)]):
            x = sw.distribute_tensor(randn(4, 2, 8), mesh, batch)
            functional.linear(x, w, b).sin().sum().backward()
            functional.linear(randn(4, 2, 8), *plain).sin().sum().backward()
            for mine, other in zip((w, b), plain, strict=True):
                close(mine.grad, other.grad)
            assert unit.gathered == unit.reduced == 1
            unit.__init__(w, b)


@on_ranks(2)
def test_operators_on_parameters_alone_do_not_gather_the_unit() -> None:
    (w, b), _ = parameters(Shard(0))
    unit = Unit(w, b)
    optimizer = torch.optim.AdamW([w, b])
    (w.T.norm() + b.sum()).backward()
    with comm.count() as traffic:
        optimizer.step()
    assert not traffic.calls
    assert unit.gathered == 0


@on_ranks(2)
def test_a_compiled_program_asks_the_unit_at_every_call() -> None:
    (w, b), plain = parameters(Shard(0))
    unit = Unit(w, b)
    compiled = sw.compile(lambda x, w, b: functional.linear(x, w, b).sin())
    for seed in range(3):
        unit.tensors = None
        close(
            compiled(spread(randn(4, 8, seed=seed), Shard(0)), w, b),
            functional.linear(randn(4, 8, seed=seed), *plain).sin(),
        )
    assert unit.gathered == 3


@on_ranks(2)
def test_a_copied_parameter_belongs_to_no_unit() -> None:
    (w, b), plain = parameters(Shard(0))
    unit = Unit(w, b)
    for copied in (copy.copy(w), copy.deepcopy(w), nn.Parameter(w)):
        close(functional.linear(spread(randn(4, 8), Shard(0)), copied), functional.linear(randn(4, 8), plain[0]))
    assert unit.gathered == 0
