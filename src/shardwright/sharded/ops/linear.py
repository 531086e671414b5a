"""`torch.nn.functional.linear` with a sharded weight: every rank multiplies its own batch.

The batches are sent to the weights: each owner of columns `c:d` receives those columns of every rank's batch once,
multiplies, and returns the result for its rows, summed over its shards; the sender adds up the results of all owners.
The weight is not sent.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from shardwright import comm
from shardwright.errors import ArgumentTypeError, ShardError
from shardwright.sharded.base.checks import refuse_nested
from shardwright.sharded.base.registry import implements
from shardwright.sharded.base.tensor_base import ShardedTensorBase
from shardwright.sharded.ops.announce import announce
from shardwright.sharded.ops.embedding import table_of
from shardwright.sharded.ops.route import Part, Route, Slot, deliver, merge_intervals, spread

__all__: list[str] = []

_WHAT = "linear with a ShardedTensor"
_HEADER = struct.Struct("!q?")


@implements(functional.linear)
def _linear(_: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    return _multiply(*args, **kwargs)


def _multiply(input: Any, weight: Any, bias: Any = None) -> Tensor:  # torch's parameter names
    weight = table_of(weight, "linear")
    group = weight._group

    def prepare() -> tuple[tuple[Tensor, torch.dtype], bytes]:
        dtype = _check(input, weight, bias)
        batch = input.reshape(input.shape[:-1].numel(), weight.shape[1])
        return (batch, dtype), _HEADER.pack(len(batch), input.requires_grad)

    bias_text = (
        f"{type(bias).__name__} {list(bias.shape)}" if isinstance(bias, ShardedTensorBase) else "no sharded bias"
    )
    arguments = (
        f"a weight of {list(weight.shape)} {weight.dtype}, {getattr(input, 'dtype', type(input))}, {bias_text}, "
        f"gradients {'on' if torch.is_grad_enabled() else 'off'}"
    )
    (batch, dtype), messages = announce(prepare, arguments, group, _WHAT)
    counts, differentiable = zip(
        *map(_HEADER.unpack, messages), strict=True
    )  # rows of each rank, and whether its input requires grad
    any_grad = any(differentiable)
    intervals, (out_features, in_features) = _Intervals.of(weight), weight.shape
    stacks, anchor = spread(
        _route(group, intervals.columns, len(batch), in_features, counts), batch, differentiable=any_grad
    )
    products, anchor = _products(weight, intervals, stacks, anchor)
    out = deliver(
        _route(group, intervals.rows, len(batch), out_features, counts),
        products,
        torch.empty(0, dtype=dtype, device=batch.device),
        differentiable=any_grad or weight.requires_grad,
        anchor=anchor if anchor.requires_grad else None,
    )
    out = out.view(*input.shape[:-1], out_features)
    if bias is None:
        return out
    return out + (_unsharded(bias) if isinstance(bias, ShardedTensorBase) else bias).to(dtype)


def _check(batch: Any, weight: ShardedTensorBase, bias: Any) -> torch.dtype:
    """Validate the arguments and return the dtype of the result."""
    if not isinstance(batch, Tensor) or isinstance(batch, ShardedTensorBase):
        raise ArgumentTypeError(f"the input must be a plain tensor, got {type(batch).__name__}")
    if batch.device.type != weight.device.type:
        raise ShardError(f"the input is on {batch.device}, but the weight is on {weight.device}: move the input there")
    out, columns = weight.shape
    if not batch.ndim or batch.shape[-1] != columns:
        raise ShardError(
            f"the last dimension of the input must be {columns} for a weight of size {list(weight.shape)}, got size "
            f"{list(batch.shape)}"
        )
    if batch.dtype != weight.dtype and not torch.is_autocast_enabled(batch.device.type):
        raise ShardError(f"the input is {batch.dtype}, but the weight is {weight.dtype}: convert one of them")
    if isinstance(bias, ShardedTensorBase):
        refuse_nested(bias, "the bias")
        if bias._group.ranks != weight._group.ranks:
            raise ShardError(f"the bias is on ranks {bias._group.ranks}, but the weight is on {weight._group.ranks}")
    elif bias is not None and not isinstance(bias, Tensor):
        raise ArgumentTypeError(f"the bias must be a tensor or a ShardedTensor, got {type(bias).__name__}")
    if bias is not None and (list(bias.shape) != [out] or bias.device.type != batch.device.type):
        raise ShardError(f"the bias must have size [{out}] on {batch.device}, got {list(bias.shape)} on {bias.device}")
    unit = torch.ones(1, 1, dtype=weight.dtype, device=batch.device)
    try:  # let torch determine the result dtype, also under autocast
        added = None if bias is None else torch.ones(1, dtype=bias.dtype, device=batch.device)
        return functional.linear(batch.new_ones(1, 1), unit, added).dtype
    except RuntimeError as error:
        bias_text = "" if bias is None else f", the bias {bias.dtype}"
        raise ShardError(
            f"the input is {batch.dtype}, the weight {weight.dtype}{bias_text}, which torch cannot combine ({error}): "
            "convert them to one dtype"
        ) from None


class _Intervals(NamedTuple):
    """The rows and columns of which each rank of the group holds shards, as merged intervals."""

    rows: list[list[tuple[int, int]]]
    columns: list[list[tuple[int, int]]]

    @classmethod
    def of(cls, weight: ShardedTensorBase) -> _Intervals:
        table, group = weight._table, weight._group
        index = {rank: position for position, rank in enumerate(group.ranks)}
        sides: tuple[list[set[tuple[int, int]]], ...] = tuple([set() for _ in group.ranks] for _ in range(2))
        full = (table.sizes > 0).all(axis=1)
        ends = table.offsets + table.sizes
        owners = table.ranks[full].tolist()
        for rank, start, end in zip(owners, table.offsets[full].tolist(), ends[full].tolist(), strict=True):
            for dim, side in enumerate(sides):
                side[index[rank]].add((start[dim], end[dim]))
        return cls(*([merge_intervals(intervals) for intervals in side] for side in sides))


def _route(
    group: comm.Group, intervals: Sequence[Sequence[tuple[int, int]]], rows: int, extent: int, counts: Sequence[int]
) -> Route:
    """Return the route between the ranks' batches, `extent` wide, and the owners of these intervals."""
    parts = [
        Part(peer, 0, rows, *interval)
        for peer, peer_intervals in enumerate(intervals)
        for interval in peer_intervals
        if rows
    ]
    slots = [Slot(last - first, counts) for first, last in intervals[group.rank]]
    return Route(group, rows, extent, parts, slots, _WHAT)


def _products(
    weight: ShardedTensorBase, intervals: _Intervals, stacks: Sequence[Tensor], anchor: Tensor
) -> tuple[list[Tensor], Tensor]:
    """Multiply the stacked batches by the local shards, per interval of rows; and return the updated anchor."""
    rows, columns = intervals.rows[weight._group.rank], intervals.columns[weight._group.rank]
    products: list[Tensor | None] = [None] * len(rows)
    for shard in weight._local_shards:
        (a, c), (height, width) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
        if not (height and width):
            anchor = anchor + shard.tensor.reshape(-1)  # both empty: gives the shard an empty gradient instead of None
            continue
        number = next(number for number, (first, last) in enumerate(columns) if first <= c < last)
        part = functional.linear(stacks[number].narrow(1, c - columns[number][0], width), shard.tensor)
        number = next(number for number, (first, last) in enumerate(rows) if first <= a < last)
        part = functional.pad(part, (a - rows[number][0], rows[number][1] - a - height))
        partial = products[number]
        products[number] = part if partial is None else partial + part
    return [part for part in products if part is not None], anchor


def _unsharded(bias: ShardedTensorBase) -> Tensor:
    """Return the sharded bias unsharded on every rank; gradients of all ranks are summed into its shards."""
    group, table = bias._group, bias._table
    index = {rank: position for position, rank in enumerate(group.ranks)}
    owned = [
        Part(index[rank], 0, 1, start, start + size)
        for rank, (start,), (size,) in zip(*(column.tolist() for column in table), strict=True)
        if size
    ]
    parts = sorted(owned, key=lambda part: part.peer)  # stable: keeps the order of each owner's shards
    shards = [shard.tensor for shard in bias._local_shards]
    slots = [Slot(len(shard), [1] * group.size) for shard in shards]
    stacks = [shard.expand(group.size, len(shard)) for shard in shards]
    like = torch.empty(0, dtype=bias.dtype, device=bias.device)
    route = Route(group, 1, len(bias), parts, slots, f"the bias of {_WHAT}")
    return deliver(route, stacks, like, differentiable=bias.requires_grad)[0]
