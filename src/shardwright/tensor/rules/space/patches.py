"""Pixel shuffles and patches of images."""

from __future__ import annotations

from math import prod
from typing import Any

from shardwright.layout import Ragged, Shard
from shardwright.tensor.base.registry import composite, rule
from shardwright.tensor.base.strategy import Labels, Operand, Strategies, Strategy, index_strategies
from shardwright.tensor.rules.shared.basic_index import sharded_over
from shardwright.tensor.rules.shared.neighbourhood import per_dim, skip_empty
from shardwright.tensor.rules.shared.shard_sizes import shard_sizes, sized_placement

__all__: list[str] = []


def _images(input: Operand, *_: Any, **__: Any) -> Strategies:
    """Dimensions before channels and space are independent."""
    labels: Labels = [*range(input.ndim - 3), *[None] * 3]
    return Strategies(index_strategies([input], [labels], [labels], terms=[[0]], reduction=None), run=skip_empty)


rule("pixel_shuffle", "pixel_unshuffle")(_images)


def _is_image_sharded(input: Any) -> bool:
    """True if channels or space are sharded."""
    layout = input._layout
    return layout.ndim > 2 and any(sharded_over(layout, d) for d in range(layout.ndim - 3, layout.ndim))


@composite("pixel_shuffle")
def _pixel_shuffle(input: Any, upscale_factor: int) -> Any:
    """Compose from views, which keep sharded dimensions; clone, because torch's result is not a view."""
    r = upscale_factor
    if not _is_image_sharded(input) or 0 in input.shape or r < 1 or input.shape[-3] % (r * r):
        return NotImplemented
    split = input.unflatten(-3, (input.shape[-3] // (r * r), r, r))
    lead = list(range(input.ndim - 3))
    c, y, x, rows, columns = range(input.ndim - 3, input.ndim + 2)
    return split.permute(*lead, c, rows, y, columns, x).flatten(-2, -1).flatten(-3, -2).clone()


@composite("pixel_unshuffle")
def _pixel_unshuffle(input: Any, downscale_factor: int) -> Any:
    r = downscale_factor
    if not _is_image_sharded(input) or 0 in input.shape or r < 1 or input.shape[-1] % r or input.shape[-2] % r:
        return NotImplemented
    split = input.unflatten(-1, (input.shape[-1] // r, r)).unflatten(-3, (input.shape[-2] // r, r))
    lead = list(range(input.ndim - 3))
    c, rows, y, columns, x = range(input.ndim - 3, input.ndim + 2)
    return split.permute(*lead, c, y, x, rows, columns).flatten(-5, -3).clone()


@rule("channel_shuffle", "native_channel_shuffle")
def _channel_shuffle(input: Operand, groups: int) -> Strategies:
    del groups
    labels: Labels = [None if d == 1 else d for d in range(input.ndim)]
    return Strategies(index_strategies([input], [labels], [labels], terms=[[0]], reduction=None), run=skip_empty)


def _channelwise(input: Operand, lead: int, out_ndim: int, fewer: int, more: int) -> Strategies:
    """Batch and channels are independent; `fewer` rows of the input's channel dimension become `more` of the output's.

    Channels stay sharded if every shard holds complete channels.
    """
    batch = list(range(lead))
    at = index_strategies(
        [input],
        [[*batch, *[None] * (input.ndim - lead)]],
        [[*batch, *[None] * (out_ndim - lead)]],
        terms=[[0]],
        reduction=None,
    )

    def extended(mesh_dim: int) -> list[Strategy]:
        placement, ranks = input.layout.placements[mesh_dim], input.layout.mesh.shape[mesh_dim]
        if not isinstance(placement, Shard | Ragged) or sharded_over(input.layout, lead) != (mesh_dim,):
            return at(mesh_dim)
        shards = shard_sizes(input.shape[lead], placement, ranks)
        if (shards % fewer).any():
            return at(mesh_dim)
        sizes = tuple((shards // fewer * more).tolist())
        return [*at(mesh_dim), Strategy((placement,), (sized_placement(lead, sizes, sum(sizes), ranks),))]

    return Strategies(extended, run=skip_empty)


@rule("im2col")
def _im2col(input: Operand, kernel_size: Any, *_: Any, **__: Any) -> Strategies:
    return _channelwise(input, input.ndim - 3, input.ndim - 1, 1, prod(per_dim(kernel_size, 2)))


@rule("col2im")
def _col2im(input: Operand, output_size: Any, kernel_size: Any, *_: Any, **__: Any) -> Strategies:
    del output_size
    return _channelwise(input, input.ndim - 2, input.ndim + 1, prod(per_dim(kernel_size, 2)), 1)
