"""`x[...]`, `x[...] = v` and the equivalent functions."""

from __future__ import annotations

import operator
from dataclasses import replace
from types import EllipsisType, NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwright.tensor.base.registry import composite, rule
from shardwright.tensor.base.strategy import MeshStrategy, Operand, Strategies
from shardwright.tensor.base.tagging import DTensorBase, layout_of, no_torch_function, tag_replicated
from shardwright.tensor.base.writes import storage_of
from shardwright.tensor.dispatch.write_through import is_lookup_result, overwrite, refuse_unwritable
from shardwright.tensor.rules.index.gather import advanced_strategies
from shardwright.tensor.rules.index.masked import index_by_mask
from shardwright.tensor.rules.index.scatter import index_put_strategies
from shardwright.tensor.rules.shared.basic_index import (
    Item,
    indexing_strategy,
    needs_redistribution,
    normalize_index,
    sharded_over,
)

__all__: list[str] = []


@rule("__getitem__")
def _getitem(input: Operand, index: Any) -> MeshStrategy | Strategies | None:
    items = index if isinstance(index, tuple) else (index,)
    if all(_is_basic(item) for item in items):
        torch.empty(input.shape, device="meta")[index]  # torch's own checks, with global sizes, on every rank
        return indexing_strategy(input, normalize_index(index, input.shape))
    if all(_is_index_tensor(item) or _is_full_slice(item) for item in items):
        indices = [item if isinstance(item, Operand) else None for item in items]
        return advanced_strategies(input, indices)
    return None  # masks (the size of the result depends on the values), and invalid indices


def _is_index_tensor(item: Any) -> bool:
    return isinstance(item, Operand) and item.dtype not in (torch.bool, torch.uint8)


def _is_full_slice(item: Any) -> bool:
    return isinstance(item, slice) and item == slice(None)


def _is_basic(item: Any) -> bool:
    if type(item) is slice:
        return all(type(part) in (int, NoneType) for part in (item.start, item.stop, item.step))
    return type(item) in (int, NoneType, EllipsisType)


@composite("__getitem__")
def _getitem_in_steps(input: Any, index: Any) -> Any:
    """Index by tensors or lists combined with slices: slices first, then the rest."""
    given = index if isinstance(index, tuple) else (index,)
    if all(_is_basic(item) for item in given):
        return NotImplemented
    items = tuple(_normalize_item(item, input) for item in given)
    masks = [item for item in items if _is_mask(item)]
    if len(masks) == 1 and all(_is_basic(item) or item is masks[0] for item in items):
        basic, advanced = _split_index(items, input.ndim)
        indexed = input if _are_full_slices(basic) else input[basic]
        return index_by_mask(indexed, masks[0], next(axis for axis, item in enumerate(advanced) if item is masks[0]))
    if any(_is_mask_or_invalid(item) for item in items):
        return NotImplemented
    if all(_is_basic(item) for item in items):
        return input[items]
    if _are_tensors(given, items):
        return NotImplemented
    basic, advanced = _split_index(items, input.ndim)
    result = input[advanced] if _are_full_slices(basic) else input[basic][advanced]
    if result._layout.is_partial and not layout_of(input).is_partial:
        result._lookup_result = True  # a copy in torch, too: it may be written to
    return result


def _are_tensors(given: tuple[Any, ...], items: tuple[Any, ...]) -> bool:
    """True if the caller passed only tensors and `:`; a 0-dimensional tensor counts as an integer."""
    return all(
        _is_full_slice(item) or (isinstance(item, DTensorBase) and item is was)
        for was, item in zip(given, items, strict=True)
    )


def _are_full_slices(basic: tuple[Any, ...]) -> bool:
    return all(_is_full_slice(item) for item in basic)


def _normalize_item(item: Any, like: Any) -> Any:
    """Convert an item to an int, a slice of ints or a DTensor where possible."""
    if isinstance(item, slice):
        parts = (item.start, item.stop, item.step)
        return slice(*(part if part is None else int(operator.index(part)) for part in parts))
    if isinstance(item, np.integer):
        return int(item)
    if isinstance(item, DTensorBase):
        counts = not (item.dtype.is_floating_point or item.dtype.is_complex or item.dtype == torch.bool)
        return int(item.item()) if counts and not item.ndim else item
    if isinstance(item, np.ndarray | range) or (isinstance(item, list) and all(type(i) in (int, bool) for i in item)):
        values = torch.as_tensor(item if isinstance(item, np.ndarray) else list(item), device=like.device)
        values = values if values.numel() else values.long()
        layout = layout_of(like)
        return tag_replicated(values, layout.mesh)
    return item


def _is_mask(item: Any) -> bool:
    return isinstance(item, DTensorBase) and item.dtype == torch.bool


def _is_mask_or_invalid(item: Any) -> bool:
    """True for masks and for items that are not part of a valid index."""
    if isinstance(item, DTensorBase):
        return item.dtype in (torch.bool, torch.uint8)
    return not _is_basic(item)


def _split_index(items: tuple[Any, ...], ndim: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Split an index into a basic one, and an advanced one to apply to its result."""
    used = sum(item.ndim if _is_mask(item) else item is not None and item is not Ellipsis for item in items)
    basic: list[Any] = []
    advanced: list[Any] = []
    for item in items:
        if item is Ellipsis:
            basic += [slice(None)] * (ndim - used)
            advanced += [slice(None)] * (ndim - used)
        elif isinstance(item, DTensorBase):
            basic += [slice(None)] * (item.ndim if _is_mask(item) else 1)
            advanced.append(item)
        else:
            basic.append(item)
            advanced += [] if isinstance(item, int) else [slice(None)]
    return tuple(basic), tuple(advanced)


@rule("__setitem__")
def _setitem(input: Operand, index: Any, value: Any) -> Strategies | None:
    """Write by index tensors; `_setitem_in_steps` handles everything else."""
    items = index if isinstance(index, tuple) else (index,)
    indices = [item if isinstance(item, Operand) else None for item in items]
    advanced_only = all(_is_index_tensor(item) or _is_full_slice(item) for item in items)
    if not advanced_only or all(i is None for i in indices) or len(indices) > input.ndim:
        return None
    strategies = index_put_strategies(input, indices, value if isinstance(value, Operand) else None)
    return None if strategies is None else replace(strategies, shapes=(input.shape,), unmoved=0)


@composite("__setitem__")
def _setitem_in_steps(input: Any, index: Any, value: Any) -> Any:
    """Write to the view that the index selects: to the overlap of every shard."""
    if is_lookup_result(input):
        overwrite(torch.Tensor.__setitem__, input, index, value)
        return None
    if type(value) not in (int, float, bool, complex) and not isinstance(value, DTensorBase):
        return NotImplemented
    given = index if isinstance(index, tuple) else (index,)
    items = tuple(_normalize_item(item, input) for item in given)
    if any(isinstance(was, DTensorBase) and was is not item for was, item in zip(given, items, strict=True)):
        input[items] = value
        return None
    if all(_is_basic(item) for item in items):
        return _write(input, items, value)
    if len(items) == 1 and isinstance(items[0], DTensorBase) and items[0].dtype == torch.bool:
        return _write_masked(input, items[0], value)
    if any(_is_mask_or_invalid(item) for item in items) or _are_tensors(given, items):
        return NotImplemented
    basic, advanced = _split_index(items, input.ndim)
    normalized = normalize_index(basic, input.shape)
    layout = layout_of(input)
    int_dims = [
        dim for dim, item in enumerate(item for item in normalized if item is not None) if isinstance(item, int)
    ]
    if needs_redistribution(layout, normalized) or any(sharded_over(layout, dim) for dim in int_dims):
        return NotImplemented
    target = input if _are_full_slices(basic) else input[basic]
    target[advanced] = value
    return None


def _write(input: Any, items: tuple[Any, ...], value: Any) -> Any:
    layout = layout_of(input)
    sharding = [sharded_over(layout, dim) for dim in range(layout.ndim)]
    kept_dims: list[int] = []
    if any(sharding) and (int in map(type, items) or max(map(len, sharding)) > 1):
        torch.empty(layout.shape, device="meta")[items]  # torch's own checks, with global sizes, on every rank
        normalized = normalize_index(items, layout.shape)
        if needs_redistribution(layout, normalized):
            return NotImplemented
        items, kept_dims = _slice_sharded_ints(normalized, sharding)
    target = input[items]
    if isinstance(value, Tensor):
        target.copy_(_before_write(_align(value, target.ndim, kept_dims), target))
    elif value == 0 and layout.is_partial:
        target.zero_()
    else:
        target.fill_(value)
    return None


def _before_write(value: Any, target: Any) -> Any:
    """Return a value that the write does not change: `x[:] = x[2]` reads the row before it writes."""
    if storage_of(value) is not storage_of(target):
        return value
    with no_torch_function():
        same_view = value.data_ptr() == target.data_ptr() and value.stride() == target.stride()
    return value if same_view and layout_of(value) is layout_of(target) else value.clone()


def _slice_sharded_ints(index: tuple[Item, ...], sharding: list[tuple[int, ...]]) -> tuple[tuple[Item, ...], list[int]]:
    """Turn integers of sharded dimensions into slices of length 1, views on every rank; return their dimensions too."""
    items: list[Item] = []
    kept_dims: list[int] = []
    dim = out_dim = 0
    for item in index:
        if isinstance(item, int) and sharding[dim]:
            kept_dims.append(out_dim)
            items.append(slice(item, item + 1))
        else:
            items.append(item)
        dim += item is not None
        out_dim += not isinstance(items[-1], int)
    return tuple(items), kept_dims


def _align(value: Any, ndim: int, kept_dims: list[int]) -> Any:
    """Insert the dimensions of size 1 that the target has kept into a value; leading ones are dropped."""
    while value.ndim > ndim - len(kept_dims) and value.shape[0] == 1:
        value = value.squeeze(0)
    for dim in reversed(kept_dims):
        trailing = ndim - 1 - dim
        if value.ndim > trailing:
            value = value.unsqueeze(value.ndim - trailing)
    return value


def _write_masked(input: Any, mask: Any, value: Any) -> Any:
    """Write where a mask over the leading dimensions is True: one value, one row for all, or one row each."""
    if tuple(mask.shape) != tuple(input.shape[: mask.ndim]) or not mask.ndim:
        return NotImplemented
    rows, count = mask, mask.ndim
    for _ in range(input.ndim - count):
        mask = mask.unsqueeze(-1)
    if not isinstance(value, Tensor):
        input.masked_fill_(mask, value)
    elif value.numel() == 1:
        input.masked_fill_(mask, value.reshape(()).to(input.dtype))
    elif layout_of(input).is_partial:
        return NotImplemented
    elif value.ndim <= input.ndim - count:
        refuse_unwritable("x[mask] = value", input, records=False)  # an expanded tensor, to which torch writes rows
        input.copy_(torch.where(mask, value.to(input.dtype), input))
    elif mask.is_meta or tuple(value.shape) == (int(rows.sum().item()), *input.shape[count:]):
        refuse_unwritable("x[mask] = value", input, records=False)
        input.copy_(input.masked_scatter(mask, value.to(input.dtype)))
    else:
        return NotImplemented
    return None


@rule("slice")
def _slice(input: Operand, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> MeshStrategy | None:
    if not all(type(part) is int or part is None for part in (start, end, step)) or not input.ndim:
        return None
    return indexing_strategy(
        input, normalize_index((*[slice(None)] * input.dim(dim), slice(start, end, step)), input.shape)
    )


@composite("narrow")
def _narrow_from(input: Any, dim: int, start: Any, length: int) -> Any:
    """`start` is a tensor; on meta tensors any start gives the same shape."""
    if not isinstance(start, DTensorBase):
        return NotImplemented
    return input.narrow(dim, 0 if start.is_meta else int(start.item()), length)


@rule("narrow")
def _narrow(input: Operand, dim: int, start: Any, length: int) -> MeshStrategy | None:
    if type(start) is not int:
        return None
    torch.empty(input.shape, device="meta").narrow(dim, start, length)
    axis = input.dim(dim)
    first = start if start >= 0 else start + input.shape[axis]
    return indexing_strategy(input, normalize_index((*[slice(None)] * axis, slice(first, first + length)), input.shape))


@rule("select")
def _select(input: Operand, dim: int, index: Any) -> MeshStrategy | None:
    if type(index) is not int:
        return None
    torch.empty(input.shape, device="meta").select(dim, index)
    return indexing_strategy(input, normalize_index((*[slice(None)] * input.dim(dim), index), input.shape))
