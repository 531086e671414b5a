"""Writes to copies that look like views (`x[i] += 1` along a sharded dimension), and to partial results of lookups.

A rank may hold a partial value only: the value is completed, written to, and stored as partial values again. What is
written to a copy is then written to the original, at the index it was picked with. Everything that could raise comes
before the first write: a refused write leaves the copy and the original as they were.
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

__all__ = ["is_lookup_result", "overwrite", "refuse_unwritable", "tensors_written_with", "write_through"]


def is_lookup_result(tensor: Any) -> bool:
    """Return whether this is a partial result of a lookup (`x[indices]`), which torch's user may overwrite."""
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
    """Call an in-place operator on a copy that looks like a view, and write to the original too. Collective.

    The copy must be up to date. Raise InPlaceError where the original cannot be written to: nothing is written then.
    """
    name = canonical_name(func)[0]
    chain = tensors_written_with(name, target)
    if _overlaps_itself(target):
        raise InPlaceError(
            f"{name}: {target._layout} has elements that share memory, and is a view of a copy, because "
            f"{target._copied_by} of a sharded dimension needed communication: write to the original, or to a clone()"
        )
    fresh = _written(func, target, args, kwargs)
    with no_torch_function():
        # As torch does: a write to a detached alias is not recorded, even if the original requires grad.
        records = torch.is_grad_enabled() and (target.requires_grad or fresh.requires_grad)
    for tensor in chain:
        refuse_unwritable(name, tensor, records)
    with torch.set_grad_enabled(records):
        with no_torch_function():
            target.copy_(redistribute_local(fresh, fresh._layout, target._layout))
        _pass_on(memory_owner(target))
    return target


def _overlaps_itself(tensor: DTensorBase) -> bool:
    """Return whether several elements of the global tensor are one place in memory."""
    reach = 0
    for stride, size in sorted(zip(global_stride(tensor), tensor._layout.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def _pass_on(copy: DTensorBase) -> None:
    """Write a copy to the original it was picked of."""
    base, index = copy._base_index
    copy._base_version = base, memory_version(base)
    base[index] = copy
    copy._base_version = base, memory_version(base)


def _written(func: Any, target: DTensorBase, args: Any, kwargs: dict[str, Any]) -> DTensorBase:
    """Return a new tensor: the complete value of `target`, written to by an in-place operator."""
    layout = target._layout
    placements = [REPLICATE if placement.is_partial() else placement for placement in layout.placements]
    complete = layout.replace(placements=placements, order=layout.order)
    with no_torch_function():
        fresh: DTensorBase = tag(redistribute_local(target, layout, complete).clone(), complete)
    func(fresh, *args, **kwargs)
    return fresh


def tensors_written_with(name: str, target: DTensorBase) -> list[DTensorBase]:
    """Return all tensors that a write to this one writes to; raise where no index says what of the original it is."""
    chain: list[DTensorBase] = []
    while is_copied(target):
        copy = memory_owner(target)
        if "_base_index" not in copy.__dict__:
            refuse_copied(name, copy)
        chain += [target] if target is copy else [target, copy]
        target = copy._base_index[0]
    return [*chain, target]


def refuse_unwritable(name: str, tensor: DTensorBase, records: bool) -> None:
    """Raise InPlaceError where autograd would refuse a write, or could not follow it as torch follows a view's.

    `records`: a gradient of what is written is recorded.
    """
    with no_torch_function():
        reason = _unwritable(tensor, records)
    if reason is not None:
        raise InPlaceError(f"{name}: a write to {tensor._layout} is refused, and nothing was written: {reason}")


def _unwritable(tensor: DTensorBase, records: bool) -> str | None:
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return "it was made in inference mode: clone() it first"
    if _overlaps_itself(tensor):
        return "several of its elements are one in memory, as expand() and unfold() make them: clone() it first"
    if not records:
        return None
    if tensor.requires_grad and tensor.is_leaf:
        return "it is a leaf that requires grad: write under torch.no_grad(), or to a clone()"
    if is_copied(tensor):
        if tensor._copied_by == "unbind":
            return "it is one of several views that unbind made, which torch does not let you write to: use x[i]"
        if tensor._backward_hooks:
            return "it looks like a view but is a copy, and has hooks, which would not be called as a view's are"
    if tensor._is_view():
        base: Tensor | None = tensor._base
        if base is not None and base.requires_grad and base.is_leaf:
            return "it is a view of a leaf that requires grad: write under torch.no_grad(), or to a clone()"
        if torch._C._autograd._get_creation_meta(tensor) != torch._C._autograd.CreationMeta.DEFAULT:
            return "it is a view that was made without gradients, or one of several: write to the original"
    return None
