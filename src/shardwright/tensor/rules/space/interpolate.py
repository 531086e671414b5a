"""Resizing and grid sampling of images: batch and channels are independent of each other.

Along a sharded spatial dimension, an image is enlarged by an integer factor with a halo of one or two rows; other
sizes need the dimension replicated. The sampling grid may be sharded along any dimension.
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
from shardwright.tensor.rules.shared.basic_index import first_tensor
from shardwright.tensor.rules.shared.neighbourhood import (
    Reach,
    empty_results,
    halo_of,
    per_dim,
    register_halo,
    sharded_dims,
    skip_empty,
    windows_on,
    with_halo,
)

__all__: list[str] = []


@final
@dataclass(frozen=True, slots=True)
class _Enlarged:
    """Reach of an enlarged dimension: an input gives `times` outputs, which use `neighbours` inputs on either side."""

    size: int
    times: int
    neighbours: int

    @property
    def result(self) -> int:
        """Size of the output."""
        return self.size * self.times

    def needed(self, start: int, stop: int) -> tuple[int, int]:
        """Return the range of inputs, neighbours included, that the outputs `start:stop` depend on."""
        return start // self.times - self.neighbours, (stop - 1) // self.times + 1 + self.neighbours

    def first_output(self, index: int) -> int:
        """Return the first output of this input: outputs are on the rank of their input."""
        return index * self.times


# Number of neighbours on either side that an output depends on, and whether the mode has align_corners.
_MODES = {
    "upsample_nearest{}d": (0, False),
    "_upsample_nearest_exact{}d": (0, False),
    "upsample_linear1d": (1, True),
    "upsample_bilinear2d": (1, True),
    "upsample_trilinear3d": (1, True),
    "upsample_bicubic2d": (2, True),
}
# Antialiasing kernels depend on the scale. lanczos requires torch 2.13.
_ANTIALIASED = [f"_upsample_{mode}2d_aa" for mode in ("bilinear", "bicubic", "lanczos")]
_REPLICATED = [name for name in _ANTIALIASED if hasattr(torch._C._nn, name)]


def _resized(
    name: str, spatial: int, neighbours: int, corners: bool, halo: bool, input: Operand, *args: Any, **named: Any
) -> Strategies:
    """Return the strategies of a resizing operator; with `halo`, also along enlarged spatial dimensions."""
    labels: Labels = [0, 1, *[None] * spatial]
    linear = input.dtype.is_floating_point or not neighbours  # integer results are rounded
    at = index_strategies([input], [labels], [labels], terms=[[0]] if linear else None, reduction=None)
    if not halo:
        return Strategies(at, run=skip_empty)
    sizes, scales, aligned = _resize_arguments(spatial, corners, *args, **named)
    reaches = {} if aligned else _enlarged(input, sizes, scales, neighbours)
    options = (False,) if corners else ()
    return Strategies(with_halo(at, input, reaches, 0, 1), run=partial(_local, name, reaches, options, scales))


def _resize_arguments(
    spatial: int,
    corners: bool,
    output_size: Any,
    *rest: Any,
    align_corners: bool = False,
    scale_factors: Any = None,
    **scales: Any,
) -> tuple[Any, tuple[float | None, ...], bool]:
    """Return output sizes (or None), scales and align_corners, for every calling convention."""
    remaining = list(rest)
    if corners and remaining:
        align_corners = remaining.pop(0)
    positional = [*remaining, *scales.values()]
    if len(positional) == 1 and isinstance(positional[0], list | tuple):
        scale_factors = positional[0]
    elif positional and scale_factors is None:
        scale_factors = positional
    factors = per_dim(scale_factors, spatial) if scale_factors else (None,) * spatial
    return output_size, (*factors, *[None] * (spatial - len(factors))), align_corners


def _enlarged(input: Operand, sizes: Any, scales: tuple[float | None, ...], neighbours: int) -> dict[int, Reach]:
    """Return the reach of each dimension that grows by an integer factor."""
    reaches: dict[int, Reach] = {}
    if None in scales if sizes is None else len(sizes) != len(scales):
        return reaches  # torch raises the error
    for d, (size, scale) in enumerate(zip(input.shape[2:], scales, strict=True)):
        result = int(size * scale) if sizes is None and scale is not None else sizes[d]  # as torch rounds
        if size and result % size == 0 and result and scale in (None, result / size):
            reaches[2 + d] = _Enlarged(size, result // size, neighbours)
    return reaches


def _local(name: str, reaches: dict[int, Reach], options: Any, scales: Any, context: LocalContext) -> Local | None:
    """Return a local call on the window that drops the outputs of neighbours."""
    source, rank = context.ins[0], context.rank
    if not sharded_dims(source, reaches):
        return skip_empty(context)
    halo = halo_of(source, context.outs[0], reaches)
    windows = windows_on(source, context.outs[0], reaches, rank)
    is_empty = 0 in context.outs[0].local_shape(rank)
    resize = getattr(torch.ops.aten, name).default

    def local(_: Any, args: Any, kwargs: Any) -> Tensor:
        x = gather_halo(first_tensor(args, kwargs), halo, name)
        if is_empty:
            result: Tensor = empty_results(context, x)
            return result
        output_size = list(context.outs[0].shape[2:])
        for dim in windows:
            output_size[dim - 2] = x.shape[dim] * (context.outs[0].shape[dim] // source.shape[dim])
        result = resize(x, output_size, *options, *scales)
        for dim, window in windows.items():
            times = context.outs[0].shape[dim] // source.shape[dim]
            result = result.narrow(dim, window.out[0] - window.window[0] * times, window.out[1] - window.out[0])
        return result.contiguous()

    return local


for _pattern, (_neighbours, _corners) in _MODES.items():
    for _n in (1, 2, 3):
        _name = _pattern.format(_n)
        if _name.endswith(f"{_n}d"):
            _resize = partial(_resized, _name, _n, _neighbours, _corners)
            rule(_name)(partial(_resize, False))
            register_halo(_name, getattr(torch._C._nn, _name), partial(_resize, True), _n)
for _name in _REPLICATED:
    rule(_name)(partial(_resized, _name, 2, 1, True, False))


@rule("grid_sampler", "grid_sampler_2d", "grid_sampler_3d")
def _grid_sampler(input: Operand, grid: Operand, *_: Any, **__: Any) -> Strategies:
    """Every point of the grid is sampled independently, from a replicated image."""
    points = list(range(2, input.ndim))
    ins: list[Labels] = [["n", "c", *[None] * len(points)], ["n", *points, None]]
    return Strategies(
        index_strategies([input, grid], ins, [["n", "c", *points]], terms=[[0]], reduction=None), run=skip_empty
    )


@rule("affine_grid_generator")
def _affine_grid(theta: Operand, size: Any, align_corners: bool) -> Strategies:
    """Compute the grids of this rank's images: `theta` may be sharded along the batch."""
    strategies = index_strategies(
        [theta], [[0, None, None]], [[0, *[None] * (len(size) - 1)]], terms=[[0]], reduction=None
    )

    def run(context: LocalContext) -> Local | None:
        images = context.outs[0].local_shape(context.rank)[0]
        if images == 0:
            return skip_empty(context)
        return lambda _, args, kwargs: torch.affine_grid_generator(
            first_tensor(args, kwargs), [images, *size[1:]], align_corners
        )

    return Strategies(strategies, run=run)
