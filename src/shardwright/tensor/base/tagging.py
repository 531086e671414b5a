"""Tagging: make a local tensor a DTensor by setting its class and layout. A DTensor *is* its local tensor.

Tagging changes the class of a tensor object, without a copy or an autograd node. So only fresh results, which
nothing else refers to, may be tagged. Everything else is aliased first.
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
    """A tensor with a layout: the part of `DTensor` that lower modules use. `DTensor` is its only direct subclass."""

    _layout: Layout
    _copied_by: str  # set on a copy that looks like a view: the operator that made it
    _base_index: tuple[DTensorBase, Any]  # the base of a copy, and the copy's index in it, if one index describes it
    _base_version: tuple[DTensorBase, Any]  # the base of a copy, and its memory_version; None: shares the base's memory
    _lookup_result: bool  # set on partial results of lookups, which are new tensors in torch and may be overwritten
    _strides: tuple[int, ...]  # of the global tensor, if it is not contiguous and the shards do not determine them
    _number: int  # counts the tensors that `distribute_tensor` has sent over the mesh; the same on all its ranks
    _shared: Any  # its redistributions that serve several operators
    _use: Any  # a ParameterUse: of a parameter, or of the parameters it was computed from
    concrete: ClassVar[type[DTensorBase]]
    copies: ClassVar[type[DTensorBase]]  # TrackedCopy: a copy that looks like a view
    strided: ClassVar[type[DTensorBase]]  # a tensor with recorded global strides
    pending: ClassVar[type[DTensorBase]]  # a tensor that is still being received
    parameter_values: ClassVar[type[DTensorBase]]  # a tensor with a ParameterUse, if no other class applies

    def __init_subclass__(cls) -> None:
        if cls.__base__ is DTensorBase:
            DTensorBase.concrete = DTensorBase.copies = DTensorBase.strided = DTensorBase.pending = cls
            DTensorBase.parameter_values = cls


def layout_of(tensor: DTensorBase) -> Layout:
    """Return the layout of a DTensor."""
    return tensor._layout


def local_region(layout: Layout) -> Region:
    """Return the region this process holds; an empty one at the origin if it is not in the mesh."""
    rank = comm.rank()
    if rank in layout.mesh:
        return layout.region(rank)
    return Region((0,) * layout.ndim, (0,) * layout.ndim)


def local_size(layout: Layout) -> tuple[int, ...]:
    """Return the shape of this process's local tensor; outside the mesh an empty shape, which is never 0-d."""
    rank = comm.rank()
    return layout.local_shape(rank) if rank in layout.mesh else (0,) * max(1, layout.ndim)


def empty_outside_mesh(tensor: Tensor, layout: Layout) -> Tensor:
    """Return the empty tensor that a rank outside the mesh holds in place of `tensor`; its gradient is zero."""
    with no_torch_function():
        if tensor.ndim != layout.ndim or not layout.ndim:
            return tensor.reshape(-1)[:0].view((0,) * max(1, layout.ndim))
        return tensor[(slice(0, 0),) * layout.ndim]


def alias(tensor: Tensor) -> Tensor:
    """Return a new plain tensor object with the same memory and autograd history."""
    with no_torch_function():
        return tensor.view_as(tensor)


def tag(fresh: Tensor, layout: Layout) -> Any:
    """Make a fresh tensor, which nothing else refers to, a DTensor."""
    fresh.__class__ = DTensorBase.concrete
    fresh._layout = layout  # type: ignore[attr-defined]  # it is a DTensor now
    return fresh


def tag_replicated(fresh: Tensor, mesh: Mesh) -> Any:
    """Make a fresh tensor, the same on every rank, a replicated DTensor."""
    layout = Layout(mesh, [REPLICATE] * mesh.ndim, fresh.shape)
    return tag(fresh if comm.rank() in mesh else empty_outside_mesh(fresh, layout), layout)


def tag_results(result: Any, layouts: Sequence[Layout], inputs: Iterable[Tensor]) -> Any:
    """Tag the tensors in a local call's result, in order; other values are left as they are."""
    if type(result) is Tensor:  # the most frequent: one new tensor
        return tag(result, layouts[0])
    given = {id(tensor) for tensor in inputs}
    remaining = iter(layouts)

    def visit(value: Any) -> Any:
        if isinstance(value, Tensor):
            layout = next(remaining)
            if id(value) in given or type(value) is not Tensor:
                if isinstance(value, DTensorBase) and value._layout is layout:
                    return value
                value = alias(value)  # some functions return an input, which keeps its own layout
            return tag(value, layout)
        if isinstance(value, list | tuple):
            items = [visit(item) for item in value]
            if isinstance(value, list):
                return items
            return type(value)(items) if type(value) is tuple or hasattr(value, "n_fields") else type(value)(*items)
        return value

    return visit(result)


def with_dtypes(result: Any, dtypes: Sequence[torch.dtype]) -> Any:
    """Cast the tensors in a local call's result, in order, to these dtypes.

    What a rank without elements computes in place of the operator may have another dtype, and ranks that disagree
    about the dtype would misread each other's messages.
    """
    remaining = iter(dtypes)

    def visit(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value if value.dtype == (dtype := next(remaining, value.dtype)) else value.to(dtype)
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
    """Return autograd's version counter of a tensor; 0 for inference tensors, which have none."""
    with no_torch_function():
        return 0 if tensor.is_inference() else tensor._version
