"""Memory and sizes of a DTensor: who may read its local memory, and which writes may replace it.

`shape` is the global shape, the memory is this rank's shard. Code that takes both from one tensor (safetensors, Triton,
ctypes, dlpack) would read past the end of the shard, so every attribute that exposes memory is refused unless the local
tensor is the global one. With torch-function disabled, `shape` is the local shape, and the local memory is given.

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

# The methods of torch.Tensor that give memory away: an address, a storage, a capsule.
EXPOSING = tuple(
    name
    for name in """data_ptr const_data_ptr untyped_storage storage _typed_storage
    __dlpack__ __dlpack_device__""".split()
    if hasattr(Tensor, name)  # const_data_ptr came late
)
_enabled = torch._C._is_torch_function_enabled


def is_fully_local(layout: Layout) -> bool:
    """Return True if this rank's local tensor is the global tensor: every mesh dimension replicates or has one rank."""
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
    """Return torch's method of this name, which refuses a DTensor that is not whole on this rank."""
    own = getattr(Tensor, name)

    def method(tensor: DTensorBase, *args: Any, **kwargs: Any) -> Any:
        if _enabled():
            refuse_shard(name, tensor)
        return disabled(own, (), (tensor, *args), kwargs)

    method.__name__ = name
    return method


_get_cuda_interface = Tensor.__cuda_array_interface__.fget  # type: ignore[attr-defined]  # torch's property


def cuda_array_interface(tensor: DTensorBase) -> Any:
    """`__cuda_array_interface__`: torch's AttributeError without a CUDA device, so that `hasattr` answers False."""
    if _enabled() and tensor.is_cuda:
        refuse_shard("__cuda_array_interface__", tensor)
    return disabled(_get_cuda_interface, (), (tensor,), {})


class NoExchange:
    """A class attribute that is absent: `__dlpack_c_exchange_api__` exports memory without asking the tensor."""

    def __get__(self, tensor: object, kind: type) -> Any:
        raise AttributeError(f"{kind.__name__} exports memory through __dlpack__ only, which knows its layout")


def is_set_to(self: Tensor, tensor: Tensor) -> bool:
    """`is_set_to`: the same memory seen alike, under one layout."""
    if not isinstance(self, DTensorBase) or not isinstance(tensor, DTensorBase):
        return False
    return self._layout is tensor._layout and bool(disabled(Tensor.is_set_to, (), (self, tensor), {}))


def set_(target: DTensorBase, source: Any = None, *where: Any, **named: Any) -> DTensorBase:
    """`set_`: the target becomes the source, memory and layout."""
    if not isinstance(source, DTensorBase) or where or named:
        raise UnsupportedError(
            f"set_ of a DTensor {target._layout} takes a DTensor and nothing else: memory without a layout would be "
            "taken for a shard. Use DTensor.from_local for a local tensor"
        )
    disabled(Tensor.set_, (), (target, source), {})
    target._layout = source._layout
    copy_strides(target, source)
    count_writes_through(target, source)
    forget_entered()
    return target


def detach_(target: DTensorBase) -> DTensorBase:
    """Detach in place.

    Torch does not detach views in place. Whether the local tensor is a view may differ from rank to rank (a shard that
    was sliced, or was whole already), so a view is detached as well: the object takes the place of its detached alias.
    """
    if not disabled(Tensor._is_view, (), (target,), {}):
        disabled(Tensor.detach_, (), (target,), {})
        return target
    detached: Any = disabled(Tensor.detach, (), (target,), {})
    detached.__class__ = type(target)  # what autograd still holds of the old tensor is a DTensor
    detached.__dict__.update(target.__dict__)
    torch._C._swap_tensor_impl(target, detached)
    forget_entered()
    return target


def resize_(target: DTensorBase, *size: Any, **options: Any) -> DTensorBase:
    """`resize_`: the same elements in another shape, as many as there is room for; new ones are arbitrary.

    It stays cut along the dimensions that there still are.
    """
    del options
    wanted = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else tuple(size)
    if wanted == target._layout.shape:
        return target
    if target.requires_grad:
        raise InPlaceError(f"resize_ of a DTensor {target._layout}: its gradient is asked for, as of this shape")
    flat: Any = target.flatten()
    count = torch.Size(wanted).numel()
    if count > flat.numel():
        flat = torch.cat([flat, flat.new_zeros(count - flat.numel())])
    resized = flat[:count].reshape(wanted).redistribute(placements=_kept(target._layout.placements, wanted))
    return set_(target, resized.clone())


def _kept(placements: Sequence[Placement], shape: tuple[int, ...]) -> list[Placement]:
    """Placements for another shape: even where they were uneven, whole where the dimension is gone."""
    kept: list[Placement] = []
    for placement in placements:
        if isinstance(placement, Shard | Ragged):
            kept.append(Shard(placement.dim) if placement.dim < len(shape) else REPLICATE)
        else:
            kept.append(placement)
    return kept


def resize_as_(target: DTensorBase, like: Tensor, **options: Any) -> DTensorBase:
    return resize_(target, like._layout.shape if isinstance(like, DTensorBase) else like.shape, **options)


def is_same_size(one: Tensor, other: Tensor) -> bool:
    """Of the global tensors: shards may be of one size where the tensors are not."""
    return torch.Size(one.shape) == torch.Size(other.shape)
