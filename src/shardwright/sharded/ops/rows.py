"""`fetch_rows`: rows of a table that is cut in any way, for the rank that asks for them, with gradients to the shards.

A rank asks every owner of a piece of a row for it, once, whatever number of times it needs the row; owners look the
pieces up in their shards and send them. Neither the table nor the ranks' inputs travel as a whole.
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
from shardwright.sharded.ops.route import Part, Route, Slot, deliver, merged

__all__ = ["Distinct", "Lookup", "distinct", "fetch_rows"]

# Up to so many ranks, what each asks of each is told to all: half a megabyte at most. More tell their peers one by one.
_AT_ONCE = 256


@final
@dataclass(frozen=True)
class Lookup:
    """What torch's embeddings can be told about looking up rows, beside which: the same on all ranks."""

    max_norm: float | None = None
    norm_type: float = 2.0
    scale_grad_by_freq: bool = False
    sparse: bool = False

    def check(self) -> None:
        """Raises where it makes no sense."""
        for name in ("max_norm", "norm_type"):
            value = getattr(self, name)
            if not isinstance(value, int | float) and not (name == "max_norm" and value is None):
                raise ArgumentTypeError(f"{name} {value!r} is a {type(value).__name__}: a number is needed")


class Distinct(NamedTuple):
    """The indices that occur in an input: each once, ascending; where each of the input is among them; how often."""

    indices: Tensor
    inverse: Tensor
    counts: Tensor

    def place_of(self, index: int | None) -> int | None:
        """Where an index is among these; None where it does not occur."""
        if index is None:
            return None
        place = int(torch.searchsorted(self.indices, index))
        return place if place < len(self.indices) and int(self.indices[place]) == index else None


def distinct(table: ShardedTensorBase, given: Any) -> Distinct:
    """The indices in an input, which are checked against the table.

    >>> from shardwright import sharded
    >>> table = sharded.ones(sharded.ChunkShardingSpec(0, ["rank:0/cpu"]), 9, 2)
    >>> distinct(table, torch.tensor([[7, 2], [2, 2]])).inverse
    tensor([[1, 0],
            [0, 0]])
    >>> distinct(table, torch.tensor([7, 9]))
    Traceback (most recent call last):
    shardwright.errors.ShardError: index 9, at [1] of the input, is not a row of a table of size [9, 2]: 0 to 8 are
    """
    if not isinstance(given, Tensor) or isinstance(given, ShardedTensorBase):
        raise ArgumentTypeError(f"the input is a {type(given).__name__}: each rank gives a plain tensor of indices")
    if given.dtype not in (torch.int32, torch.int64):
        raise ArgumentTypeError(f"the input is {given.dtype}: indices are torch.int32 or torch.int64")
    if given.device.type != table.device.type:
        raise ShardError(f"the input is on {given.device}, the table on {table.device}: move the input there")
    indices, inverse, counts = torch.unique(given.long(), return_inverse=True, return_counts=True)
    rows = table.shape[0]
    if len(indices) and (int(indices[0]) < 0 or int(indices[-1]) >= rows):
        wrong = (given < 0) | (given >= rows)
        where = wrong.nonzero()[0].tolist()
        raise ShardError(
            f"index {int(given[wrong][0])}, at {where} of the input, is not a row of a table of size "
            f"{list(table.shape)}: " + (f"0 to {rows - 1} are" if rows else "it has none")
        )
    return Distinct(indices, inverse, counts)


def fetch_rows(
    table: ShardedTensorBase, prepare: Callable[[], Distinct], how: Lookup, what: str
) -> tuple[Tensor, Distinct]:
    """The rows that this rank asks for, in the order of its distinct indices, and what `prepare` made.

    All ranks of the table's group call it, each with indices of its own. Gradients of all ranks' rows go to the shards
    they came from: every rank calls `backward` on what it made of its rows, even if those are none.

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
    at_once = table._group.size <= _AT_ONCE

    def ask() -> tuple[tuple[Distinct, _Question], bytes]:
        how.check()
        wanted = prepare()
        question = _ask(table, wanted, how.scale_grad_by_freq)
        return (wanted, question), question.counts.tobytes() if at_once else b""

    alike = f"a table of {list(table.shape)} {table.dtype}, {how}, {'a' if gradient else 'no'} gradient"
    (wanted, question), told = announce(ask, alike, table._group, what)
    if at_once:
        counts = [int(np.frombuffer(one, np.int64)[table._group.rank]) for one in told]
    else:
        mine = torch.from_numpy(question.counts).to(table.device)[:, None].unbind()
        counts = torch.cat(comm.all_to_all(mine, [(1,)] * len(told), table._group)).tolist()
    width = question.rows[0].shape[1]
    asked = comm.all_to_all(question.rows, [(count, width) for count in counts], table._group)
    sought = _sought(table, asked)
    slots = [Slot(shard.tensor.shape[1], one.counts) for shard, one in zip(table._local_shards, sought, strict=True)]
    route = Route(table._group, len(wanted.indices), table.shape[1], question.parts, slots, what)
    if how.max_norm is not None:
        shards = [shard.tensor for shard in table._local_shards]
        renormalise(table, route, shards, [one.rows for one in sought], float(how.max_norm), float(how.norm_type))
    stacks = [_look_up(shard.tensor, one, how) for shard, one in zip(table._local_shards, sought, strict=True)]
    like = torch.empty(0, dtype=table.dtype, device=table.device)
    return deliver(route, stacks, like, differentiable=gradient), wanted


class _Question(NamedTuple):
    """Which rows a rank asks of each peer (a column; a second one says how often it uses them), and for which parts."""

    rows: list[Tensor]
    parts: list[Part]

    @property
    def counts(self) -> np.ndarray[Any, Any]:
        """How many rows it asks of each peer."""
        return np.array([len(rows) for rows in self.rows], np.int64)


def _ask(table: ShardedTensorBase, wanted: Distinct, frequencies: bool) -> _Question:
    regions, group = table._table, table._group
    low, high = _stretches(wanted.indices, regions.offsets[:, 0], regions.sizes[:, 0])
    index = {rank: place for place, rank in enumerate(group.ranks)}
    parts: list[list[Part]] = [[] for _ in group.ranks]
    for number in np.flatnonzero((high > low) & (regions.sizes[:, 1] > 0)).tolist():
        first, width = int(regions.offsets[number, 1]), int(regions.sizes[number, 1])
        peer = index[int(regions.ranks[number])]
        parts[peer].append(Part(peer, int(low[number]), int(high[number]), first, first + width))
    said = torch.stack([wanted.indices, wanted.counts], 1) if frequencies else wanted.indices[:, None]
    rows = []
    for ours in parts:
        # A row that is cut by columns may have several pieces with one owner, and is named to it once.
        pieces = [said[start:stop] for start, stop in merged((part.start, part.stop) for part in ours)]
        rows.append(torch.cat(pieces) if pieces else said[:0])
    return _Question(rows, [part for ours in parts for part in ours])


class _Sought(NamedTuple):
    """What is looked up in one shard: its rows, how many of them for each peer, how often peers use them if asked."""

    rows: Tensor
    counts: list[int]
    uses: Tensor | None


def _sought(table: ShardedTensorBase, asked: Sequence[Tensor]) -> list[_Sought]:
    offsets = np.array([shard.metadata.shard_offsets[0] for shard in table._local_shards], np.int64)
    sizes = np.array([shard.metadata.shard_sizes[0] for shard in table._local_shards], np.int64)
    stretches = [_stretches(rows[:, 0].contiguous(), offsets, sizes) for rows in asked]
    found = []
    for number, offset in enumerate(offsets.tolist()):
        ours = [rows[low[number] : high[number]] for rows, (low, high) in zip(asked, stretches, strict=True)]
        rows = torch.cat(ours)
        uses = rows[:, 1] if rows.shape[1] > 1 else None
        found.append(_Sought(rows[:, 0] - offset, [len(one) for one in ours], uses))
    return found


def _stretches(
    indices: Tensor, offsets: np.ndarray[Any, Any], sizes: np.ndarray[Any, Any]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Where, among ascending indices, those of each interval start and stop."""
    bounds = torch.from_numpy(np.stack([offsets, offsets + sizes])).to(indices.device)
    low, high = torch.searchsorted(indices, bounds).cpu().numpy()
    return low, high


def _look_up(shard: Tensor, sought: _Sought, how: Lookup) -> Tensor:
    if not len(sought.rows) and not how.sparse:
        return shard[:0]  # torch cannot differentiate looking nothing up twice
    found = functional.embedding(sought.rows, shard, sparse=how.sparse)
    if sought.uses is None or not found.requires_grad:
        return found
    rows, inverse = torch.unique(sought.rows, return_inverse=True)
    uses = torch.zeros_like(rows).index_add_(0, inverse, sought.uses)
    divided: Tensor = _DividedGradient.apply(found, uses[inverse][:, None])  # type: ignore[no-untyped-call]  # as ever
    return divided


class _DividedGradient(torch.autograd.Function):
    """A tensor as it is, whose gradient is divided: `scale_grad_by_freq`, with the frequencies of all ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, divisor: Tensor) -> Tensor:
        ctx.save_for_backward(divisor)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (divisor,) = ctx.saved_tensors
        return gradient / divisor, None
