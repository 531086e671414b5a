"""Resizing images, and sampling them at given places: batch and channels are independent of each other.

Along a cut dimension of space, an image is enlarged by a whole number where it is, with a row or two of its
neighbours; other sizes need the dimension whole. Of a grid of places to sample, every part may be cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from shardwright.tensor.base.registry import rule
from shardwright.tensor.base.strategy import Labels, Local, LocalContext, Operand, Strategies, index_strategies
from shardwright.tensor.redistribute.halo import gather_halo
from shardwright.tensor.rules.shared.neighbourhood import (
    Reach,
    by_halo,
    each,
    empty_results,
    halo_of,
    or_nothing,
    pieces_on,
    where_cut,
    with_halo,
)
from shardwright.tensor.rules.shared.pick import first_tensor

__all__: list[str] = []


@final
@dataclass(frozen=True, slots=True)
class _Enlarged:
    """Every input becomes `times` outputs, which look at so many neighbours on either side."""

    size: int
    times: int
    neighbours: int

    @property
    def result(self) -> int:
        """Of the output."""
        return self.size * self.times

    def needed(self, start: int, stop: int) -> tuple[int, int]:
        """The inputs they come from, and their neighbours."""
        return start // self.times - self.neighbours, (stop - 1) // self.times + 1 + self.neighbours

    def border(self, place: int) -> int:
        """Outputs stay where their input is."""
        return place * self.times


# How many neighbours on either side an output looks at, and whether corners may be aligned.
_MODES = {
    "upsample_nearest{}d": (0, False),
    "_upsample_nearest_exact{}d": (0, False),
    "upsample_linear1d": (1, True),
    "upsample_bilinear2d": (1, True),
    "upsample_trilinear3d": (1, True),
    "upsample_bicubic2d": (2, True),
}
# They blur by the scale. The last came with torch 2.13.
_BLURRING = [f"_upsample_{how}2d_aa" for how in ("bilinear", "bicubic", "lanczos")]
_WHOLE = [name for name in _BLURRING if hasattr(torch._C._nn, name)]


def _resized(
    name: str, spatial: int, neighbours: int, corners: bool, halo: bool, input: Operand, *args: Any, **named: Any
) -> Strategies:
    labels: Labels = [0, 1, *[None] * spatial]
    linear = input.dtype.is_floating_point or not neighbours  # a blend of whole numbers is rounded
    at = index_strategies([input], [labels], [labels], terms=[[0]] if linear else None, reduction=None)
    if not halo:
        return Strategies(at, run=or_nothing)
    sizes, scales, aligned = _numbers(spatial, corners, *args, **named)
    reaches = {} if aligned else _enlarged(input, sizes, scales, neighbours)
    options = (False,) if corners else ()
    return Strategies(with_halo(at, input, reaches, 0, 1), run=partial(_local, name, reaches, options, scales))


def _numbers(
    spatial: int,
    corners: bool,
    output_size: Any,
    *rest: Any,
    align_corners: bool = False,
    scale_factors: Any = None,
    **scales: Any,
) -> tuple[Any, tuple[float | None, ...], bool]:
    """Sizes of the result (or None), scales, and whether corners are aligned, however the call spells them."""
    given = list(rest)
    if corners and given:
        align_corners = given.pop(0)
    by_number = [*given, *scales.values()]
    if len(by_number) == 1 and isinstance(by_number[0], list | tuple):
        scale_factors = by_number[0]
    elif by_number and scale_factors is None:
        scale_factors = by_number
    found = each(scale_factors, spatial) if scale_factors else (None,) * spatial
    return output_size, (*found, *[None] * (spatial - len(found))), align_corners


def _enlarged(input: Operand, sizes: Any, scales: tuple[float | None, ...], neighbours: int) -> dict[int, Reach]:
    """The dimensions that become a whole number of times as large."""
    found: dict[int, Reach] = {}
    if None in scales if sizes is None else len(sizes) != len(scales):
        return found  # torch says what is wrong with it
    for d, (size, scale) in enumerate(zip(input.shape[2:], scales, strict=True)):
        result = int(size * scale) if sizes is None and scale is not None else sizes[d]  # as torch counts
        if size and result % size == 0 and result and scale in (None, result / size):
            found[2 + d] = _Enlarged(size, result // size, neighbours)
    return found


def _local(name: str, reaches: dict[int, Reach], options: Any, scales: Any, context: LocalContext) -> Local | None:
    """torch's own call on the window, of which what comes from neighbours alone is dropped."""
    source, rank = context.ins[0], context.rank
    if not where_cut(source, reaches):
        return or_nothing(context)
    halo = halo_of(source, context.outs[0], reaches)
    pieces = pieces_on(source, context.outs[0], reaches, rank)
    is_empty = 0 in context.outs[0].local_shape(rank)
    resize = getattr(torch.ops.aten, name).default

    def local(_: Any, args: Any, kwargs: Any) -> Tensor:
        x = gather_halo(first_tensor(args, kwargs), halo, name)
        if is_empty:
            result: Tensor = empty_results(context, x)
            return result
        wanted = list(context.outs[0].shape[2:])
        for dim in pieces:
            wanted[dim - 2] = x.shape[dim] * (context.outs[0].shape[dim] // source.shape[dim])
        result = resize(x, wanted, *options, *scales)
        for dim, piece in pieces.items():
            times = context.outs[0].shape[dim] // source.shape[dim]
            result = result.narrow(dim, piece.out[0] - piece.window[0] * times, piece.out[1] - piece.out[0])
        return result.contiguous()

    return local


for _pattern, (_neighbours, _corners) in _MODES.items():
    for _n in (1, 2, 3):
        _name = _pattern.format(_n)
        if _name.endswith(f"{_n}d"):
            _resize = partial(_resized, _name, _n, _neighbours, _corners)
            rule(_name)(partial(_resize, False))
            by_halo(_name, getattr(torch._C._nn, _name), partial(_resize, True), _n)
for _name in _WHOLE:
    rule(_name)(partial(_resized, _name, 2, 1, True, False))


@rule("grid_sampler", "grid_sampler_2d", "grid_sampler_3d")
def _grid_sampler(input: Operand, grid: Operand, *_: Any, **__: Any) -> Strategies:
    """Every place of the grid is sampled for itself, of an image that is whole."""
    places = list(range(2, input.ndim))
    ins: list[Labels] = [["n", "c", *[None] * len(places)], ["n", *places, None]]
    return Strategies(
        index_strategies([input, grid], ins, [["n", "c", *places]], terms=[[0]], reduction=None), run=or_nothing
    )


@rule("affine_grid_generator")
def _affine_grid(theta: Operand, size: Any, align_corners: bool) -> Strategies:
    strategies = index_strategies(
        [theta], [[0, None, None]], [[0, *[None] * (len(size) - 1)]], terms=[[0]], reduction=None
    )

    def run(context: LocalContext) -> Local | None:
        images = context.outs[0].local_shape(context.rank)[0]
        if images == 0:
            return or_nothing(context)
        return lambda _, args, kwargs: torch.affine_grid_generator(
            first_tensor(args, kwargs), [images, *size[1:]], align_corners
        )

    return Strategies(strategies, run=run)
