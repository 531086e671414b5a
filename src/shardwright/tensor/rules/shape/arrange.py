"""Repeat, pad and unfold.

The dimensions an operator works along are replicated, the others may be sharded; padding and repeating elements need
no communication, so there a sharded dimension stays sharded, unevenly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from shardwright.layout import Layout, Placement, Ragged, Shard
from shardwright.tensor.base.gradient_types import REPLICATE
from shardwright.tensor.base.registry import Op, composite, rule
from shardwright.tensor.base.strategy import Label, Local, LocalContext, Operand, Strategies, Strategy, index_strategies
from shardwright.tensor.base.tagging import DTensorBase, layout_of, local_region, no_torch_function, tag
from shardwright.tensor.dispatch.execute import call_by_rule
from shardwright.tensor.redistribute.halo import gather_halo
from shardwright.tensor.redistribute.implicit import redistributed
from shardwright.tensor.rules.shared.basic_index import first_tensor, sharded_over
from shardwright.tensor.rules.shared.neighbourhood import (
    Sliding,
    connected_zero,
    halo_of,
    sharded_dims,
    skip_empty,
    with_halo,
)
from shardwright.tensor.rules.shared.shard_sizes import shard_sizes, sized_placement

__all__: list[str] = []


def _other_labels(input: Operand, dims: Sequence[int]) -> list[Label]:
    """Return labels of all dimensions but these."""
    return [None if d in dims else d for d in range(input.ndim)]


def _as_tuple(values: Sequence[Any]) -> tuple[int, ...]:
    """Accept both `x.repeat(2, 3)` and `x.repeat((2, 3))`."""
    if len(values) == 1 and isinstance(values[0], list | tuple):
        values = values[0]
    return tuple(values)


@rule("repeat")
def _repeat(input: Operand, *repeats: Any, **named: Any) -> Strategies | None:
    times = _as_tuple(repeats) if repeats else _as_tuple((named["repeats"],))
    new = len(times) - input.ndim
    if new < 0:
        return None
    labels: list[Label] = [d if times[new + d] == 1 else None for d in range(input.ndim)]
    return Strategies(index_strategies([input], [labels], [[*[None] * new, *labels]], terms=[[0]], reduction=None))


@composite("repeat")
def _repeat_sharded(input: Any, *repeats: Any, **named: Any) -> Any:
    """Along a sharded dimension, repeat by cat, which sends every rank its share of the result."""
    times = list(_as_tuple(repeats) if repeats else _as_tuple((named["repeats"],)))
    new = len(times) - input.ndim
    for d in range(input.ndim):
        if new >= 0 and times[new + d] > 1 and sharded_over(layout_of(input), d):
            times[new + d], count = 1, times[new + d]
            repeated = input.repeat(times)
            return torch.cat([repeated] * count, new + d)
    return NotImplemented


@composite("tile")
def _tile(input: Any, *dims: Any, **named: Any) -> Any:
    times = _as_tuple(dims) if dims else _as_tuple((named["dims"],))
    return input.repeat((1,) * (input.ndim - len(times)) + times)


def _keep_sharded(
    input: Operand, at: Callable[[int], list[Strategy]], resized: Callable[[int, list[int]], list[int] | None]
) -> Callable[[int], list[Strategy]]:
    """Add a strategy that keeps a dimension sharded by one mesh dimension, with every shard resized on its own."""

    def extended(mesh_dim: int) -> list[Strategy]:
        placement = input.layout.placements[mesh_dim]
        strategies = at(mesh_dim)
        if not isinstance(placement, Shard | Ragged) or sharded_over(input.layout, placement.dim) != (mesh_dim,):
            return strategies
        ranks = input.layout.mesh.shape[mesh_dim]
        sizes = resized(placement.dim, shard_sizes(input.shape[placement.dim], placement, ranks).tolist())
        if sizes is None:
            return strategies
        return [*strategies, Strategy((placement,), (sized_placement(placement.dim, tuple(sizes), sum(sizes), ranks),))]

    return extended


@rule("repeat_interleave")
def _repeat_interleave(
    input: Operand, repeats: Any = None, dim: int | None = None, *, output_size: Any = None
) -> Strategies | None:
    if type(repeats) is not int or dim is None or not input.ndim:
        return None
    axis = input.dim(dim)
    at = index_strategies(
        [input], [_other_labels(input, [axis])], [_other_labels(input, [axis])], terms=[[0]], reduction=None
    )

    def run(_: LocalContext) -> Local:
        # Without output_size, which is that of the global result.
        return lambda _, args, kwargs: first_tensor(args, kwargs).repeat_interleave(repeats, axis)

    resized = _keep_sharded(input, at, lambda d, sizes: [size * repeats for size in sizes] if d == axis else None)
    return Strategies(resized, run=run if output_size is not None else None)


@composite("repeat_interleave")
def _repeat_interleave_each(input: Any, repeats: Any = None, dim: int | None = None, **_: Any) -> Any:
    if repeats is None or not input.ndim:
        return NotImplemented
    if dim is None:
        return input.flatten().repeat_interleave(repeats, 0)
    if not isinstance(repeats, DTensorBase) or repeats.ndim > 1 or not -input.ndim <= dim < input.ndim:
        return NotImplemented
    axis = dim % input.ndim
    counts = [1] * repeats.numel() if repeats.is_meta else repeats.reshape(-1).tolist()
    if len(counts) == 1:
        return input.repeat_interleave(counts[0], axis)
    return _repeat_rows(input, counts, axis) if len(counts) == input.shape[axis] else NotImplemented


def _repeat_rows(input: Any, counts: Sequence[int], axis: int) -> Any:
    """Repeat every row by its count; sharded rows give unevenly sharded copies."""
    layout = layout_of(input)
    sharding = sharded_over(layout, axis)
    placements = [REPLICATE if m in sharding[1:] else p for m, p in enumerate(layout.placements)]
    source = layout.replace(placements=placements, order=layout.order) if sharding[1:] else layout
    outs = list(source.placements)
    if sharding:
        outs[sharding[0]] = _repeated_placement(source, sharding[0], counts)
    region = local_region(source)
    own = counts[region.offset[axis] : region.offset[axis] + region.size[axis]]
    input = redistributed("repeat_interleave", input, source)
    with no_torch_function():
        repeats = torch.tensor(own, dtype=torch.long, device=input.device)
        repeated = input.repeat_interleave(repeats, axis, output_size=sum(own))
        shape = (*layout.shape[:axis], sum(counts), *layout.shape[axis + 1 :])
        return tag(repeated, Layout(source.mesh, outs, shape, source.order))


def _repeated_placement(source: Layout, mesh_dim: int, counts: Sequence[int]) -> Placement:
    """Return the placement of repeated rows that are sharded by this mesh dimension alone."""
    placement, ranks = source.placements[mesh_dim], source.mesh.shape[mesh_dim]
    assert isinstance(placement, Shard | Ragged)
    sizes, start = [], 0
    for size in shard_sizes(source.shape[placement.dim], placement, ranks).tolist():
        sizes.append(sum(counts[start : start + size]))
        start += size
    return sized_placement(placement.dim, tuple(sizes), sum(sizes), ranks)


@rule("pad", "constant_pad_nd")
def _pad(input: Operand, pad: Any, mode: Any = "constant", value: Any = None) -> Strategies | None:
    if not isinstance(mode, str):  # constant_pad_nd(input, pad, value)
        mode, value = "constant", mode
    widths = {input.ndim - 1 - i: (pad[2 * i], pad[2 * i + 1]) for i in range(len(pad) // 2)}
    padded = [dim for dim, width in widths.items() if width != (0, 0)]
    at = index_strategies(
        [input],
        [_other_labels(input, padded)],
        [_other_labels(input, padded)],
        terms=None if value else [[0]],
        reduction=None,
    )

    def resized(dim: int, sizes: list[int]) -> list[int] | None:
        before, after = widths.get(dim, (0, 0))
        if dim not in padded or before < 0 or after < 0:
            return None  # negative padding may remove complete shards
        # The ranks at the ends must hold the elements to pad with.
        available = {"constant": True, "replicate": sizes[0] > 0 < sizes[-1]}
        available["reflect"] = sizes[0] > before and sizes[-1] > after
        return [sizes[0] + before, *sizes[1:-1], sizes[-1] + after] if available.get(mode) else None

    def run(context: LocalContext) -> Local | None:
        if mode != "constant" and 0 in context.outs[0].local_shape(context.rank):
            return skip_empty(context)
        here = context.ins[0].mesh.coordinate(context.rank)
        local: list[int] = []
        for dim in reversed(range(input.ndim - len(widths), input.ndim)):
            before, after = widths[dim]
            for mesh_dim in sharded_over(context.ins[0], dim):
                before = before if here[mesh_dim] == 0 else 0
                after = after if here[mesh_dim] == context.ins[0].mesh.shape[mesh_dim] - 1 else 0
            local += [before, after]
        if mode != "constant":
            return lambda _, args, kwargs: torch.nn.functional.pad(first_tensor(args, kwargs), local, mode)
        return lambda _, args, kwargs: torch.constant_pad_nd(first_tensor(args, kwargs), local, value or 0)

    return Strategies(_keep_sharded(input, at, resized), run=run)


def _unfold(halo: bool, input: Operand, dimension: int, size: int, step: int) -> Strategies:
    """Sliding windows along a dimension. `halo`: it stays sharded, and ranks receive the rows they lack."""
    if not input.ndim:
        return Strategies(index_strategies([input], [[]], [[None]], terms=[[0]], reduction=None), fresh=False)
    dim = input.dim(dimension)
    labels = _other_labels(input, [dim])
    at = index_strategies([input], [labels], [[*labels, None]], terms=[[0]], reduction=None)
    if not halo:
        return Strategies(at, fresh=False)
    reaches = {dim: Sliding(input.shape[dim], (input.shape[dim] - size) // step + 1, size, step, 0)}

    def run(context: LocalContext) -> Local | None:
        ins, outs = context.ins[0], context.outs[0]
        if not sharded_dims(ins, reaches):
            return None
        windows, shape = halo_of(ins, outs, reaches), outs.local_shape(context.rank)

        def local(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            widened = gather_halo(first_tensor(args, kwargs), windows, "unfold")
            return widened.unfold(dim, size, step) if shape[dim] else widened.new_zeros(shape) + connected_zero(widened)

        return local

    return Strategies(with_halo(at, input, reaches, 0, 1), run=run, copied=True)


rule("unfold")(partial(_unfold, False))
_WINDOWS = Op("unfold", partial(_unfold, True))


@composite("unfold")
def _unfold_sharded(input: Any, dimension: int, size: int, step: int) -> Any:
    layout = layout_of(input)
    if not layout.ndim or not -layout.ndim <= dimension < layout.ndim:
        return NotImplemented
    dim = dimension % layout.ndim
    if not sharded_over(layout, dim) or not 0 < size <= layout.shape[dim] or step < 1:
        return NotImplemented
    return call_by_rule(_WINDOWS, False, torch.Tensor.unfold, (input, dimension, size, step), {})
