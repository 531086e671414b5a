"""`fetch_rows`: look up rows of a table with any sharding; gradients flow to the shards.

A rank requests each distinct row once from every owner of a piece of it; owners look the pieces up in their shards and
send them. Neither the table nor the inputs are sent as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from shardwright import comm
from shardwright.errors import ArgumentTypeError, ShardError
from shardwright.sharded.base.tensor_base import ShardedTensorBase
from shardwright.sharded.ops.announce import announce
from shardwright.sharded.ops.renorm import renormalise
from shardwright.sharded.ops.route import Part, Route, Slot, deliver, merge_intervals

__all__ = ["Distinct", "Lookup", "distinct", "fetch_rows"]

# Up to this many ranks, request counts are all-gathered (half a megabyte at most); above, they go through all-to-all.
_MAX_GATHERED_RANKS = 256


@final
@dataclass(frozen=True)
class Lookup:
    """Options of torch's embeddings for looking up rows. The same on all ranks."""

    max_norm: float | None = None
    norm_type: float = 2.0
    scale_grad_by_freq: bool = False
    sparse: bool = False

    def check(self) -> None:
        """Raise if an option is invalid."""
        for name in ("max_norm", "norm_type"):
            value = getattr(self, name)
            if not isinstance(value, int | float) and not (name == "max_norm" and value is None):
                raise ArgumentTypeError(f"{name} must be a number, got {value!r}")


class Distinct(NamedTuple):
    """The distinct indices of an input, ascending; the position of each input index among them; and their counts."""

    indices: Tensor
    inverse: Tensor
    counts: Tensor

    def position(self, index: int | None) -> int | None:
        """Return the position of an index among these, or None if it does not occur."""
        if index is None:
            return None
        position = int(torch.searchsorted(self.indices, index))
        return position if position < len(self.indices) and int(self.indices[position]) == index else None


def distinct(table: ShardedTensorBase, input: Any) -> Distinct:
    """Return the distinct indices of an input; raise if one is not a row of the table.

    >>> from shardwright import sharded
    >>> table = sharded.ones(sharded.ChunkShardingSpec(0, ["rank:0/cpu"]), 9, 2)
    >>> distinct(table, torch.tensor([[7, 2], [2, 2]])).inverse
    tensor([[1, 0],
            [0, 0]])
    >>> distinct(table, torch.tensor([7, 9]))
    Traceback (most recent call last):
    shardwright.errors.ShardError: index 9 at [1] of the input is out of range for a table of size [9, 2]
    """
    if not isinstance(input, Tensor) or isinstance(input, ShardedTensorBase):
        raise ArgumentTypeError(f"the input must be a plain tensor of indices, got {type(input).__name__}")
    if input.dtype not in (torch.int32, torch.int64):
        raise ArgumentTypeError(f"the input must be torch.int32 or torch.int64, got {input.dtype}")
    if input.device.type != table.device.type:
        raise ShardError(f"the input is on {input.device}, but the table is on {table.device}: move the input there")
    indices, inverse, counts = torch.unique(input.long(), return_inverse=True, return_counts=True)
    rows = table.shape[0]
    if len(indices) and (int(indices[0]) < 0 or int(indices[-1]) >= rows):
        invalid = (input < 0) | (input >= rows)
        position = invalid.nonzero()[0].tolist()
        raise ShardError(
            f"index {int(input[invalid][0])} at {position} of the input is out of range for a table of size "
            f"{list(table.shape)}"
        )
    return Distinct(indices, inverse, counts)


def fetch_rows(
    table: ShardedTensorBase, prepare: Callable[[], Distinct], options: Lookup, what: str
) -> tuple[Tensor, Distinct]:
    """Return the requested rows in the order of the distinct indices, and the result of `prepare`.

    Collective: each rank passes its own indices. Gradients of all ranks' rows flow to the shards they came from: every
    rank must call `backward` on the result of its rows, even if it requested none.

    >>> from shardwright import sharded
    >>> table = sharded.rand(sharded.ChunkShardingSpec(0, ["rank:0/cpu"] * 2), 9, 2, requires_grad=True)
    >>> rows, _ = fetch_rows(table, lambda: distinct(table, torch.tensor([7, 2])), Lookup(), "looking up")
    >>> torch.equal(rows, table.gather()[[2, 7]])
    True
    >>> rows.sum().backward()
    >>> [shard.tensor.grad.sum().item() for shard in table.local_shards()]
    [2.0, 2.0]
    """
    gradient = table.requires_grad and torch.is_grad_enabled()
    gathered = table._group.size <= _MAX_GATHERED_RANKS

    def request() -> tuple[tuple[Distinct, _Requests], bytes]:
        options.check()
        distinct_rows = prepare()
        requests = _requests(table, distinct_rows, options.scale_grad_by_freq)
        return (distinct_rows, requests), requests.counts.tobytes() if gathered else b""

    arguments = f"a table of {list(table.shape)} {table.dtype}, {options}, {'a' if gradient else 'no'} gradient"
    (distinct_rows, requests), messages = announce(request, arguments, table._group, what)
    if gathered:
        counts = [int(np.frombuffer(message, np.int64)[table._group.rank]) for message in messages]
    else:
        counts_here = torch.from_numpy(requests.counts).to(table.device)[:, None].unbind()
        counts = torch.cat(comm.all_to_all(counts_here, [(1,)] * len(messages), table._group)).tolist()
    width = requests.rows[0].shape[1]
    received = comm.all_to_all(requests.rows, [(count, width) for count in counts], table._group)
    lookups = list(zip(table._local_shards, _lookups(table, received), strict=True))
    slots = [Slot(shard.tensor.shape[1], lookup.counts) for shard, lookup in lookups]
    route = Route(table._group, len(distinct_rows.indices), table.shape[1], requests.parts, slots, what)
    if options.max_norm is not None:
        shards = [shard.tensor for shard in table._local_shards]
        rows = [lookup.rows for _, lookup in lookups]
        renormalise(table, route, shards, rows, float(options.max_norm), float(options.norm_type))
    stacks = [_look_up(shard.tensor, lookup, options) for shard, lookup in lookups]
    like = torch.empty(0, dtype=table.dtype, device=table.device)
    return deliver(route, stacks, like, differentiable=gradient), distinct_rows


class _Requests(NamedTuple):
    """The rows requested from each peer (a column, and a second one with use counts), and their parts."""

    rows: list[Tensor]
    parts: list[Part]

    @property
    def counts(self) -> np.ndarray[Any, Any]:
        """The number of rows requested from each peer."""
        return np.array([len(rows) for rows in self.rows], np.int64)


def _requests(table: ShardedTensorBase, lookups: Distinct, frequencies: bool) -> _Requests:
    regions, group = table._table, table._group
    low, high = _ranges(lookups.indices, regions.offsets[:, 0], regions.sizes[:, 0])
    index = {rank: position for position, rank in enumerate(group.ranks)}
    parts: list[list[Part]] = [[] for _ in group.ranks]
    for number in np.flatnonzero((high > low) & (regions.sizes[:, 1] > 0)).tolist():
        first, width = int(regions.offsets[number, 1]), int(regions.sizes[number, 1])
        peer = index[int(regions.ranks[number])]
        parts[peer].append(Part(peer, int(low[number]), int(high[number]), first, first + width))
    columns = torch.stack([lookups.indices, lookups.counts], 1) if frequencies else lookups.indices[:, None]
    rows = []
    for from_peer in parts:
        # If columns are sharded, one owner may have several pieces of a row; request the row once.
        pieces = [columns[start:stop] for start, stop in merge_intervals((part.start, part.stop) for part in from_peer)]
        rows.append(torch.cat(pieces) if pieces else columns[:0])
    return _Requests(rows, [part for from_peer in parts for part in from_peer])


class _Lookup(NamedTuple):
    """Rows to look up in one shard, the number for each peer, and use counts if requested."""

    rows: Tensor
    counts: list[int]
    uses: Tensor | None


def _lookups(table: ShardedTensorBase, received: Sequence[Tensor]) -> list[_Lookup]:
    offsets = np.array([shard.metadata.shard_offsets[0] for shard in table._local_shards], np.int64)
    sizes = np.array([shard.metadata.shard_sizes[0] for shard in table._local_shards], np.int64)
    ranges = [_ranges(rows[:, 0].contiguous(), offsets, sizes) for rows in received]
    lookups = []
    for number, offset in enumerate(offsets.tolist()):
        by_peer = [rows[low[number] : high[number]] for rows, (low, high) in zip(received, ranges, strict=True)]
        rows = torch.cat(by_peer)
        uses = rows[:, 1] if rows.shape[1] > 1 else None
        lookups.append(_Lookup(rows[:, 0] - offset, [len(rows) for rows in by_peer], uses))
    return lookups


def _ranges(
    indices: Tensor, offsets: np.ndarray[Any, Any], sizes: np.ndarray[Any, Any]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return where the indices of each interval start and stop among ascending indices."""
    bounds = torch.from_numpy(np.stack([offsets, offsets + sizes])).to(indices.device)
    low, high = torch.searchsorted(indices, bounds).cpu().numpy()
    return low, high


def _look_up(shard: Tensor, lookup: _Lookup, options: Lookup) -> Tensor:
    if not len(lookup.rows) and not options.sparse:
        return shard[:0]  # torch has no second derivative for an empty lookup
    looked_up = functional.embedding(lookup.rows, shard, sparse=options.sparse)
    if lookup.uses is None or not looked_up.requires_grad:
        return looked_up
    rows, inverse = torch.unique(lookup.rows, return_inverse=True)
    uses = torch.zeros_like(rows).index_add_(0, inverse, lookup.uses)
    divided: Tensor = _DividedGradient.apply(looked_up, uses[inverse][:, None])  # type: ignore[no-untyped-call]  # as ever
    return divided


class _DividedGradient(torch.autograd.Function):
    """The identity with a divided gradient: `scale_grad_by_freq` with the frequencies of all ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, divisor: Tensor) -> Tensor:
        ctx.save_for_backward(divisor)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (divisor,) = ctx.saved_tensors
        return gradient / divisor, None
