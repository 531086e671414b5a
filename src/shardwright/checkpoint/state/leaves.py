"""The tensors of a state: what each is, who holds which region, and where this rank's part lies in memory."""

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

__all__ = ["PLAIN", "Leaf", "Part", "Whole", "is_nested", "leaf_of", "to_ours"]

PLAIN = (Tensor, torch.nn.Parameter)
"""The types of tensors that all ranks hold whole; a `torch.nn.Buffer` is a `Tensor`."""
_STORED = {  # name and itemsize of all that are: not those of less than a byte, which torch itself can hardly copy
    dtype: (name, dtype.itemsize) for name, dtype in DTYPES.items() if not re.fullmatch(r"u?int[1-7]|bits.*", name)
}

_known_pieces: WeakValueDictionary[tuple[Any, ...], Pieces] = WeakValueDictionary()


class Part(NamedTuple):
    """A region of a tensor and the local memory that holds it."""

    region: Region
    tensor: Tensor


class Whole(NamedTuple):
    """What plain tensors of one shape have in common: all ranks hold all of it."""

    layout: Layout
    region: Region
    is_held: bool


@final
@dataclass(eq=False, slots=True)  # not frozen: that would cost as much as all else that is done for a small tensor
class Leaf:
    """A tensor of the state: its dtype, its placing, and the parts that this rank has of it.

    `identity` is equal for leaves that are one memory, seen alike. Where this rank holds no elements of the tensor
    (`is_held`), that they are not one is no more than a guess. `is_straight` if the bytes of each part
    lie in host memory one after the other, as they are stored.
    """

    dtype: str
    itemsize: int
    sharding: Sharding
    parts: tuple[Part, ...]
    identity: tuple[Any, ...]
    is_held: bool
    is_straight: bool


def to_ours(value: Any) -> Any:
    """PyTorch's DTensor or ShardedTensor as ours. They are not imported where nobody else has."""
    if type(value) in PLAIN or isinstance(value, DTensor | ShardedTensorBase):
        return value
    if any(kind.__module__.startswith("torch.distributed") for kind in type(value).__mro__):
        from shardwright.interop import to_shardwright

        return to_shardwright(value)
    return value


def is_nested(value: Any) -> bool:
    """Whether a ShardedTensor has shards here that are themselves spread over ranks."""
    return isinstance(value, ShardedTensor) and any(
        isinstance(shard.tensor, ShardedTensorBase | DTensor) for shard in value.local_shards()
    )


def leaf_of(value: Any, path: str, group: comm.Group, known: dict[torch.Size, Whole]) -> Leaf:
    """The leaf of a tensor of ours, of a plain one, or of an array; `known` is room for what plain ones share."""
    if type(value) not in PLAIN:
        if isinstance(value, DTensor):
            return _distributed(value, path)
        if isinstance(value, ShardedTensor):
            return _sharded(value, path)
        if not isinstance(value, np.ndarray):
            raise StateError(f"{path}: {type(value).__name__} is a tensor of a kind that is not known here")
        value = _from_numpy(value, path)
    dtype, itemsize = _check(value, path)
    shape = value.shape
    whole = known.get(shape)
    if whole is None:
        layout = Layout(Mesh((group.size,), ranks=group.ranks), [Replicate()], shape)
        whole = known[shape] = Whole(layout, Region.whole(shape), 0 not in shape)
    layout, region, is_held = whole
    tensor = value.detach()
    is_straight = _is_straight(tensor)
    identity = (id(layout), _seen(tensor, is_straight))
    return Leaf(dtype, itemsize, layout, (Part(region, tensor),), identity, is_held, is_straight)


def _distributed(value: DTensor, path: str) -> Leaf:
    layout = value.sharding
    if layout.is_partial:
        raise StateError(
            f"{path}: {layout} is partial: addends are not stored; redistribute it to Replicate() or Shard()"
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
    shards = [] if is_nested(value) else value.local_shards()  # nested ones are made explicit by all ranks together
    parts = tuple(Part(shard.metadata.region, shard.tensor.detach()) for shard in shards)
    for part in parts:
        _check(part.tensor, path)
    if value.dtype not in _STORED:
        _refuse(value.dtype, path)
    return _leaf(value, pieces, parts)


def _leaf(value: Tensor, sharding: Sharding, parts: tuple[Part, ...]) -> Leaf:
    straight = [_is_straight(tensor) for _, tensor in parts]
    seen = [_seen(part.tensor, is_straight) for part, is_straight in zip(parts, straight, strict=True)]
    held = any(tensor.numel() > 0 for _, tensor in parts)
    identity = (id(sharding), *seen) if parts else (id(sharding), id(value))
    return Leaf(*_STORED[value.dtype], sharding, parts, identity, held, all(straight))


def _is_straight(tensor: Tensor) -> bool:
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def _seen(tensor: Tensor, is_straight: bool) -> tuple[Any, ...]:
    """A tensor's memory and how it is seen; the placing has its shape, which says the rest of one that is straight."""
    where = tensor.data_ptr() or tensor.untyped_storage()._cdata  # an empty one lies nowhere, but has a storage
    if is_straight:
        return where, tensor.dtype
    return where, tensor.device, tensor.shape, tensor.stride(), tensor.dtype, tensor.is_neg(), tensor.is_conj()


def _from_numpy(array: np.ndarray[Any, Any], path: str) -> Tensor:
    """The array's memory as a tensor; a copy where torch cannot see it so: it runs backwards, or is read-only."""
    steps = (stride >= 0 and stride % array.itemsize == 0 for stride in array.strides)
    try:
        return torch.from_numpy(array if array.flags.writeable and all(steps) else array.copy())
    except (TypeError, ValueError):
        hint = ""
        if not array.dtype.isnative:
            hint = "; its bytes are in the other order: convert it with array.astype(array.dtype.newbyteorder('='))"
        raise StateError(
            f"{path}: a numpy array of {array.dtype.str!r} is not stored: torch has no such dtype{hint}"
        ) from None


def _check(tensor: Tensor, path: str) -> tuple[str, int]:
    """The name of its dtype and its itemsize, if it can be stored."""
    if tensor.layout != torch.strided:
        raise StateError(f"{path}: a tensor of layout {tensor.layout} is not stored: call to_dense()")
    if tensor.is_meta:
        raise StateError(f"{path}: a tensor on the meta device has no memory: materialise it first, with to_empty()")
    return _STORED.get(tensor.dtype) or _refuse(tensor.dtype, path)


def _refuse(dtype: torch.dtype, path: str) -> NoReturn:
    if str(dtype).startswith("torch.q"):
        raise StateError(
            f"{path}: a quantised tensor ({dtype}) is not stored: dequantise it, or store int_repr() and its parameters"
        )
    raise StateError(f"{path}: {dtype} is not stored: view it as torch.uint8, and keep its dtype beside it")
