"""Operators on the storage of a DTensor: access to its local memory, `set_`, `resize_` and `detach_`.

`shape` is the global shape, but the memory is this rank's shard. Code that combines them (safetensors, Triton, ctypes,
dlpack) would read past the end of the shard, so every attribute that exposes memory raises unless the local tensor is
the global one. With torch-function disabled, `shape` is the local shape, and these attributes give the local memory.

A write that replaces the local memory must leave memory that fits the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright import comm
from shardwright.errors import InPlaceError, UnsupportedError
from shardwright.layout import Layout, Placement, Ragged, Shard
from shardwright.tensor.base.copied import is_copied
from shardwright.tensor.base.gradient_types import REPLICATE
from shardwright.tensor.base.strides import copy_strides
from shardwright.tensor.base.tagging import DTensorBase, disabled
from shardwright.tensor.base.writes import count_writes_through
from shardwright.tensor.gradients.enter import forget_entered

__all__ = [
    "EXPOSING",
    "NoExchange",
    "cuda_array_interface",
    "detach_",
    "exposing",
    "is_fully_local",
    "is_same_size",
    "is_set_to",
    "refuse_shard",
    "resize_",
    "resize_as_",
    "set_",
]

# The methods of torch.Tensor that expose memory: an address, a storage, a capsule.
EXPOSING = tuple(
    name
    for name in """data_ptr const_data_ptr untyped_storage storage _typed_storage
    __dlpack__ __dlpack_device__""".split()
    if hasattr(Tensor, name)  # older torch has no const_data_ptr
)
_enabled = torch._C._is_torch_function_enabled


def is_fully_local(layout: Layout) -> bool:
    """Return whether this rank's local tensor is the global tensor: every mesh dimension replicates or has one rank."""
    sizes = layout.mesh.shape
    replicated = all(
        size == 1 or placement.is_replicate() for placement, size in zip(layout.placements, sizes, strict=True)
    )
    return replicated and comm.rank() in layout.mesh


def refuse_shard(what: str, tensor: DTensorBase) -> None:
    """Raise UnsupportedError unless this rank's local tensor is the global tensor."""
    layout = tensor._layout
    if is_fully_local(layout):
        return
    if comm.rank() not in layout.mesh:
        held = "nothing on this rank, which is outside its mesh"
    elif layout.is_partial:
        held = "only this rank's partial value in memory"
    else:
        held = "only this rank's shard in memory"
    raise UnsupportedError(
        f"{what} of a DTensor {layout}: it holds {held}, but its shape is that of the global tensor. Use "
        "`x.to_local()` for the memory of this rank, or `x.full_tensor()` for the whole tensor"
    )


def exposing(name: str) -> Callable[..., Any]:
    """Return torch's method of this name with a check that this rank's local tensor is the global tensor."""
    own = getattr(Tensor, name)

    def method(tensor: DTensorBase, *args: Any, **kwargs: Any) -> Any:
        if _enabled():
            refuse_shard(name, tensor)
        return disabled(own, (), (tensor, *args), kwargs)

    method.__name__ = name
    return method


_get_cuda_interface = Tensor.__cuda_array_interface__.fget  # type: ignore[attr-defined]  # torch's property


def cuda_array_interface(tensor: DTensorBase) -> Any:
    """`__cuda_array_interface__`; an AttributeError without a CUDA device, as in torch, so that `hasattr` is False."""
    if _enabled() and tensor.is_cuda:
        refuse_shard("__cuda_array_interface__", tensor)
    return disabled(_get_cuda_interface, (), (tensor,), {})


class NoExchange:
    """Hides a class attribute: `__dlpack_c_exchange_api__` would export memory without a check of the layout."""

    def __get__(self, tensor: object, kind: type) -> Any:
        raise AttributeError(f"{kind.__name__} exports memory only through __dlpack__, which checks the layout")


def is_set_to(self: Tensor, tensor: Tensor) -> bool:
    """`is_set_to`: the same view of the same memory, with the same layout."""
    if not isinstance(self, DTensorBase) or not isinstance(tensor, DTensorBase):
        return False
    return self._layout is tensor._layout and bool(disabled(Tensor.is_set_to, (), (self, tensor), {}))


def set_(target: DTensorBase, source: Any = None, *where: Any, **named: Any) -> DTensorBase:
    """`set_`: the target gets the memory and the layout of the source."""
    if not isinstance(source, DTensorBase) or where or named:
        raise UnsupportedError(
            f"set_ of a DTensor {target._layout} takes a DTensor and no other arguments: memory without a layout would "
            "count as a shard. Use DTensor.from_local for a local tensor"
        )
    if is_copied(source):  # the target would share the memory of the copy, not that of the view's base
        raise InPlaceError(
            f"set_ of a DTensor {target._layout} to {source._layout}, which looks like a view but is a copy, because "
            f"{source._copied_by} of a sharded dimension needed communication: clone() it first"
        )
    disabled(Tensor.set_, (), (target, source), {})
    target._layout = source._layout
    copy_strides(target, source)
    count_writes_through(target, source)
    forget_entered()
    return target


def detach_(target: DTensorBase) -> DTensorBase:
    """Detach in place.

    torch does not detach views in place. Whether the local tensor is a view may differ between ranks (a shard may be a
    slice, or the whole tensor), so a view is detached too, by swapping the object with a detached alias.
    """
    if not disabled(Tensor._is_view, (), (target,), {}):
        disabled(Tensor.detach_, (), (target,), {})
        return target
    detached: Any = disabled(Tensor.detach, (), (target,), {})
    detached.__class__ = type(target)  # autograd still holds the old tensor, which must stay a DTensor
    detached.__dict__.update(target.__dict__)
    torch._C._swap_tensor_impl(target, detached)
    forget_entered()
    return target


def resize_(target: DTensorBase, *size: Any, **options: Any) -> DTensorBase:
    """`resize_`: keep the first elements in a new shape; further elements are arbitrary.

    The result stays sharded along the dimensions that still exist.
    """
    del options
    wanted = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else tuple(size)
    if wanted == target._layout.shape:
        return target
    if target.requires_grad:
        raise InPlaceError(f"resize_ of a DTensor {target._layout} that requires grad: its gradient would not fit")
    flat: Any = target.flatten()
    count = torch.Size(wanted).numel()
    if count > flat.numel():
        flat = torch.cat([flat, flat.new_zeros(count - flat.numel())])
    resized = flat[:count].reshape(wanted).redistribute(placements=_kept(target._layout.placements, wanted))
    return set_(target, resized.clone())


def _kept(placements: Sequence[Placement], shape: tuple[int, ...]) -> list[Placement]:
    """Return the placements for another shape: Shard for Ragged, Replicate for dimensions that no longer exist."""
    kept: list[Placement] = []
    for placement in placements:
        if isinstance(placement, Shard | Ragged):
            kept.append(Shard(placement.dim) if placement.dim < len(shape) else REPLICATE)
        else:
            kept.append(placement)
    return kept


def resize_as_(target: DTensorBase, like: Tensor, **options: Any) -> DTensorBase:
    return resize_(target, like._layout.shape if isinstance(like, DTensorBase) else like.shape, **options)


def is_same_size(tensor: Tensor, other: Tensor) -> bool:
    """`is_same_size` of the global tensors: shards may have the same size although the tensors do not."""
    return torch.Size(tensor.shape) == torch.Size(other.shape)
