"""Writes to copies that look like views (`x[i] += 1` along a sharded dimension), and to partial results of lookups.

A rank may hold only a partial value: the value is reduced, written to, and stored as partial values again. What is
written to a copy is then written to its base, at the index of the copy. All checks come before the first write: if one
raises, the copy and its base are unchanged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwright.errors import InPlaceError
from shardwright.tensor.base.copied import is_copied, memory_owner, refuse_copied
from shardwright.tensor.base.gradient_types import REPLICATE
from shardwright.tensor.base.registry import canonical_name
from shardwright.tensor.base.strides import global_stride
from shardwright.tensor.base.tagging import DTensorBase, no_torch_function, tag
from shardwright.tensor.base.writes import WATCH, count_write, memory_version
from shardwright.tensor.redistribute.autograd import redistribute_local

__all__ = [
    "is_lookup_result",
    "overwrite",
    "refuse_shared_elements",
    "refuse_unwritable",
    "tensors_written_with",
    "write_through",
]

_SHARED_ELEMENTS = "several of its elements share memory, as after expand() or unfold(): clone() it first"


def is_lookup_result(tensor: Any) -> bool:
    """Return whether this is a partial result of a lookup (`x[indices]`), which in torch is a writable new tensor."""
    return isinstance(tensor, DTensorBase) and "_lookup_result" in tensor.__dict__


def overwrite(func: Any, target: DTensorBase, *args: Any, **kwargs: Any) -> DTensorBase:
    """Call an in-place operator on a partial result of a lookup, and return the result. Collective."""
    fresh = _written(func, target, args, kwargs)
    with no_torch_function():
        target.copy_(redistribute_local(fresh, fresh._layout, target._layout))
    if WATCH.inference:
        count_write(target)
    return target


def write_through(func: Any, target: DTensorBase, *args: Any, **kwargs: Any) -> DTensorBase:
    """Call an in-place operator on a copy that looks like a view, and write to its base too. Collective.

    The copy must be up to date. Raise InPlaceError, before anything is written, if the base cannot be written to.
    """
    name = canonical_name(func)[0]
    chain = tensors_written_with(name, target)
    if _overlaps_itself(target):
        raise InPlaceError(
            f"{name}: {target._layout} has elements that share memory, and is a view of a copy, because "
            f"{target._copied_by} of a sharded dimension needed communication: write to the base, or to a clone()"
        )
    fresh = _written(func, target, args, kwargs)
    with no_torch_function():
        # As in torch: a write to a detached alias is not recorded, even if the base requires grad.
        records = torch.is_grad_enabled() and (target.requires_grad or fresh.requires_grad)
    for tensor in chain:
        refuse_unwritable(name, tensor, records)
    with torch.set_grad_enabled(records):
        with no_torch_function():
            target.copy_(redistribute_local(fresh, fresh._layout, target._layout))
        _pass_on(memory_owner(target))
    return target


def _overlaps_itself(tensor: DTensorBase) -> bool:
    """Return whether several elements of the global tensor share memory."""
    reach = 0
    for stride, size in sorted(zip(global_stride(tensor), tensor._layout.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def _pass_on(copy: DTensorBase) -> None:
    """Write a copy to its base."""
    base, index = copy._base_index
    copy._base_version = base, memory_version(base)
    base[index] = copy
    copy._base_version = base, memory_version(base)


def _written(func: Any, target: DTensorBase, args: Any, kwargs: dict[str, Any]) -> DTensorBase:
    """Return a new tensor: the reduced value of `target` after an in-place operator."""
    layout = target._layout
    placements = [REPLICATE if placement.is_partial() else placement for placement in layout.placements]
    complete = layout.replace(placements=placements, order=layout.order)
    with no_torch_function():
        fresh: DTensorBase = tag(redistribute_local(target, layout, complete).clone(), complete)
    func(fresh, *args, **kwargs)
    return fresh


def tensors_written_with(name: str, target: DTensorBase) -> list[DTensorBase]:
    """Return all tensors that a write to this one reaches; raise if the index of a copy in its base is unknown."""
    chain: list[DTensorBase] = []
    while is_copied(target):
        copy = memory_owner(target)
        if "_base_index" not in copy.__dict__:
            refuse_copied(name, copy)
        chain += [target] if target is copy else [target, copy]
        target = copy._base_index[0]
    return [*chain, target]


def refuse_shared_elements(name: str, tensor: DTensorBase) -> None:
    """Raise InPlaceError if several elements of a tensor share memory, so that a write could not tell them apart."""
    if _overlaps_itself(tensor):
        raise InPlaceError(f"{name}_: cannot write to {tensor._layout}, and nothing was written: {_SHARED_ELEMENTS}")


def refuse_unwritable(name: str, tensor: DTensorBase, records: bool) -> None:
    """Raise InPlaceError if autograd would refuse a write, or cannot track it as it tracks writes to views.

    `records`: autograd records the write.
    """
    with no_torch_function():
        reason = _unwritable(tensor, records)
    if reason is not None:
        raise InPlaceError(f"{name}: cannot write to {tensor._layout}, and nothing was written: {reason}")


def _unwritable(tensor: DTensorBase, records: bool) -> str | None:
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return "it was made in inference mode: clone() it first"
    if _overlaps_itself(tensor):
        return _SHARED_ELEMENTS
    if not records:
        return None
    if tensor.requires_grad and tensor.is_leaf:
        return "it is a leaf that requires grad: write under torch.no_grad(), or to a clone()"
    if is_copied(tensor):
        if tensor._copied_by == "unbind":
            return "it is one of several views made by unbind, which torch does not let you write to: use x[i]"
        if tensor._backward_hooks:
            return "it looks like a view but is a copy, and has hooks, which would not be called as for a view"
    if tensor._is_view():
        base: Tensor | None = tensor._base
        if base is not None and base.requires_grad and base.is_leaf:
            return "it is a view of a leaf that requires grad: write under torch.no_grad(), or to a clone()"
        if torch._C._autograd._get_creation_meta(tensor) != torch._C._autograd.CreationMeta.DEFAULT:
            return "it is a view that was made without gradients, or one of several: write to the base"
    return None
