"""Convert between PyTorch's DTensor and ours: sharing local memory, on the same mesh, without communication.

Placements mean the same in both. PyTorch's `_StridedShard`, for a mesh dimension further right that shards first,
corresponds to the `order` of our layout.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor as TheirShardedTensor
from torch.distributed.tensor import DTensor as TheirDTensor
from torch.distributed.tensor import Partial as TheirPartial
from torch.distributed.tensor import Replicate as TheirReplicate
from torch.distributed.tensor import Shard as TheirShard
from torch.distributed.tensor.placement_types import Placement as TheirPlacement
from torch.distributed.tensor.placement_types import _StridedShard

from shardwright import comm
from shardwright.errors import ArgumentTypeError, LayoutError, LocalTensorError, UnsupportedError
from shardwright.interop.tensors.sharded import from_torch_sharded_tensor
from shardwright.layout import Layout, Partial, Shard
from shardwright.tensor import DTensor
from shardwright.tensor.base.tagging import alias, local_region, tag

__all__ = ["from_torch_dtensor", "to_shardwright", "to_torch_dtensor"]


def to_torch_dtensor(x: DTensor) -> TheirDTensor:
    """Convert a DTensor to PyTorch's, sharing local memory, without communication. Differentiable.

    Raise `UnsupportedError` for a layout with `Ragged`, or with an order that PyTorch cannot express.

    >>> import shardwright as sw
    >>> x = sw.ones(4, 2, mesh=sw.init_device_mesh("cpu", (1,)), placements=[sw.Shard(0)])
    >>> made = to_torch_dtensor(x)
    >>> made.placements, made.to_local().data_ptr() == x.to_local().data_ptr()
    ((Shard(dim=0),), True)
    """
    if not isinstance(x, DTensor):
        raise ArgumentTypeError(f"to_torch_dtensor: expected a shardwright DTensor, got {type(x).__name__}")
    layout = x.sharding
    placements = [_to_placement(layout, mesh_dim) for mesh_dim in range(layout.mesh.ndim)]
    try:
        is_expressible = Layout(layout.mesh, placements, layout.shape) is layout
    except LayoutError:
        is_expressible = False
    if not is_expressible:
        raise UnsupportedError(
            f"to_torch_dtensor: PyTorch cannot express the order of shardings in {layout}: redistribute it to a "
            "layout whose mesh dimensions apply from left to right"
        )
    result: TheirDTensor = TheirDTensor.from_local(
        x.to_local(), x.device_mesh, placements, run_check=False, shape=torch.Size(layout.shape), stride=x.stride()
    )
    return result


def from_torch_dtensor(x: TheirDTensor) -> DTensor:
    """Convert PyTorch's DTensor to ours, sharing local memory, without communication. Differentiable.

    >>> import shardwright as sw
    >>> theirs = to_torch_dtensor(sw.ones(3, mesh=sw.init_device_mesh("cpu", (1,)), placements=[sw.Shard(0)]))
    >>> print(from_torch_dtensor(theirs).sharding)
    [3] (0: S(0))
    """
    if not isinstance(x, TheirDTensor):
        raise ArgumentTypeError(f"from_torch_dtensor: expected PyTorch's DTensor, got {type(x).__name__}")
    layout = Layout(comm.bind(x.device_mesh), x.placements, x.shape)
    local: torch.Tensor = x.to_local()
    expected = local_region(layout).size
    if tuple(local.shape) != expected:
        if comm.rank() in layout.mesh:
            raise LocalTensorError(
                f"rank {comm.rank()}: PyTorch's DTensor {list(x.shape)} with {x.placements} has a local tensor of "
                f"shape {tuple(local.shape)}, expected {expected} for {layout}"
            )
        local = local.new_empty(expected)  # outside the mesh PyTorch's empty tensor has another shape
    result: DTensor = tag(alias(local), layout)
    return result


def to_shardwright(value: Any) -> Any:
    """Convert PyTorch's DTensor or ShardedTensor to ours, sharing memory; return other values unchanged.

    >>> to_shardwright(3)
    3
    """
    if isinstance(value, TheirDTensor):
        return from_torch_dtensor(value)
    if isinstance(value, TheirShardedTensor):
        return from_torch_sharded_tensor(value)
    return value


def _to_placement(layout: Layout, mesh_dim: int) -> TheirPlacement:
    match layout.placements[mesh_dim]:
        case Shard(dim=dim):
            sharding = layout.cut_by(dim)
            before = [outer for outer in sharding[: sharding.index(mesh_dim)] if outer > mesh_dim]
            factor = prod(layout.mesh.shape[outer] for outer in before)
            return _StridedShard(dim, split_factor=factor) if factor > 1 else TheirShard(dim)
        case Partial(op=op):
            return TheirPartial(op)
        case placement if placement.is_replicate():
            return TheirReplicate()
        case placement:
            raise UnsupportedError(
                f"to_torch_dtensor: PyTorch has no placement with explicit sizes like {placement} in {layout}: "
                "redistribute it to Shard or Replicate"
            )
