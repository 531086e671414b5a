"""The tensors of a state: dtype, sharding, and the memory of this rank's parts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, final
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from shardwright import comm
from shardwright.checkpoint.format.tensor_table import Pieces, Sharding
from shardwright.checkpoint.format.values import DTYPES
from shardwright.errors import StateError
from shardwright.layout import Layout, Mesh, Region, Replicate
from shardwright.sharded import ShardedTensor, ShardedTensorBase
from shardwright.tensor import DTensor

__all__ = ["PLAIN", "Leaf", "Part", "Replicated", "is_nested", "leaf_of", "to_ours"]

PLAIN = (Tensor, torch.nn.Parameter)
"""The types of tensors that are replicated on all ranks; a `torch.nn.Buffer` is a `Tensor`."""
_STORED = {  # name and itemsize; dtypes below one byte, which torch can hardly copy, are not supported
    dtype: (name, dtype.itemsize) for name, dtype in DTYPES.items() if not re.fullmatch(r"u?int[1-7]|bits.*", name)
}

_known_pieces: WeakValueDictionary[tuple[Any, ...], Pieces] = WeakValueDictionary()


class Part(NamedTuple):
    """A region of a tensor and the local memory that holds it."""

    region: Region
    tensor: Tensor


class Replicated(NamedTuple):
    """What plain tensors of one shape have in common: all ranks hold all of it."""

    layout: Layout
    region: Region
    is_held: bool


@final
@dataclass(eq=False, slots=True)  # not frozen: that would double the cost of a small tensor
class Leaf:
    """A tensor of the state: its dtype, its sharding, and the parts that this rank holds.

    `identity` is equal for leaves that are the same view of the same memory; if this rank holds no elements (`is_held`
    is False), different identities prove nothing. `is_straight` is True if every part is contiguous host memory in the
    stored byte order.
    """

    dtype: str
    itemsize: int
    sharding: Sharding
    parts: tuple[Part, ...]
    identity: tuple[Any, ...]
    is_held: bool
    is_straight: bool


def to_ours(value: Any) -> Any:
    """Convert PyTorch's DTensor or ShardedTensor to ours, without importing them if they are not in use."""
    if type(value) in PLAIN or isinstance(value, DTensor | ShardedTensorBase):
        return value
    if any(kind.__module__.startswith("torch.distributed") for kind in type(value).__mro__):
        from shardwright.interop.tensors import to_shardwright

        return to_shardwright(value)
    return value


def is_nested(value: Any) -> bool:
    """Return True if a ShardedTensor has local shards that are themselves distributed."""
    return isinstance(value, ShardedTensor) and any(
        isinstance(shard.tensor, ShardedTensorBase | DTensor) for shard in value.local_shards()
    )


def leaf_of(value: Any, path: str, group: comm.Group, cache: dict[torch.Size, Replicated]) -> Leaf:
    """Return the leaf of a tensor or array; `cache` holds what plain tensors of one shape share."""
    if type(value) not in PLAIN:
        if isinstance(value, DTensor):
            return _distributed(value, path)
        if isinstance(value, ShardedTensor):
            return _sharded(value, path)
        if not isinstance(value, np.ndarray):
            raise StateError(f"{path}: unknown tensor type {type(value).__name__}")
        value = _from_numpy(value, path)
    dtype, itemsize = _check(value, path)
    shape = value.shape
    replicated = cache.get(shape)
    if replicated is None:
        layout = Layout(Mesh((group.size,), ranks=group.ranks), [Replicate()], shape)
        replicated = cache[shape] = Replicated(layout, Region.whole(shape), 0 not in shape)
    layout, region, is_held = replicated
    tensor = value.detach()
    is_straight = _is_straight(tensor)
    identity = (id(layout), _view_of(tensor, is_straight))
    return Leaf(dtype, itemsize, layout, (Part(region, tensor),), identity, is_held, is_straight)


def _distributed(value: DTensor, path: str) -> Leaf:
    layout = value.sharding
    if layout.is_partial:
        raise StateError(
            f"{path}: {layout} is partial, and partial values cannot be stored; redistribute it to Replicate() or "
            "Shard()"
        )
    local = value.to_local().detach()
    _check(local, path)
    rank = comm.rank()
    parts = (Part(layout.region(rank), local),) if rank in layout.mesh else ()
    return _leaf(local, layout, parts)


def _sharded(value: ShardedTensor, path: str) -> Leaf:
    table = value._table
    key = (tuple(value.shape), table.ranks.tobytes(), table.offsets.tobytes(), table.sizes.tobytes())
    pieces = _known_pieces.get(key)
    if pieces is None:
        regions = tuple(Region(o, s) for o, s in zip(table.offsets.tolist(), table.sizes.tolist(), strict=True))
        pieces = _known_pieces[key] = Pieces(tuple(value.shape), regions, tuple(table.ranks.tolist()))
    shards = [] if is_nested(value) else value.local_shards()  # nested shards are flattened by all ranks together
    parts = tuple(Part(shard.metadata.region, shard.tensor.detach()) for shard in shards)
    for part in parts:
        _check(part.tensor, path)
    if value.dtype not in _STORED:
        _refuse(value.dtype, path)
    return _leaf(value, pieces, parts)


def _leaf(value: Tensor, sharding: Sharding, parts: tuple[Part, ...]) -> Leaf:
    straight = [_is_straight(tensor) for _, tensor in parts]
    views = [_view_of(part.tensor, is_straight) for part, is_straight in zip(parts, straight, strict=True)]
    is_held = any(tensor.numel() > 0 for _, tensor in parts)
    identity = (id(sharding), *views) if parts else (id(sharding), id(value))
    return Leaf(*_STORED[value.dtype], sharding, parts, identity, is_held, all(straight))


def _is_straight(tensor: Tensor) -> bool:
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def _view_of(tensor: Tensor, is_straight: bool) -> tuple[Any, ...]:
    """Return what identifies a tensor's memory and view; the sharding has its shape."""
    address = tensor.data_ptr() or tensor.untyped_storage()._cdata  # an empty tensor has no address, but a storage
    if is_straight:
        return address, tensor.dtype
    return address, tensor.device, tensor.shape, tensor.stride(), tensor.dtype, tensor.is_neg(), tensor.is_conj()


def _from_numpy(array: np.ndarray[Any, Any], path: str) -> Tensor:
    """Return the array's memory as a tensor; a copy if torch cannot use it: negative strides, or read-only."""
    steps = (stride >= 0 and stride % array.itemsize == 0 for stride in array.strides)
    try:
        return torch.from_numpy(array if array.flags.writeable and all(steps) else array.copy())
    except (TypeError, ValueError):
        hint = ""
        if not array.dtype.isnative:
            hint = "; its bytes are in the other order: convert it with array.astype(array.dtype.newbyteorder('='))"
        raise StateError(
            f"{path}: a numpy array of dtype {array.dtype.str!r} cannot be stored: torch has no such dtype{hint}"
        ) from None


def _check(tensor: Tensor, path: str) -> tuple[str, int]:
    """Check that a tensor can be stored; return its dtype's name and its itemsize."""
    if tensor.layout != torch.strided:
        raise StateError(f"{path}: a tensor of layout {tensor.layout} cannot be stored; call to_dense()")
    if tensor.is_meta:
        raise StateError(f"{path}: a tensor on the meta device has no data; materialize it first, with to_empty()")
    return _STORED.get(tensor.dtype) or _refuse(tensor.dtype, path)


def _refuse(dtype: torch.dtype, path: str) -> NoReturn:
    if str(dtype).startswith("torch.q"):
        raise StateError(
            f"{path}: a quantized tensor ({dtype}) cannot be stored; dequantize it, or store int_repr() and its "
            "parameters"
        )
    raise StateError(f"{path}: {dtype} cannot be stored; view it as torch.uint8, and store its dtype separately")
