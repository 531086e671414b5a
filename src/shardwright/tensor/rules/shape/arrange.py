"""Elements moved about within dimensions: repeated, padded, unfolded.

The dimensions an operator works along stay whole, the others may be cut; padding and repeating elements need nothing
from a neighbour, so there a cut dimension stays cut too, unevenly.
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
from shardwright.tensor.rules.shared.neighbourhood import (
    Sliding,
    connected_zero,
    halo_of,
    or_nothing,
    where_cut,
    with_halo,
)
from shardwright.tensor.rules.shared.pick import cutting, first_tensor
from shardwright.tensor.rules.shared.piece_sizes import evenly, piece_sizes

__all__: list[str] = []


def _beside(input: Operand, dims: Sequence[int]) -> list[Label]:
    """Labels of all dimensions but these."""
    return [None if d in dims else d for d in range(input.ndim)]


def _numbers(values: Sequence[Any]) -> tuple[int, ...]:
    """`x.repeat(2, 3)` and `x.repeat((2, 3))` are one."""
    if len(values) == 1 and isinstance(values[0], list | tuple):
        values = values[0]
    return tuple(values)


@rule("repeat")
def _repeat(input: Operand, *repeats: Any, **named: Any) -> Strategies | None:
    times = _numbers(repeats) if repeats else _numbers((named["repeats"],))
    new = len(times) - input.ndim
    if new < 0:
        return None
    labels: list[Label] = [d if times[new + d] == 1 else None for d in range(input.ndim)]
    return Strategies(index_strategies([input], [labels], [[*[None] * new, *labels]], terms=[[0]], reduction=None))


@composite("repeat")
def _repeat_cut(input: Any, *repeats: Any, **named: Any) -> Any:
    """Along a cut dimension, repeating is joining: every rank gets what its share of the result is made of."""
    times = list(_numbers(repeats) if repeats else _numbers((named["repeats"],)))
    new = len(times) - input.ndim
    for d in range(input.ndim):
        if new >= 0 and times[new + d] > 1 and cutting(layout_of(input), d):
            times[new + d], count = 1, times[new + d]
            repeated = input.repeat(times)
            return torch.cat([repeated] * count, new + d)
    return NotImplemented


@composite("tile")
def _tile(input: Any, *dims: Any, **named: Any) -> Any:
    times = _numbers(dims) if dims else _numbers((named["dims"],))
    return input.repeat((1,) * (input.ndim - len(times)) + times)


def _kept_cut(
    input: Operand, at: Callable[[int], list[Strategy]], grown: Callable[[int, list[int]], list[int] | None]
) -> Callable[[int], list[Strategy]]:
    """Further strategies: a dimension that one mesh dimension cuts stays cut, its pieces grown each for itself."""

    def extended(mesh_dim: int) -> list[Strategy]:
        placement = input.layout.placements[mesh_dim]
        strategies = at(mesh_dim)
        if not isinstance(placement, Shard | Ragged) or cutting(input.layout, placement.dim) != (mesh_dim,):
            return strategies
        ranks = input.layout.mesh.shape[mesh_dim]
        sizes = grown(placement.dim, piece_sizes(input.shape[placement.dim], placement, ranks).tolist())
        if sizes is None:
            return strategies
        return [*strategies, Strategy((placement,), (evenly(placement.dim, tuple(sizes), sum(sizes), ranks),))]

    return extended


@rule("repeat_interleave")
def _repeat_interleave(
    input: Operand, repeats: Any = None, dim: int | None = None, *, output_size: Any = None
) -> Strategies | None:
    if type(repeats) is not int or dim is None or not input.ndim:
        return None
    place = input.dim(dim)
    at = index_strategies([input], [_beside(input, [place])], [_beside(input, [place])], terms=[[0]], reduction=None)

    def run(_: LocalContext) -> Local:
        # Without the size of the whole result, which was given for its own sake.
        return lambda _, args, kwargs: first_tensor(args, kwargs).repeat_interleave(repeats, place)

    grown = _kept_cut(input, at, lambda d, sizes: [size * repeats for size in sizes] if d == place else None)
    return Strategies(grown, run=run if output_size is not None else None)


@composite("repeat_interleave")
def _repeat_interleave_each(input: Any, repeats: Any = None, dim: int | None = None, **_: Any) -> Any:
    if repeats is None or not input.ndim:
        return NotImplemented
    if dim is None:
        return input.flatten().repeat_interleave(repeats, 0)
    if not isinstance(repeats, DTensorBase) or repeats.ndim > 1 or not -input.ndim <= dim < input.ndim:
        return NotImplemented
    place = dim % input.ndim
    counts = [1] * repeats.numel() if repeats.is_meta else repeats.reshape(-1).tolist()
    if len(counts) == 1:
        return input.repeat_interleave(counts[0], place)
    return _repeated(input, counts, place) if len(counts) == input.shape[place] else NotImplemented


def _repeated(input: Any, counts: Sequence[int], place: int) -> Any:
    """Every row as often as it is said to be; where the rows are cut, so are their copies, unevenly."""
    layout = layout_of(input)
    cuts = cutting(layout, place)
    placements = [REPLICATE if m in cuts[1:] else p for m, p in enumerate(layout.placements)]
    source = layout.replace(placements=placements, order=layout.order) if cuts[1:] else layout
    outs = list(source.placements)
    if cuts:
        outs[cuts[0]] = _grown(source, cuts[0], counts)
    region = local_region(source)
    own = counts[region.offset[place] : region.offset[place] + region.size[place]]
    input = redistributed("repeat_interleave", input, source)
    with no_torch_function():
        often = torch.tensor(own, dtype=torch.long, device=input.device)
        repeated = input.repeat_interleave(often, place, output_size=sum(own))
        shape = (*layout.shape[:place], sum(counts), *layout.shape[place + 1 :])
        return tag(repeated, Layout(source.mesh, outs, shape, source.order))


def _grown(source: Layout, mesh_dim: int, counts: Sequence[int]) -> Placement:
    """How copies of rows are cut where the rows are cut by this mesh dimension alone."""
    placement, ranks = source.placements[mesh_dim], source.mesh.shape[mesh_dim]
    assert isinstance(placement, Shard | Ragged)
    sizes, start = [], 0
    for size in piece_sizes(source.shape[placement.dim], placement, ranks).tolist():
        sizes.append(sum(counts[start : start + size]))
        start += size
    return evenly(placement.dim, tuple(sizes), sum(sizes), ranks)


@rule("pad", "constant_pad_nd")
def _pad(input: Operand, pad: Any, mode: Any = "constant", value: Any = None) -> Strategies | None:
    if not isinstance(mode, str):  # constant_pad_nd(input, pad, value)
        mode, value = "constant", mode
    widths = {input.ndim - 1 - i: (pad[2 * i], pad[2 * i + 1]) for i in range(len(pad) // 2)}
    padded = [dim for dim, width in widths.items() if width != (0, 0)]
    at = index_strategies(
        [input], [_beside(input, padded)], [_beside(input, padded)], terms=None if value else [[0]], reduction=None
    )

    def grown(dim: int, sizes: list[int]) -> list[int] | None:
        before, after = widths.get(dim, (0, 0))
        if dim not in padded or before < 0 or after < 0:
            return None  # cut off: what is left over may end anywhere
        # What the ends are padded with must lie on the ranks at the ends.
        there = {"constant": True, "replicate": sizes[0] > 0 < sizes[-1]}
        there["reflect"] = sizes[0] > before and sizes[-1] > after
        return [sizes[0] + before, *sizes[1:-1], sizes[-1] + after] if there.get(mode) else None

    def run(context: LocalContext) -> Local | None:
        if mode != "constant" and 0 in context.outs[0].local_shape(context.rank):
            return or_nothing(context)
        here = context.ins[0].mesh.coordinate(context.rank)
        local: list[int] = []
        for dim in reversed(range(input.ndim - len(widths), input.ndim)):
            before, after = widths[dim]
            for mesh_dim in cutting(context.ins[0], dim):
                before = before if here[mesh_dim] == 0 else 0
                after = after if here[mesh_dim] == context.ins[0].mesh.shape[mesh_dim] - 1 else 0
            local += [before, after]
        if mode != "constant":
            return lambda _, args, kwargs: torch.nn.functional.pad(first_tensor(args, kwargs), local, mode)
        return lambda _, args, kwargs: torch.constant_pad_nd(first_tensor(args, kwargs), local, value or 0)

    return Strategies(_kept_cut(input, at, grown), run=run)


def _unfold(halo: bool, input: Operand, dimension: int, size: int, step: int) -> Strategies:
    """Windows that slide along a dimension: `halo`: it stays cut, and ranks borrow the rows they lack."""
    if not input.ndim:
        return Strategies(index_strategies([input], [[]], [[None]], terms=[[0]], reduction=None), fresh=False)
    dim = input.dim(dimension)
    labels = _beside(input, [dim])
    at = index_strategies([input], [labels], [[*labels, None]], terms=[[0]], reduction=None)
    if not halo:
        return Strategies(at, fresh=False)
    reaches = {dim: Sliding(input.shape[dim], (input.shape[dim] - size) // step + 1, size, step, 0)}

    def run(context: LocalContext) -> Local | None:
        ins, outs = context.ins[0], context.outs[0]
        if not where_cut(ins, reaches):
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
def _unfold_cut(input: Any, dimension: int, size: int, step: int) -> Any:
    layout = layout_of(input)
    if not layout.ndim or not -layout.ndim <= dimension < layout.ndim:
        return NotImplemented
    dim = dimension % layout.ndim
    if not cutting(layout, dim) or not 0 < size <= layout.shape[dim] or step < 1:
        return NotImplemented
    return call_by_rule(_WINDOWS, False, torch.Tensor.unfold, (input, dimension, size, step), {})
