"""`gather`: the global tensor on one rank."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from shardwright import comm
from shardwright.errors import ArgumentTypeError, PlacementError, ShardError
from shardwright.layout import RegionTable
from shardwright.sharded.base.checks import refuse_nested, refuse_sparse
from shardwright.sharded.base.tensor_base import ShardedTensorBase
from shardwright.sharded.metadata.digest import digest
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
    target = RegionTable(np.array([dst]), np.zeros((1, len(size)), np.int64), np.array([size], np.int64))
    like = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    direct = out is not None and out.dtype == tensor.dtype and out.device == like.device
    direct = direct and out is not None and not (out.is_conj() or out.is_neg())  # their bytes differ from their values
    filled = ShardTransfer(tensor._table, target, group).run(
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
        raise ArgumentTypeError(f"gather: dtype must be a torch.dtype, got {dtype!r}")
    if out is None:
        return
    if not isinstance(out, Tensor) or isinstance(out, ShardedTensorBase | DTensor):
        raise ArgumentTypeError(f"gather: `out` must be a plain tensor, got {type(out).__name__}")
    if rank != dst:
        raise ShardError(
            f"gather: rank {rank} passed `out`, but the tensor is gathered on rank {dst}: pass it there only"
        )
    if out.shape != tensor.shape:
        raise ShardError(f"gather: `out` has size {list(out.shape)}, but the tensor has size {list(tensor.shape)}")
    if dtype is not None and out.dtype != dtype:
        raise ShardError(f"gather: `out` is {out.dtype}, but dtype={dtype} was given: give only one of them")
    if enforce_dtype and out.dtype != tensor.dtype:
        raise ShardError(f"gather: with enforce_dtype, `out` must be {tensor.dtype} like the tensor, got {out.dtype}")
    if out.requires_grad and out.is_leaf and torch.is_grad_enabled():
        raise ShardError("gather: `out` must not be a leaf that requires grad")
    if out.layout != torch.strided or out.is_meta:
        raise ShardError(f"gather: `out` must be a strided tensor with memory, got layout {out.layout} on {out.device}")
    if _overlaps_itself(out):
        raise ShardError(
            f"gather: elements of `out`, of size {list(out.shape)} with strides {list(out.stride())}, share memory and "
            "would overwrite each other: pass a tensor without overlapping elements"
        )


def _overlaps_itself(tensor: Tensor) -> bool:
    """True if two elements of a strided tensor share memory."""
    dims = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    if not tensor.numel() or not dims:
        return False
    reach, disjoint = 0, True
    for stride, size in dims:
        disjoint = disjoint and stride > reach  # each stride exceeds the extent of the smaller ones
        reach += stride * (size - 1)
    if disjoint or dims[0][0] == 0:
        return not disjoint
    addresses = np.zeros(1, np.int64)
    for stride, size in dims:
        addresses = (addresses[:, None] + stride * np.arange(size)).reshape(-1)
    return len(np.unique(addresses)) < len(addresses)
