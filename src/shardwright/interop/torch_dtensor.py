"""PyTorch's DTensor and ours into each other: the same local memory on the same mesh; nothing is copied, nobody talks.

The two agree in what a placement means. What PyTorch says with `_StridedShard`, that a mesh dimension further right
has cut first, ours says with the order of its layout.
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
from shardwright.interop.torch_sharded import from_torch_sharded_tensor
from shardwright.layout import Layout, Partial, Shard
from shardwright.tensor import DTensor
from shardwright.tensor.base.tagging import alias, local_region, tag

__all__ = ["from_torch_dtensor", "to_shardwright", "to_torch_dtensor"]


def to_torch_dtensor(x: DTensor) -> TheirDTensor:
    """The DTensor as PyTorch's, over the same local memory; gradients flow back to it, and ranks do not talk.

    A layout with `Ragged`, or with an order of cuts that PyTorch cannot say, is refused.

    >>> import shardwright as sw
    >>> x = sw.ones(4, 2, mesh=sw.init_device_mesh("cpu", (1,)), placements=[sw.Shard(0)])
    >>> made = to_torch_dtensor(x)
    >>> made.placements, made.to_local().data_ptr() == x.to_local().data_ptr()
    ((Shard(dim=0),), True)
    """
    if not isinstance(x, DTensor):
        raise ArgumentTypeError(f"to_torch_dtensor: {type(x).__name__} is not a shardwright DTensor")
    layout = x.sharding
    placements = [_to_placement(layout, mesh_dim) for mesh_dim in range(layout.mesh.ndim)]
    try:
        same = Layout(layout.mesh, placements, layout.shape) is layout
    except LayoutError:
        same = False
    if not same:
        raise UnsupportedError(
            f"to_torch_dtensor: PyTorch has no placements for the order of cuts in {layout}: redistribute it to a "
            "layout whose mesh dimensions cut from left to right"
        )
    made: TheirDTensor = TheirDTensor.from_local(
        x.to_local(), x.device_mesh, placements, run_check=False, shape=torch.Size(layout.shape), stride=x.stride()
    )
    return made


def from_torch_dtensor(x: TheirDTensor) -> DTensor:
    """PyTorch's DTensor as ours, over the same local memory; gradients flow back to it, and ranks do not talk.

    >>> import shardwright as sw
    >>> theirs = to_torch_dtensor(sw.ones(3, mesh=sw.init_device_mesh("cpu", (1,)), placements=[sw.Shard(0)]))
    >>> print(from_torch_dtensor(theirs).sharding)
    [3] (0: S(0))
    """
    if not isinstance(x, TheirDTensor):
        raise ArgumentTypeError(f"from_torch_dtensor: {type(x).__name__} is not PyTorch's DTensor")
    layout = Layout(comm.bind(x.device_mesh), x.placements, x.shape)
    local: torch.Tensor = x.to_local()
    expected = local_region(layout).size
    if tuple(local.shape) != expected:
        if comm.rank() in layout.mesh:
            raise LocalTensorError(
                f"rank {comm.rank()}: PyTorch's DTensor {list(x.shape)} with {x.placements} has a local tensor of "
                f"shape {tuple(local.shape)}, and {layout} gives it {expected}: it was cut another way"
            )
        local = local.new_empty(expected)  # outside of the mesh PyTorch has a tensor of another emptiness
    made: DTensor = tag(alias(local), layout)
    return made


def to_shardwright(value: Any) -> Any:
    """PyTorch's DTensor or ShardedTensor as ours, over the same memory; anything else as it is.

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
            cutting = layout.cut_by(dim)
            before = [other for other in cutting[: cutting.index(mesh_dim)] if other > mesh_dim]
            factor = prod(layout.mesh.shape[other] for other in before)
            return _StridedShard(dim, split_factor=factor) if factor > 1 else TheirShard(dim)
        case Partial(op=op):
            return TheirPartial(op)
        case placement if placement.is_replicate():
            return TheirReplicate()
        case placement:
            raise UnsupportedError(
                f"to_torch_dtensor: {placement} in {layout} has sizes of its own, which PyTorch cannot say: "
                "redistribute it to Shard or Replicate"
            )
