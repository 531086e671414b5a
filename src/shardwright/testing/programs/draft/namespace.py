"""The names that a program may use: once for plain tensors, once for DTensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from shardwright import comm
from shardwright.layout import Layout, Mesh, Partial, Placement, Ragged, Replicate, Shard
from shardwright.tensor import DTensor, distribute_tensor

__all__ = ["KEPT", "plain_namespace", "sharded_namespace"]

KEPT = "kept"  # the gradients that hooks have seen: lists of tensors by name


class Scale(torch.autograd.Function):
    """Multiply by a number, with a backward written by hand.

    >>> Scale.apply(torch.ones(2), 3)
    tensor([3., 3.])
    """

    __module__ = "program"  # like a user's function: shardwright's own run on local tensors

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.factor, None


class AddBias(torch.autograd.Function):
    """Add a row to every row; its gradient is summed over the other dimensions by hand.

    >>> AddBias.apply(torch.zeros(1, 2), torch.ones(2))
    tensor([[1., 1.]])
    """

    __module__ = "program"

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        ctx.ndim = x.ndim
        return x + bias

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, gradient.sum(tuple(range(ctx.ndim - 1)))


def _common() -> dict[str, Any]:
    recorded: dict[str, list[Tensor]] = {}

    def keep(name: str) -> Callable[..., None]:
        """Return a hook that keeps the gradients it sees under `name`."""

        def hook(*values: Any) -> None:
            recorded.setdefault(name, []).extend(_tensors_in(values))

        return hook

    def linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
        """Return a linear layer with these parameters."""
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
        layer.weight = nn.Parameter(weight)
        if bias is not None:
            layer.bias = nn.Parameter(bias)
        return layer

    return {
        "AddBias": AddBias,
        "F": functional,
        "Partial": Partial,
        "Ragged": Ragged,
        "Replicate": Replicate,
        "Scale": Scale,
        "Shard": Shard,
        "checkpoint": checkpoint,
        "copy": copy,
        "keep": keep,
        "linear": linear,
        "nn": nn,
        "torch": torch,
        KEPT: recorded,
    }


def _tensors_in(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values.detach().clone()]
    if isinstance(values, list | tuple):
        return [tensor for value in values for tensor in _tensors_in(value)]
    return []


def plain_namespace() -> dict[str, Any]:
    """Return the names for plain tensors: placements are ignored.

    >>> plain_namespace()["leaf"]([1, 2], (2,), torch.float32, [Shard(0)])
    tensor([1., 2.])
    """

    def leaf(
        values: Sequence[float],
        shape: Sequence[int],
        dtype: torch.dtype,
        placements: Sequence[Placement],
        *,
        order: Sequence[int] | None = None,
        requires_grad: bool = False,
    ) -> Tensor:
        del placements, order
        return _full_tensor(values, shape, dtype).requires_grad_(requires_grad)

    def redistribute(x: Tensor, placements: Sequence[Placement]) -> Tensor:
        del placements
        return x.clone(memory_format=torch.contiguous_format)  # as a redistributed tensor is

    return _common() | {"leaf": leaf, "redistribute": redistribute}


def sharded_namespace(mesh: tuple[int, ...]) -> dict[str, Any]:
    """Return the names for DTensors on a mesh of this shape.

    >>> sharded_namespace((1,))["leaf"]([1, 2], (2,), torch.float32, [Shard(0)])
    DTensor([2] (0: S(0)), float32, local on rank 0: tensor([1., 2.]))
    """
    grid = Mesh(mesh)

    def leaf(
        values: Sequence[float],
        shape: Sequence[int],
        dtype: torch.dtype,
        placements: Sequence[Placement],
        *,
        order: Sequence[int] | None = None,
        requires_grad: bool = False,
    ) -> Tensor:
        full = _full_tensor(values, shape, dtype)
        layout = Layout(grid, placements, shape, order)
        if layout.is_partial:
            local = _partial_value(full[layout.region(comm.rank()).slices()], layout, comm.rank())
            with torch.no_grad():
                tensor = DTensor.from_local(local, grid, placements, shape=shape).clone()
        else:
            tensor = distribute_tensor(full, grid, placements, order=order, src_data_rank=None)
        return tensor.requires_grad_(requires_grad)

    def redistribute(x: DTensor, placements: Sequence[Placement]) -> Tensor:
        return x.redistribute(placements=placements).clone(memory_format=torch.contiguous_format)

    return _common() | {"leaf": leaf, "redistribute": redistribute}


def _full_tensor(values: Sequence[float], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, dtype=dtype).reshape(tuple(shape)).clone()  # a view would not be a leaf


def _partial_value(full: Tensor, layout: Layout, rank: int) -> Tensor:
    """Return a rank's partial value; they differ between the ranks and reduce to `full`."""
    mesh = layout.mesh
    for dim, placement in enumerate(layout.placements):
        if not isinstance(placement, Partial):
            continue
        index, count = mesh.coordinate(rank)[dim], mesh.shape[dim]
        match placement.op:
            case "sum":  # the first rank has the rest when the others have 1, 2, …
                full = full - sum(range(1, count)) if index == 0 else torch.full_like(full, index)
            case "avg":  # offsets that sum to zero
                full = full - sum(range(1, count)) if index == 0 else full + index
            case "max":  # the last rank decides
                full = full - (count - 1 - index)
            case "min":
                full = full + (count - 1 - index)
            case other:
                raise ValueError(f"Partial({other!r}) is not generated")
    return full.clone()
