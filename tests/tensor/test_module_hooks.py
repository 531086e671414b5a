"""Backward hooks of modules see and change gradients as DTensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.errors import MixedTensorsError, TensorError
from shardwright.testing import on_ranks


class Layer(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Any) -> Any:
        return torch.tanh(x @ self.weight)


def value(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def trained(x: Any, weight: Any, seen: list[Any]) -> tuple[Any, Any]:
    layer = Layer(weight)

    def shrink(_: nn.Module, given: Any, taken: Any) -> Any:
        seen.append((tuple(given[0].shape), tuple(taken[0].shape)))
        return tuple(gradient / gradient.norm() for gradient in given)

    layer.register_full_backward_hook(shrink)
    layer.register_full_backward_pre_hook(lambda _, taken: tuple(3 * one / one.norm() for one in taken))
    x.requires_grad_()
    (layer(x * 1) ** 2).sum().backward()
    return x.grad, layer.weight.grad


@pytest.mark.parametrize("placement", [sw.Shard(0), sw.Shard(1), sw.Replicate(), sw.Partial()], ids=str)
@on_ranks(4)
def test_hooks_that_change_gradients_behave_as_in_torch(placement: Any) -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    x, weight = value(7, 4, seed=0), value(4, 3, seed=1)
    expected, theirs = trained(x.clone(), weight.clone(), shapes := [])
    if placement.is_partial():
        spread = sw.DTensor.from_local(x / 4, mesh, [placement])
    else:
        spread = sw.distribute_tensor(x, mesh, [placement])
    found, ours = trained(spread, sw.distribute_tensor(weight, mesh), seen := [])
    assert seen == shapes
    torch.testing.assert_close(found.full_tensor(), expected)
    torch.testing.assert_close(ours.full_tensor(), theirs)


@on_ranks(2)
def test_hook_that_returns_a_plain_shard_raises() -> None:
    mesh = sw.init_device_mesh("cpu", (2,))
    layer = Layer(sw.distribute_tensor(value(4, 3, seed=1), mesh))
    layer.register_full_backward_hook(lambda _, given, taken: tuple(one.to_local() for one in given))
    x = sw.distribute_tensor(value(7, 4, seed=0), mesh, [sw.Shard(0)]).requires_grad_()
    with pytest.raises(MixedTensorsError, match=r"backward hook of a module, for .* returned a plain tensor"):
        layer(x * 1).sum().backward()


@on_ranks(4)
def test_hook_that_returns_another_shape_raises_on_every_rank() -> None:
    """On some ranks the local shape may fit by chance: they would continue alone."""
    mesh = sw.init_device_mesh("cpu", (4,))
    layer = Layer(sw.distribute_tensor(value(4, 3, seed=1), mesh))
    layer.register_full_backward_hook(lambda _, given, taken: tuple(one[:1] for one in given))
    x = sw.distribute_tensor(value(2, 4, seed=0), mesh, [sw.Shard(0)]).requires_grad_()
    y = x * 1
    y.register_hook(lambda gradient: gradient[:1])
    for loss in (layer(x * 1).sum(), y.sum()):
        with pytest.raises(TensorError, match="the shapes must be the same"):
            loss.backward()


def test_hooks_of_plain_modules_are_unchanged() -> None:
    layer, seen = nn.Linear(3, 2), []
    layer.register_full_backward_hook(lambda _, given, taken: seen.append((type(given[0]), type(taken[0]))))
    layer(torch.ones(4, 3, requires_grad=True)).sum().backward()
    assert seen == [(Tensor, Tensor)]
