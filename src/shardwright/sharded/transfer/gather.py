"""`gather`: the whole tensor on one rank."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from shardwright import comm
from shardwright.errors import ArgumentTypeError, PlacementError, ShardError
from shardwright.layout import RegionTable
from shardwright.sharded.base.agreement import digest
from shardwright.sharded.base.checks import refuse_nested, refuse_sparse
from shardwright.sharded.base.tensor_base import ShardedTensorBase
from shardwright.sharded.transfer.transfer import ShardTransfer
from shardwright.tensor import DTensor

__all__ = ["gather"]


def gather(
    tensor: ShardedTensorBase, dst: int, out: Tensor | None, *, enforce_dtype: bool, dtype: torch.dtype | None
) -> Tensor | None:
    """See `ShardedTensor.gather`."""
    group = tensor._group
    rank = group.global_rank

    def prepare() -> tuple[None, str]:
        refuse_nested(tensor, "gather")
        refuse_sparse(tensor, "gather")
        _check(tensor, dst, rank, out, enforce_dtype, dtype)
        return None, f"dst {dst} of {digest(tensor._table)} of {tensor.dtype}"

    comm.agree(prepare, what="gather", group=group, same=True, unwrap=True)
    size = tuple(tensor.shape)
    whole = RegionTable(np.array([dst]), np.zeros((1, len(size)), np.int64), np.array([size], np.int64))
    like = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    direct = out is not None and out.dtype == tensor.dtype and out.device == like.device
    direct = direct and out is not None and not (out.is_conj() or out.is_neg())  # whose bytes are not their values
    filled = ShardTransfer(tensor._table, whole, group).run(
        [shard.tensor for shard in tensor._local_shards], like, [out] if direct and out is not None else None
    )
    if rank != dst:
        return None
    if out is not None:
        if not direct:
            out.detach().copy_(filled[0])
        return out
    return filled[0] if dtype is None else filled[0].to(dtype)


def _check(
    tensor: ShardedTensorBase, dst: int, rank: int, out: Tensor | None, enforce_dtype: bool, dtype: torch.dtype | None
) -> None:
    if dst not in tensor._group.ranks:
        raise PlacementError(f"gather: dst {dst} is not in the group of ranks {list(tensor._group.ranks)}")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ArgumentTypeError(f"gather: dtype {dtype!r} is a {type(dtype).__name__}: give a torch.dtype")
    if out is None:
        return
    if not isinstance(out, Tensor) or isinstance(out, ShardedTensorBase | DTensor):
        raise ArgumentTypeError(f"gather: `out` is a {type(out).__name__}: give a plain tensor")
    if rank != dst:
        raise ShardError(
            f"gather: rank {rank} gave `out`, and the tensor is gathered on rank {dst}: give it there only"
        )
    if out.shape != tensor.shape:
        raise ShardError(f"gather: `out` of size {list(out.shape)} for a tensor of size {list(tensor.shape)}")
    if dtype is not None and out.dtype != dtype:
        raise ShardError(f"gather: `out` is {out.dtype}, and dtype={dtype} is asked for: give one of the two")
    if enforce_dtype and out.dtype != tensor.dtype:
        raise ShardError(f"gather: `out` is {out.dtype}, the tensor is {tensor.dtype}, and enforce_dtype forbids it")
    if out.requires_grad and out.is_leaf and torch.is_grad_enabled():
        raise ShardError("gather: `out` is a leaf that requires grad: give a plain buffer")
    if out.layout != torch.strided or out.is_meta:
        raise ShardError(f"gather: `out` has layout {out.layout} on {out.device}: give a strided tensor with memory")
    if _overlaps_itself(out):
        raise ShardError(
            f"gather: elements of `out`, of size {list(out.shape)} with strides {list(out.stride())}, share memory: "
            "they would overwrite each other; give a tensor with memory for each"
        )


def _overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements of a strided tensor are one place in memory."""
    longer = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    if not tensor.numel() or not longer:
        return False
    reach, apart = 0, True
    for stride, size in longer:
        apart = apart and stride > reach  # a step is longer than all that lies within it
        reach += stride * (size - 1)
    if apart or longer[0][0] == 0:
        return not apart
    places = np.zeros(1, np.int64)
    for stride, size in longer:
        places = (places[:, None] + stride * np.arange(size)).reshape(-1)
    return len(np.unique(places)) < len(places)
