"""`roll`, `flip` and `rot90`.

Along a sharded dimension every rank receives the rows of its part of the result, which is sharded like the input.
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
from shardwright.tensor.rules.shared.basic_index import sharded_over

__all__: list[str] = []


def _all_dims(ndim: int, dims: Any) -> list[int]:
    """Return non-negative dimensions; accept both `flip(0, 1)` and `flip((0, 1))`."""
    while isinstance(dims, list | tuple) and len(dims) == 1 and isinstance(dims[0], list | tuple):
        dims = dims[0]
    return [d % max(ndim, 1) for d in ((dims,) if isinstance(dims, int) else dims)]


def _along(input: Operand, dims: Sequence[int]) -> Strategies:
    labels = [None if d in dims else d for d in range(input.ndim)]
    return Strategies(index_strategies([input], [labels], [labels], terms=[[0]], reduction=None))


@rule("roll")
def _roll(input: Operand, shifts: Any, dims: Any = ()) -> Strategies:
    del shifts
    return _along(input, _all_dims(input.ndim, dims) or range(input.ndim))


@rule("flip")
def _flip(input: Operand, *dims: Any, **named: Any) -> Strategies:
    return _along(input, _all_dims(input.ndim, dims or named["dims"]))


@rule("rot90")
def _rot90(input: Operand, k: int = 1, dims: Sequence[int] = (0, 1)) -> Strategies:
    del k
    return _along(input, _all_dims(input.ndim, dims))


def _windows(layout: Layout, source: Callable[[Region], Region]) -> Halo:
    return Halo(layout, tuple(source(layout.region(rank)) for rank in layout.mesh.ranks))


def _moved(region: Region, extents: dict[int, tuple[int, int]]) -> Region:
    """Return a region with another (offset, size) along some dimensions."""
    offset, size = list(region.offset), list(region.size)
    for dim, (start, length) in extents.items():
        offset[dim], size[dim] = (start, length) if length else (0, 0)
    return Region(offset, size)


def _tagged(layout: Layout, local: Tensor, input: Tensor) -> Any:
    return tag(local.clone() if local is input else local, layout)


@composite("flip")
def _flip_sharded(input: Any, *dims: Any, **named: Any) -> Any:
    layout = layout_of(input)
    axes = _all_dims(input.ndim, dims or named["dims"])
    sharded = [d for d in axes if d < layout.ndim and sharded_over(layout, d)]
    if not sharded or len(set(axes)) < len(axes):
        return NotImplemented

    def mirrored(own: Region) -> Region:
        return _moved(own, {d: (layout.shape[d] - own.offset[d] - own.size[d], own.size[d]) for d in sharded})

    with no_torch_function():
        return _tagged(layout, gather_halo(input, _windows(layout, mirrored), "flip").flip(axes), input)


@composite("fliplr")
def _fliplr(input: Any) -> Any:
    return input.flip(1) if input.ndim > 1 else NotImplemented


@composite("flipud")
def _flipud(input: Any) -> Any:
    return input.flip(0) if input.ndim else NotImplemented


@composite("rot90")
def _rot90_sharded(input: Any, k: int = 1, dims: Sequence[int] = (0, 1)) -> Any:
    axes = _all_dims(input.ndim, dims)
    if (
        len(axes) != 2
        or axes[0] == axes[1]
        or input.ndim < 2
        or not any(sharded_over(layout_of(input), d) for d in axes)
    ):
        return NotImplemented
    if k % 4 == 0:
        return input.clone()
    if k % 4 == 2:
        return input.flip(axes)
    return input.flip(axes[k % 4 == 1]).transpose(*axes).contiguous()


@composite("roll")
def _roll_sharded(input: Any, shifts: Any, dims: Any = ()) -> Any:
    layout = layout_of(input)
    by = [shifts] if isinstance(shifts, int) else list(shifts)
    axes = _all_dims(input.ndim, dims)
    if not axes and input.ndim > 1 and len(by) == 1:
        return input.flatten().roll(by[0], 0).reshape(input.shape)
    axes = axes or [0]
    if len(axes) != len(by) or not any(sharded_over(layout, d) for d in axes) or 0 in layout.shape:
        return NotImplemented
    with no_torch_function():
        rolled: Tensor = input
        for dim, shift in zip(axes, by, strict=True):
            rolled = _rolled(rolled, layout, dim, shift % layout.shape[dim])
        return _tagged(layout, rolled, input)


def _rolled(local: Tensor, layout: Layout, dim: int, shift: int) -> Tensor:
    """Roll along one dimension: rows from the end, then rows from the front."""
    if not shift or not sharded_over(layout, dim):
        return local.roll(shift, dim)
    size = layout.shape[dim]

    def from_end(own: Region) -> Region:
        start, stop = own.offset[dim], min(own.offset[dim] + own.size[dim], shift)
        return _moved(own, {dim: (start - shift + size, max(0, stop - start))})

    def from_front(own: Region) -> Region:
        start, stop = max(own.offset[dim], shift), own.offset[dim] + own.size[dim]
        return _moved(own, {dim: (start - shift, max(0, stop - start))})

    parts = [gather_halo(local, _windows(layout, source), "roll") for source in (from_end, from_front)]
    return torch.cat(parts, dim)
