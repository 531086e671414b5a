"""Factories: every rank creates only its local part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from shardwright.errors import ArgumentTypeError, TensorError, UnsupportedError
from shardwright.layout import Layout
from shardwright.tensor.api.dtensor import DTensor
from shardwright.tensor.api.from_local import bound_mesh, one_mesh
from shardwright.tensor.base.gradient_types import REPLICATE
from shardwright.tensor.base.tagging import local_region, local_size, tag
from shardwright.tensor.random import permutation
from shardwright.tensor.random.local import next_key

__all__ = ["FactoryOptions", "empty", "full", "normal", "ones", "rand", "randint", "randn", "randperm", "zeros"]


class FactoryOptions(TypedDict, total=False):
    """The keyword arguments of the factories.

    `mesh` (or `device_mesh`, torch's name) defaults to that of the enclosing `with mesh:`, else to all ranks in one
    dimension; `placements` to replicated; `device` to the mesh's. `dtype` and `requires_grad` are torch's, and so is
    `layout`, which can only be `torch.strided`.

    >>> import shardwright as sw
    >>> rows: sw.tensor.FactoryOptions = {"device_mesh": sw.init_device_mesh("cpu", (1,)), "placements": [sw.Shard(0)]}
    >>> print(sw.zeros(2, 3, **rows).sharding)
    [2, 3] (0: S(0))
    """

    mesh: Any
    device_mesh: Any
    placements: Sequence[object] | None
    dtype: torch.dtype | None
    device: Any
    layout: torch.layout
    requires_grad: bool


_KNOWN = frozenset(FactoryOptions.__annotations__)


def _make(fill: Callable[..., Tensor], size: Sequence[Any], how: FactoryOptions) -> DTensor:
    unknown = how.keys() - _KNOWN
    if unknown:
        raise ArgumentTypeError(
            f"factories take {', '.join(sorted(_KNOWN))} by keyword, not {', '.join(sorted(unknown))}"
        )
    if how.get("layout", torch.strided) is not torch.strided:
        raise UnsupportedError(f"layout={how['layout']}: a DTensor is strided; sparse layouts are not available")
    shape = size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size
    mesh = one_mesh("a factory", how.get("mesh"), how.get("device_mesh"))
    placements, device = how.get("placements"), how.get("device")
    bound = bound_mesh(mesh)
    layout = Layout(bound, [REPLICATE] * bound.ndim if placements is None else placements, shape)
    if device is None:
        device = getattr(mesh, "device_type", None)
    made: DTensor = tag(fill(local_size(layout), dtype=how.get("dtype"), device=device), layout)
    made.requires_grad = how.get("requires_grad", False)
    return made


def zeros(*size: Any, **how: Unpack[FactoryOptions]) -> DTensor:
    """Return a DTensor of zeros; see `FactoryOptions` for the keywords.

    >>> import shardwright as sw
    >>> sw.zeros(2, 3, mesh=sw.init_device_mesh("cpu", (1,)), placements=[sw.Shard(0)]).sum().item()
    0.0
    """
    return _make(torch.zeros, size, how)


def ones(*size: Any, **how: Unpack[FactoryOptions]) -> DTensor:
    """Return a DTensor of ones; under `Partial`, every partial value is one.

    >>> import shardwright as sw
    >>> sw.ones(2, 3, mesh=sw.init_device_mesh("cpu", (1,))).sum().item()
    6.0
    """
    return _make(torch.ones, size, how)


def empty(*size: Any, **how: Unpack[FactoryOptions]) -> DTensor:
    """Return an uninitialized DTensor.

    >>> import shardwright as sw
    >>> sw.empty(2, 3, mesh=sw.init_device_mesh("cpu", (1,))).shape
    torch.Size([2, 3])
    """
    return _make(torch.empty, size, how)


def full(size: Sequence[int], fill_value: Any, **how: Unpack[FactoryOptions]) -> DTensor:
    """Return a DTensor filled with `fill_value`; under `Partial`, every partial value is.

    >>> import shardwright as sw
    >>> sw.full((2, 3), 0.5, mesh=sw.init_device_mesh("cpu", (1,))).sum().item()
    3.0
    """

    def fill(shape: Sequence[int], *, dtype: torch.dtype | None, device: Any) -> Tensor:
        return torch.full(tuple(shape), fill_value, dtype=dtype, device=device)

    return _make(fill, (size,), how)


def _draw(name: str, size: Sequence[Any], how: FactoryOptions, fill: Callable[[DTensor], object]) -> DTensor:
    """Return a DTensor filled with random numbers; partial layouts raise, since the values would add up to others."""
    made = _make(torch.empty, size, {**how, "requires_grad": False})
    if made.sharding.is_partial:
        raise TensorError(
            f"{name}: {made.sharding} is partial, but the sum of random partial values has another distribution: use "
            "Replicate() or Shard(dim), and redistribute afterwards"
        )
    fill(made)
    made.requires_grad = how.get("requires_grad", False)
    return made


def rand(*size: Any, **how: Unpack[FactoryOptions]) -> DTensor:
    """Return uniform random numbers in [0, 1), the same for every layout and number of ranks.

    >>> import shardwright as sw
    >>> sw.manual_seed(0)
    >>> sw.rand(3, mesh=sw.init_device_mesh("cpu", (1,))).to_local()
    tensor([0.2117, 0.3332, 0.1760])
    """
    return _draw("rand", size, how, lambda made: made.uniform_())


def randn(*size: Any, **how: Unpack[FactoryOptions]) -> DTensor:
    """Return standard normal random numbers, the same for every layout and number of ranks.

    >>> import shardwright as sw
    >>> sw.manual_seed(0)
    >>> sw.randn(3, mesh=sw.init_device_mesh("cpu", (1,)), placements=[sw.Shard(0)]).to_local()
    tensor([0.8912, 0.5441, 0.4056])
    """
    return _draw("randn", size, how, lambda made: made.normal_())


def normal(mean: float, std: float, size: Sequence[int], **how: Unpack[FactoryOptions]) -> DTensor:
    """Return normal random numbers of this mean and standard deviation, the same for every layout and number of ranks.

    >>> import shardwright as sw
    >>> sw.normal(2.0, 0.0, (3,), mesh=sw.init_device_mesh("cpu", (1,))).to_local()
    tensor([2., 2., 2.])
    """
    return _draw("normal", (size,), how, lambda made: made.normal_(mean, std))


def randint(low: int, high: int, size: Sequence[int], **how: Unpack[FactoryOptions]) -> DTensor:
    """Return random integers in [low, high), int64 by default, the same for every layout and number of ranks.

    >>> import shardwright as sw
    >>> sw.randint(5, 6, (3,), mesh=sw.init_device_mesh("cpu", (1,))).to_local()
    tensor([5, 5, 5])
    """
    how["dtype"] = how.get("dtype") or torch.int64
    return _draw("randint", (size,), how, lambda made: made.random_(low, high))


def randperm(n: int, **how: Unpack[FactoryOptions]) -> DTensor:
    """Return a random permutation of 0 to n - 1, the same for every layout and number of ranks.

    >>> import shardwright as sw
    >>> sorted(sw.randperm(3, mesh=sw.init_device_mesh("cpu", (1,)), placements=[sw.Shard(0)]).tolist())
    [0, 1, 2]
    """

    def fill(made: DTensor) -> None:
        key = next_key(made.sharding.mesh)
        order = permutation(n, key.seed, key.offset)[local_region(made.sharding).slices()]
        made.copy_(tag(order, made.sharding))

    how["dtype"] = how.get("dtype") or torch.int64
    return _draw("randperm", (n,), how, fill)
