"""A DTensor *is* its local tensor, tagged with a layout: how the tag is put on, read and taken off.

Tagging changes the class of a tensor object: no copy, no autograd node. So only objects nobody else holds may be
tagged: fresh results. Everything else is aliased first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from shardwright import comm
from shardwright.layout import Layout, Mesh, Region
from shardwright.tensor.base.gradient_types import REPLICATE

__all__ = [
    "DTensorBase",
    "alias",
    "disabled",
    "empty_outside_mesh",
    "layout_of",
    "local_region",
    "local_size",
    "no_torch_function",
    "tag",
    "tag_replicated",
    "tag_results",
    "version_of",
    "with_dtypes",
]

disabled = torch._C._disabled_torch_function_impl
no_torch_function = torch._C.DisableTorchFunctionSubclass


class DTensorBase(Tensor):
    """What the modules below `DTensor` know of it: a tensor with a layout. `DTensor` is the one concrete class."""

    _layout: Layout
    _copied_by: str  # set where the tensor looks like a view but is a copy: which operator made it
    _base_index: tuple[DTensorBase, Any]  # what it was picked of, and by which index, where one index says it
    _base_version: tuple[
        DTensorBase, Any
    ]  # what it is a copy of, and the state of its memory then; None: it shares its memory
    _lookup_result: bool  # set on partial results of lookups, which are new tensors in torch and may be overwritten
    _strides: tuple[int, ...]  # the global tensor's, where it is not contiguous and shards do not tell
    _number: int  # among the tensors that `distribute_tensor` has sent over the mesh, the same on all its ranks
    _untracked: bool  # set where its memory may be written to behind autograd's back
    concrete: ClassVar[type[DTensorBase]]
    copies: ClassVar[type[DTensorBase]]  # of what looks like a view and is none
    strided: ClassVar[type[DTensorBase]]  # of what has its global strides noted
    pending: ClassVar[type[DTensorBase]]  # of what is still being received

    def __init_subclass__(cls) -> None:
        if cls.__base__ is DTensorBase:
            DTensorBase.concrete = DTensorBase.copies = DTensorBase.strided = DTensorBase.pending = cls


def layout_of(tensor: DTensorBase) -> Layout:
    """The layout a tensor is tagged with."""
    return tensor._layout


def local_region(layout: Layout) -> Region:
    """The region this process holds; an empty one at the origin where it is not in the mesh."""
    rank = comm.rank()
    if rank in layout.mesh:
        return layout.region(rank)
    return Region((0,) * layout.ndim, (0,) * layout.ndim)


def local_size(layout: Layout) -> tuple[int, ...]:
    """Return the shape of this process's local tensor; outside the mesh that of an empty one, which is never 0-d."""
    rank = comm.rank()
    return layout.local_shape(rank) if rank in layout.mesh else (0,) * max(1, layout.ndim)


def empty_outside_mesh(tensor: Tensor, layout: Layout) -> Tensor:
    """Return what a rank outside the mesh holds in place of `tensor`: an empty tensor, whose gradient is zero."""
    with no_torch_function():
        if tensor.ndim != layout.ndim or not layout.ndim:
            return tensor.reshape(-1)[:0].view((0,) * max(1, layout.ndim))
        return tensor[(slice(0, 0),) * layout.ndim]


def alias(tensor: Tensor) -> Tensor:
    """The same memory and history as a plain tensor object of its own."""
    with no_torch_function():
        return tensor.view_as(tensor)


def tag(fresh: Tensor, layout: Layout) -> Any:
    """A tensor object nobody else holds, as a DTensor."""
    fresh.__class__ = DTensorBase.concrete
    fresh._layout = layout  # type: ignore[attr-defined]  # it has just become one
    return fresh


def tag_replicated(fresh: Tensor, mesh: Mesh) -> Any:
    """A tensor object nobody else holds, whole on every rank, as a DTensor."""
    layout = Layout(mesh, [REPLICATE] * mesh.ndim, fresh.shape)
    return tag(fresh if comm.rank() in mesh else empty_outside_mesh(fresh, layout), layout)


def tag_results(result: Any, layouts: Sequence[Layout], inputs: Iterable[Tensor]) -> Any:
    """A local call's result with its tensors tagged, in order; what is not a tensor is left as it is."""
    if type(result) is Tensor:  # by far the most frequent: one new tensor
        return tag(result, layouts[0])
    given = {id(tensor) for tensor in inputs}
    each = iter(layouts)

    def visit(value: Any) -> Any:
        if isinstance(value, Tensor):
            layout = next(each)
            if id(value) in given or type(value) is not Tensor:
                if isinstance(value, DTensorBase) and value._layout is layout:
                    return value
                value = alias(value)  # some functions return their input: it keeps its own layout
            return tag(value, layout)
        if isinstance(value, list | tuple):
            items = [visit(item) for item in value]
            if isinstance(value, list):
                return items
            return type(value)(items) if type(value) is tuple or hasattr(value, "n_fields") else type(value)(*items)
        return value

    return visit(result)


def with_dtypes(result: Any, dtypes: Sequence[torch.dtype]) -> Any:
    """Return a local call's result with its tensors, in order, in these dtypes: what a rank without elements computes
    in place of the operator may have another one, and ranks that disagree about it misread each other's messages.
    """
    each = iter(dtypes)

    def visit(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value if value.dtype == (dtype := next(each, value.dtype)) else value.to(dtype)
        if isinstance(value, list | tuple):
            items = [visit(item) for item in value]
            if all(new is old for new, old in zip(items, value, strict=True)):
                return value
            return (
                items if isinstance(value, list) else type(value)(items) if hasattr(value, "n_fields") else tuple(items)
            )
        return value

    with no_torch_function():
        return visit(result)


def version_of(tensor: Tensor) -> int:
    """How often a tensor's memory was written to; tensors of inference mode do not count."""
    with no_torch_function():
        return 0 if tensor.is_inference() else tensor._version
