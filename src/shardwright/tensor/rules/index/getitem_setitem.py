"""Indexing: `x[...]`, `x[...] = v` and the functions that say the same in words."""

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
from shardwright.tensor.dispatch.write_through import is_lookup_result, overwrite
from shardwright.tensor.rules.index.gather import advanced_strategies
from shardwright.tensor.rules.index.masked import pick_masked
from shardwright.tensor.rules.index.scatter import written_strategies
from shardwright.tensor.rules.shared.pick import Item, cutting, moves, pick, resolved

__all__: list[str] = []


@rule("__getitem__")
def _getitem(input: Operand, index: Any) -> MeshStrategy | Strategies | None:
    items = index if isinstance(index, tuple) else (index,)
    if all(_is_basic(item) for item in items):
        torch.empty(input.shape, device="meta")[index]  # torch's own checks, with global sizes, on every rank
        return pick(input, resolved(index, input.shape))
    if all(_is_numbers(item) or _is_all(item) for item in items):
        indices = [item if isinstance(item, Operand) else None for item in items]
        return advanced_strategies(input, indices)
    return None  # masks, whose result has as many elements as the values say, and what torch refuses


def _is_numbers(item: Any) -> bool:
    return isinstance(item, Operand) and item.dtype not in (torch.bool, torch.uint8)


def _is_all(item: Any) -> bool:
    return isinstance(item, slice) and item == slice(None)


def _is_basic(item: Any) -> bool:
    if type(item) is slice:
        return all(type(part) in (int, NoneType) for part in (item.start, item.stop, item.step))
    return type(item) in (int, NoneType, EllipsisType)


@composite("__getitem__")
def _getitem_in_steps(input: Any, index: Any) -> Any:
    """Numbers in tensors and lists beside slices: first the slices, then the rest."""
    given = index if isinstance(index, tuple) else (index,)
    if all(_is_basic(item) for item in given):
        return NotImplemented
    items = tuple(_settled(item, input) for item in given)
    masks = [item for item in items if _is_mask(item)]
    if len(masks) == 1 and all(_is_basic(item) or item is masks[0] for item in items):
        basic, advanced = _in_two(items, input.ndim)
        picked = input if _is_everything(basic) else input[basic]
        return pick_masked(picked, masks[0], next(place for place, item in enumerate(advanced) if item is masks[0]))
    if any(_chooses(item) for item in items):
        return NotImplemented
    if all(_is_basic(item) for item in items):
        return input[items]
    if _are_tensors(given, items):
        return NotImplemented
    basic, advanced = _in_two(items, input.ndim)
    found = input[advanced] if _is_everything(basic) else input[basic][advanced]
    if found._layout.is_partial and not layout_of(input).is_partial:
        found._lookup_result = True  # a copy in torch, too: it may be written to
    return found


def _are_tensors(given: tuple[Any, ...], items: tuple[Any, ...]) -> bool:
    """Whether the caller gave tensors alone, beside `:`; a tensor without dimensions means a number."""
    return all(
        _is_all(item) or (isinstance(item, DTensorBase) and item is was) for was, item in zip(given, items, strict=True)
    )


def _is_everything(basic: tuple[Any, ...]) -> bool:
    return all(_is_all(item) for item in basic)


def _settled(item: Any, beside: Any) -> Any:
    """An item as a number, a slice of numbers, or a DTensor, where that is what it means."""
    if isinstance(item, slice):
        parts = (item.start, item.stop, item.step)
        return slice(*(part if part is None else int(operator.index(part)) for part in parts))
    if isinstance(item, np.integer):
        return int(item)
    if isinstance(item, DTensorBase):
        counts = not (item.dtype.is_floating_point or item.dtype.is_complex or item.dtype == torch.bool)
        return int(item.item()) if counts and not item.ndim else item
    if isinstance(item, np.ndarray | range) or (isinstance(item, list) and all(type(i) in (int, bool) for i in item)):
        values = torch.as_tensor(item if isinstance(item, np.ndarray) else list(item), device=beside.device)
        values = values if values.numel() else values.long()
        layout = layout_of(beside)
        return tag_replicated(values, layout.mesh)
    return item


def _is_mask(item: Any) -> bool:
    return isinstance(item, DTensorBase) and item.dtype == torch.bool


def _chooses(item: Any) -> bool:
    """Whether an item is a mask, or nothing that an index is made of."""
    if isinstance(item, DTensorBase):
        return item.dtype in (torch.bool, torch.uint8)
    return not _is_basic(item)


def _in_two(items: tuple[Any, ...], ndim: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """An index as two: what slices and numbers pick, and what tensors pick of that."""
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
    """Written to where numbers in tensors say; everything else is taken apart before."""
    items = index if isinstance(index, tuple) else (index,)
    indices = [item if isinstance(item, Operand) else None for item in items]
    pure = all(_is_numbers(item) or _is_all(item) for item in items)
    if not pure or all(i is None for i in indices) or len(indices) > input.ndim:
        return None
    strategies = written_strategies(input, indices, value if isinstance(value, Operand) else None)
    return None if strategies is None else replace(strategies, shapes=(input.shape,), unmoved=0)


@composite("__setitem__")
def _setitem_in_steps(input: Any, index: Any, value: Any) -> Any:
    """A write to the view that the index is: to the overlap of every shard, and nowhere else."""
    if is_lookup_result(input):
        overwrite(torch.Tensor.__setitem__, input, index, value)
        return None
    if type(value) not in (int, float, bool, complex) and not isinstance(value, DTensorBase):
        return NotImplemented
    given = index if isinstance(index, tuple) else (index,)
    items = tuple(_settled(item, input) for item in given)
    if any(isinstance(was, DTensorBase) and was is not item for was, item in zip(given, items, strict=True)):
        input[items] = value
        return None
    if all(_is_basic(item) for item in items):
        return _write(input, items, value)
    if len(items) == 1 and isinstance(items[0], DTensorBase) and items[0].dtype == torch.bool:
        return _write_masked(input, items[0], value)
    if any(_chooses(item) for item in items) or _are_tensors(given, items):
        return NotImplemented
    basic, advanced = _in_two(items, input.ndim)
    picked = resolved(basic, input.shape)
    layout = layout_of(input)
    places = [dim for dim, item in enumerate(item for item in picked if item is not None) if isinstance(item, int)]
    if moves(layout, picked) or any(cutting(layout, dim) for dim in places):
        return NotImplemented
    target = input if _is_everything(basic) else input[basic]
    target[advanced] = value
    return None


def _write(input: Any, items: tuple[Any, ...], value: Any) -> Any:
    layout = layout_of(input)
    cuts = [cutting(layout, dim) for dim in range(layout.ndim)]
    spots: list[int] = []
    if any(cuts) and (int in map(type, items) or max(map(len, cuts)) > 1):
        torch.empty(layout.shape, device="meta")[items]  # torch's own checks, with global sizes, on every rank
        picked = resolved(items, layout.shape)
        if moves(layout, picked):
            return NotImplemented
        items, spots = _sliced(picked, cuts)
    target = input[items]
    if isinstance(value, Tensor):
        target.copy_(_read_first(_beside(value, target.ndim, spots), target))
    elif value == 0 and layout.is_partial:
        target.zero_()
    else:
        target.fill_(value)
    return None


def _read_first(value: Any, target: Any) -> Any:
    """Return a value that the write does not change: `x[:] = x[2]` reads the row before it writes."""
    if storage_of(value) is not storage_of(target):
        return value
    with no_torch_function():
        itself = value.data_ptr() == target.data_ptr() and value.stride() == target.stride()
    return value if itself and layout_of(value) is layout_of(target) else value.clone()


def _sliced(picked: tuple[Item, ...], cuts: list[tuple[int, ...]]) -> tuple[tuple[Item, ...], list[int]]:
    """Single places of cut dimensions as slices of one, which are views on every rank; and where those stand."""
    items: list[Item] = []
    spots: list[int] = []
    dim = out_dim = 0
    for item in picked:
        if isinstance(item, int) and cuts[dim]:
            spots.append(out_dim)
            items.append(slice(item, item + 1))
        else:
            items.append(item)
        dim += item is not None
        out_dim += not isinstance(items[-1], int)
    return tuple(items), spots


def _beside(value: Any, ndim: int, spots: list[int]) -> Any:
    """A value with dimensions of one where the target has kept some; ones in front of it are dropped."""
    while value.ndim > ndim - len(spots) and value.shape[0] == 1:
        value = value.squeeze(0)
    for spot in reversed(spots):
        behind = ndim - 1 - spot
        if value.ndim > behind:
            value = value.unsqueeze(value.ndim - behind)
    return value


def _write_masked(input: Any, mask: Any, value: Any) -> Any:
    """Values wherever a mask over the leading dimensions is true: one, one row for all, or one after another."""
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
        input.copy_(torch.where(mask, value.to(input.dtype), input))
    elif mask.is_meta or tuple(value.shape) == (int(rows.sum().item()), *input.shape[count:]):
        input.copy_(input.masked_scatter(mask, value.to(input.dtype)))
    else:
        return NotImplemented
    return None


@rule("slice")
def _slice(input: Operand, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> MeshStrategy | None:
    if not all(type(part) is int or part is None for part in (start, end, step)) or not input.ndim:
        return None
    return pick(input, resolved((*[slice(None)] * input.dim(dim), slice(start, end, step)), input.shape))


@composite("narrow")
def _narrow_from(input: Any, dim: int, start: Any, length: int) -> Any:
    """From where a tensor says; where there are no values, the shape is the same anywhere."""
    if not isinstance(start, DTensorBase):
        return NotImplemented
    return input.narrow(dim, 0 if start.is_meta else int(start.item()), length)


@rule("narrow")
def _narrow(input: Operand, dim: int, start: Any, length: int) -> MeshStrategy | None:
    if type(start) is not int:
        return None
    torch.empty(input.shape, device="meta").narrow(dim, start, length)
    place = input.dim(dim)
    first = start if start >= 0 else start + input.shape[place]
    return pick(input, resolved((*[slice(None)] * place, slice(first, first + length)), input.shape))


@rule("select")
def _select(input: Operand, dim: int, index: Any) -> MeshStrategy | None:
    if type(index) is not int:
        return None
    torch.empty(input.shape, device="meta").select(dim, index)
    return pick(input, resolved((*[slice(None)] * input.dim(dim), index), input.shape))
