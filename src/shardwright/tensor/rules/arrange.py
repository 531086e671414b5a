"""Elements moved about within dimensions: repeated, padded, rolled, flipped, unfolded, sorted.

The dimensions an operator works along stay whole, the others may be cut; padding and repeating elements need nothing
from a neighbour, so there a cut dimension stays cut too, unevenly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwright.layout import Ragged, Shard
from shardwright.tensor.registry import composite, rule
from shardwright.tensor.rules.notation import Label, Local, Operand, Situation, Way, Ways, index_ways
from shardwright.tensor.rules.pick import cutting, first_tensor
from shardwright.tensor.rules.shape import evenly, piece_sizes

__all__: list[str] = []


def _beside(input: Operand, dims: Sequence[int]) -> list[Label]:
    """Labels of all dimensions but these."""
    return [None if d in dims else d for d in range(input.ndim)]


def _numbers(values: Sequence[Any]) -> tuple[int, ...]:
    """`x.repeat(2, 3)` and `x.repeat((2, 3))` are one."""
    if len(values) == 1 and isinstance(values[0], list | tuple):
        values = values[0]
    return tuple(values)


def _all_dims(input: Operand, dims: Any) -> list[int]:
    named = (dims,) if isinstance(dims, int) else dims
    return [input.dim(d) for d in named] if named else list(range(input.ndim))


def _rearranged(input: Operand, dims: Sequence[int]) -> Ways:
    labels = _beside(input, dims)
    return Ways(index_ways([input], [labels], [labels], terms=[[0]], reduction=None))


@rule("roll")
def _roll(input: Operand, shifts: Any, dims: Any = None) -> Ways:
    del shifts
    return _rearranged(input, _all_dims(input, dims))


@rule("flip")
def _flip(input: Operand, *dims: Any, **named: Any) -> Ways:
    over = _numbers(dims) if dims else _numbers((named["dims"],))
    return _rearranged(input, [input.dim(d) for d in over])


@rule("fliplr")
def _fliplr(input: Operand) -> Ways:
    return _rearranged(input, [1])


@rule("flipud")
def _flipud(input: Operand) -> Ways:
    return _rearranged(input, [0])


@rule("rot90")
def _rot90(input: Operand, k: int = 1, dims: Sequence[int] = (0, 1)) -> Ways:
    del k
    return _rearranged(input, [input.dim(d) for d in dims])


@rule("repeat")
def _repeat(input: Operand, *repeats: Any, **named: Any) -> Ways | None:
    times = _numbers(repeats) if repeats else _numbers((named["repeats"],))
    new = len(times) - input.ndim
    if new < 0:
        return None
    labels: list[Label] = [d if times[new + d] == 1 else None for d in range(input.ndim)]
    return Ways(index_ways([input], [labels], [[*[None] * new, *labels]], terms=[[0]], reduction=None))


@composite("tile")
def _tile(input: Any, *dims: Any, **named: Any) -> Any:
    times = _numbers(dims) if dims else _numbers((named["dims"],))
    return input.repeat((1,) * (input.ndim - len(times)) + times)


def _kept_cut(
    input: Operand, at: Callable[[int], list[Way]], grown: Callable[[int, list[int]], list[int] | None]
) -> Callable[[int], list[Way]]:
    """Further ways: a dimension that one mesh dimension cuts stays cut, its pieces grown each for itself."""

    def extended(mesh_dim: int) -> list[Way]:
        placement = input.layout.placements[mesh_dim]
        ways = at(mesh_dim)
        if not isinstance(placement, Shard | Ragged) or cutting(input.layout, placement.dim) != (mesh_dim,):
            return ways
        ranks = input.layout.mesh.shape[mesh_dim]
        sizes = grown(placement.dim, piece_sizes(input.shape[placement.dim], placement, ranks).tolist())
        if sizes is None:
            return ways
        return [*ways, Way((placement,), (evenly(placement.dim, tuple(sizes), sum(sizes), ranks),))]

    return extended


@rule("repeat_interleave")
def _repeat_interleave(
    input: Operand, repeats: Any = None, dim: int | None = None, *, output_size: Any = None
) -> Ways | None:
    if type(repeats) is not int or dim is None or not input.ndim:
        return None
    place = input.dim(dim)
    at = index_ways([input], [_beside(input, [place])], [_beside(input, [place])], terms=[[0]], reduction=None)

    def run(_: Situation) -> Local:
        # Without the size of the whole result, which was given for its own sake.
        return lambda _, args, kwargs: first_tensor(args, kwargs).repeat_interleave(repeats, place)

    grown = _kept_cut(input, at, lambda d, sizes: [size * repeats for size in sizes] if d == place else None)
    return Ways(grown, run=run if output_size is not None else None)


@composite("repeat_interleave")
def _repeat_interleave_flat(input: Any, repeats: Any = None, dim: int | None = None, **_: Any) -> Any:
    return input.flatten().repeat_interleave(repeats, 0) if type(repeats) is int and dim is None else NotImplemented


@rule("pad", "constant_pad_nd")
def _pad(input: Operand, pad: Any, mode: Any = "constant", value: Any = None) -> Ways | None:
    if not isinstance(mode, str):  # constant_pad_nd(input, pad, value)
        mode, value = "constant", mode
    widths = {input.ndim - 1 - i: (pad[2 * i], pad[2 * i + 1]) for i in range(len(pad) // 2)}
    padded = [dim for dim, width in widths.items() if width != (0, 0)]
    if mode != "constant":
        # Torch's own other modes want channels and places to be there: only the batch may be empty.
        labels = [d if d == 0 and input.ndim == len(widths) + 2 else None for d in range(input.ndim)]
        return Ways(index_ways([input], [labels], [labels], terms=[[0]], reduction=None))
    at = index_ways(
        [input], [_beside(input, padded)], [_beside(input, padded)], terms=None if value else [[0]], reduction=None
    )

    def grown(dim: int, sizes: list[int]) -> list[int] | None:
        before, after = widths.get(dim, (0, 0))
        if dim not in padded or before < 0 or after < 0:
            return None  # cut off: what is left over may end anywhere
        return [sizes[0] + before, *sizes[1:-1], sizes[-1] + after]

    def run(situation: Situation) -> Local:
        here = situation.ins[0].mesh.coordinate(situation.rank)
        local: list[int] = []
        for dim in reversed(range(input.ndim - len(widths), input.ndim)):
            before, after = widths[dim]
            for mesh_dim in cutting(situation.ins[0], dim):
                before = before if here[mesh_dim] == 0 else 0
                after = after if here[mesh_dim] == situation.ins[0].mesh.shape[mesh_dim] - 1 else 0
            local += [before, after]
        return lambda _, args, kwargs: torch.constant_pad_nd(first_tensor(args, kwargs), local, value or 0)

    return Ways(_kept_cut(input, at, grown), run=run)


@rule("unfold")
def _unfold(input: Operand, dimension: int, size: int, step: int) -> Ways:
    del size, step
    labels = _beside(input, [input.dim(dimension)] if input.ndim else [])
    return Ways(index_ways([input], [labels], [[*labels, None]], terms=[[0]], reduction=None), fresh=False)
