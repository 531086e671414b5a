"""Rows in another order: `roll`, `flip`, `rot90`.

Along a cut dimension every rank gets the rows that its part of the result is made of from those that have them, and
the result is cut as the tensor was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.layout import Layout, Region
from shardwright.tensor.base.registry import composite, rule
from shardwright.tensor.base.strategy import Operand, Strategies, index_strategies
from shardwright.tensor.base.tagging import layout_of, no_torch_function, tag
from shardwright.tensor.redistribute.halo import Halo, gather_halo
from shardwright.tensor.rules.shared.pick import cutting

__all__: list[str] = []


def _all_dims(ndim: int, dims: Any) -> list[int]:
    """Dimensions by number from the start; `flip(0, 1)` and `flip((0, 1))` are one."""
    while isinstance(dims, list | tuple) and len(dims) == 1 and isinstance(dims[0], list | tuple):
        dims = dims[0]
    return [d % max(ndim, 1) for d in ((dims,) if isinstance(dims, int) else dims)]


def _beside(input: Operand, dims: Sequence[int]) -> Strategies:
    labels = [None if d in dims else d for d in range(input.ndim)]
    return Strategies(index_strategies([input], [labels], [labels], terms=[[0]], reduction=None))


@rule("roll")
def _roll(input: Operand, shifts: Any, dims: Any = ()) -> Strategies:
    del shifts
    return _beside(input, _all_dims(input.ndim, dims) or range(input.ndim))


@rule("flip")
def _flip(input: Operand, *dims: Any, **named: Any) -> Strategies:
    return _beside(input, _all_dims(input.ndim, dims or named["dims"]))


@rule("rot90")
def _rot90(input: Operand, k: int = 1, dims: Sequence[int] = (0, 1)) -> Strategies:
    del k
    return _beside(input, _all_dims(input.ndim, dims))


def _windows(layout: Layout, seen: Callable[[Region], Region]) -> Halo:
    return Halo(layout, tuple(seen(layout.region(rank)) for rank in layout.mesh.ranks))


def _placed(region: Region, places: dict[int, tuple[int, int]]) -> Region:
    """A region with other places along some dimensions: where they begin, and how many they are."""
    offset, size = list(region.offset), list(region.size)
    for dim, (start, length) in places.items():
        offset[dim], size[dim] = (start, length) if length else (0, 0)
    return Region(offset, size)


def _tagged(layout: Layout, local: Tensor, input: Tensor) -> Any:
    return tag(local.clone() if local is input else local, layout)


@composite("flip")
def _flip_cut(input: Any, *dims: Any, **named: Any) -> Any:
    layout = layout_of(input)
    over = _all_dims(input.ndim, dims or named["dims"])
    cut = [d for d in over if d < layout.ndim and cutting(layout, d)]
    if not cut or len(set(over)) < len(over):
        return NotImplemented

    def mirrored(own: Region) -> Region:
        return _placed(own, {d: (layout.shape[d] - own.offset[d] - own.size[d], own.size[d]) for d in cut})

    with no_torch_function():
        return _tagged(layout, gather_halo(input, _windows(layout, mirrored), "flip").flip(over), input)


@composite("fliplr")
def _fliplr(input: Any) -> Any:
    return input.flip(1) if input.ndim > 1 else NotImplemented


@composite("flipud")
def _flipud(input: Any) -> Any:
    return input.flip(0) if input.ndim else NotImplemented


@composite("rot90")
def _rot90_cut(input: Any, k: int = 1, dims: Sequence[int] = (0, 1)) -> Any:
    over = _all_dims(input.ndim, dims)
    if len(over) != 2 or over[0] == over[1] or input.ndim < 2 or not any(cutting(layout_of(input), d) for d in over):
        return NotImplemented
    if k % 4 == 0:
        return input.clone()
    if k % 4 == 2:
        return input.flip(over)
    return input.flip(over[k % 4 == 1]).transpose(*over).contiguous()


@composite("roll")
def _roll_cut(input: Any, shifts: Any, dims: Any = ()) -> Any:
    layout = layout_of(input)
    by = [shifts] if isinstance(shifts, int) else list(shifts)
    over = _all_dims(input.ndim, dims)
    if not over and input.ndim > 1 and len(by) == 1:
        return input.flatten().roll(by[0], 0).reshape(input.shape)
    over = over or [0]
    if len(over) != len(by) or not any(cutting(layout, d) for d in over) or 0 in layout.shape:
        return NotImplemented
    with no_torch_function():
        rolled: Tensor = input
        for dim, shift in zip(over, by, strict=True):
            rolled = _rolled(rolled, layout, dim, shift % layout.shape[dim])
        return _tagged(layout, rolled, input)


def _rolled(local: Tensor, layout: Layout, dim: int, shift: int) -> Tensor:
    """Rolled along one dimension: what comes from the end, then what comes from the front."""
    if not shift or not cutting(layout, dim):
        return local.roll(shift, dim)
    size = layout.shape[dim]

    def from_end(own: Region) -> Region:
        start, stop = own.offset[dim], min(own.offset[dim] + own.size[dim], shift)
        return _placed(own, {dim: (start - shift + size, max(0, stop - start))})

    def from_front(own: Region) -> Region:
        start, stop = max(own.offset[dim], shift), own.offset[dim] + own.size[dim]
        return _placed(own, {dim: (start - shift, max(0, stop - start))})

    parts = [gather_halo(local, _windows(layout, seen), "roll") for seen in (from_end, from_front)]
    return torch.cat(parts, dim)
