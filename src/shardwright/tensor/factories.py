"""New DTensors: every rank makes its own part, and no rank the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright import comm
from shardwright.errors import TensorError
from shardwright.layout import Layout
from shardwright.tensor.boundary import default_mesh
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.local import local_region, tag
from shardwright.tensor.random import permutation
from shardwright.tensor.randomness import next_key
from shardwright.tensor.types import REPLICATE

__all__ = ["empty", "full", "normal", "ones", "rand", "randint", "randn", "randperm", "zeros"]


def _make(
    fill: Callable[..., Tensor],
    size: Sequence[Any],
    mesh: Any,
    placements: Sequence[object] | None,
    dtype: torch.dtype | None,
    device: Any,
    requires_grad: bool,
) -> DTensor:
    shape = size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size
    bound = default_mesh() if mesh is None else comm.bind(mesh)
    layout = Layout(bound, [REPLICATE] * bound.ndim if placements is None else placements, shape)
    if device is None and mesh is not None:
        device = getattr(mesh, "device_type", None)
    local = fill(local_region(layout).size, dtype=dtype, device=device)
    return tag(local, layout).requires_grad_(requires_grad)  # type: ignore[no-any-return]  # tag gives a DTensor


def zeros(
    *size: Any,
    mesh: Any = None,
    placements: Sequence[object] | None = None,
    dtype: torch.dtype | None = None,
    device: Any = None,
    requires_grad: bool = False,
) -> DTensor:
    """A DTensor of zeros.

    >>> import shardwright as sw
    >>> sw.zeros(2, 3, mesh=sw.init_device_mesh("cpu", (1,)), placements=[sw.Shard(0)]).sum().item()
    0.0
    """
    return _make(torch.zeros, size, mesh, placements, dtype, device, requires_grad)


def ones(
    *size: Any,
    mesh: Any = None,
    placements: Sequence[object] | None = None,
    dtype: torch.dtype | None = None,
    device: Any = None,
    requires_grad: bool = False,
) -> DTensor:
    """A DTensor of ones; under `Partial`, of addends that are one.

    >>> import shardwright as sw
    >>> sw.ones(2, 3, mesh=sw.init_device_mesh("cpu", (1,))).sum().item()
    6.0
    """
    return _make(torch.ones, size, mesh, placements, dtype, device, requires_grad)


def empty(
    *size: Any,
    mesh: Any = None,
    placements: Sequence[object] | None = None,
    dtype: torch.dtype | None = None,
    device: Any = None,
    requires_grad: bool = False,
) -> DTensor:
    """A DTensor whose values are not set.

    >>> import shardwright as sw
    >>> sw.empty(2, 3, mesh=sw.init_device_mesh("cpu", (1,))).shape
    torch.Size([2, 3])
    """
    return _make(torch.empty, size, mesh, placements, dtype, device, requires_grad)


def full(
    size: Sequence[int],
    fill_value: Any,
    *,
    mesh: Any = None,
    placements: Sequence[object] | None = None,
    dtype: torch.dtype | None = None,
    device: Any = None,
    requires_grad: bool = False,
) -> DTensor:
    """A DTensor of one value; under `Partial`, of addends that have it.

    >>> import shardwright as sw
    >>> sw.full((2, 3), 0.5, mesh=sw.init_device_mesh("cpu", (1,))).sum().item()
    3.0
    """

    def fill(shape: Sequence[int], *, dtype: torch.dtype | None, device: Any) -> Tensor:
        return torch.full(tuple(shape), fill_value, dtype=dtype, device=device)

    return _make(fill, (size,), mesh, placements, dtype, device, requires_grad)


def _blank(
    name: str,
    size: Sequence[Any],
    mesh: Any,
    placements: Sequence[object] | None,
    dtype: torch.dtype | None,
    device: Any,
) -> DTensor:
    """A tensor to fill with random numbers: whole numbers, not addends, which would add up to something else."""
    made = empty(*size, mesh=mesh, placements=placements, dtype=dtype, device=device)
    if made.sharding.is_partial:
        raise TensorError(
            f"{name}: {made.sharding} is partial: random addends do not add up to the numbers asked for. Make it "
            "Replicate() or Shard(dim), and redistribute afterwards"
        )
    return made


def rand(
    *size: Any,
    mesh: Any = None,
    placements: Sequence[object] | None = None,
    dtype: torch.dtype | None = None,
    device: Any = None,
    requires_grad: bool = False,
) -> DTensor:
    """Uniform numbers of [0, 1): the same for every layout and number of ranks.

    >>> import shardwright as sw
    >>> sw.manual_seed(0)
    >>> sw.rand(3, mesh=sw.init_device_mesh("cpu", (1,))).to_local()
    tensor([0.2117, 0.3332, 0.1760])
    """
    made = _blank("rand", size, mesh, placements, dtype, device)
    made.uniform_()
    made.requires_grad = requires_grad
    return made


def randn(
    *size: Any,
    mesh: Any = None,
    placements: Sequence[object] | None = None,
    dtype: torch.dtype | None = None,
    device: Any = None,
    requires_grad: bool = False,
) -> DTensor:
    """Normal numbers of mean 0 and standard deviation 1: the same for every layout and number of ranks.

    >>> import shardwright as sw
    >>> sw.manual_seed(0)
    >>> sw.randn(3, mesh=sw.init_device_mesh("cpu", (1,)), placements=[sw.Shard(0)]).to_local()
    tensor([0.8912, 0.5441, 0.4056])
    """
    made = _blank("randn", size, mesh, placements, dtype, device)
    made.normal_()
    made.requires_grad = requires_grad
    return made


def normal(
    mean: float,
    std: float,
    size: Sequence[int],
    *,
    mesh: Any = None,
    placements: Sequence[object] | None = None,
    dtype: torch.dtype | None = None,
    device: Any = None,
    requires_grad: bool = False,
) -> DTensor:
    """Normal numbers of this mean and standard deviation: the same for every layout and number of ranks.

    >>> import shardwright as sw
    >>> sw.normal(2.0, 0.0, (3,), mesh=sw.init_device_mesh("cpu", (1,))).to_local()
    tensor([2., 2., 2.])
    """
    made = _blank("normal", (size,), mesh, placements, dtype, device)
    made.normal_(mean, std)
    made.requires_grad = requires_grad
    return made


def randint(
    low: int,
    high: int,
    size: Sequence[int],
    *,
    mesh: Any = None,
    placements: Sequence[object] | None = None,
    dtype: torch.dtype | None = None,
    device: Any = None,
) -> DTensor:
    """Integers of [low, high), int64 unless told otherwise: the same for every layout and number of ranks.

    >>> import shardwright as sw
    >>> sw.randint(5, 6, (3,), mesh=sw.init_device_mesh("cpu", (1,))).to_local()
    tensor([5, 5, 5])
    """
    made = _blank("randint", (size,), mesh, placements, dtype or torch.int64, device)
    made.random_(low, high)
    return made


def randperm(
    n: int,
    *,
    mesh: Any = None,
    placements: Sequence[object] | None = None,
    dtype: torch.dtype | None = None,
    device: Any = None,
) -> DTensor:
    """The numbers 0 to n - 1 in random order: the same for every layout and number of ranks.

    >>> import shardwright as sw
    >>> sorted(sw.randperm(3, mesh=sw.init_device_mesh("cpu", (1,)), placements=[sw.Shard(0)]).tolist())
    [0, 1, 2]
    """
    made = _blank("randperm", (n,), mesh, placements, dtype or torch.int64, device)
    key = next_key(made.sharding.mesh)
    order = permutation(n, key.seed, key.offset)[local_region(made.sharding).slices()]
    made.copy_(tag(order, made.sharding))
    return made
