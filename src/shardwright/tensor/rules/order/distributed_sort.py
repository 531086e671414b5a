"""Sort a long 1-dimensional tensor across ranks, without gathering it.

Shards are sorted locally. The boundaries of each rank's share of the global order are found by counting: a radix
search, a few numbers per round. Then every element is sent once, to the rank it belongs to; or none, if only one
element of the order is wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwright import comm
from shardwright.layout import Layout, Placement
from shardwright.tensor.base import policy, trace
from shardwright.tensor.base.gradient_types import REPLICATE, SUM
from shardwright.tensor.base.tagging import no_torch_function, tag
from shardwright.tensor.redistribute.implicit import completed
from shardwright.tensor.rules.shared.shards import Shards

__all__ = ["MIN_DISTRIBUTED", "is_sortable", "kth_element", "sort_distributed"]

MIN_DISTRIBUTED = 4096  # elements: fewer are faster to gather
DIGIT = 4  # bits per round
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_ORDERED = (*_FLOATS, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool)


def is_sortable(dtype: torch.dtype) -> bool:
    """True if values of this dtype map to ordered integer keys."""
    return dtype in _ORDERED


class _Holders(NamedTuple):
    """The ranks that hold the shards as a group, the shard index of each, and this rank's shard index."""

    group: comm.Group
    indices: tuple[int, ...]
    mine: int


def _holders(shards: Shards) -> _Holders:
    layout, here = shards.row_layout, comm.rank()
    mesh = layout.mesh
    at = mesh.coordinate(here)
    kept = [m for m, placement in enumerate(layout.placements) if not placement.is_shard(shards.dim)]
    members = sorted(r for r in mesh.ranks if all(mesh.coordinate(r)[m] == at[m] for m in kept))
    group = comm.subgroup(members)
    return _Holders(group, tuple(layout.region(r).offset[shards.dim] for r in group.ranks), shards.mine)


def _keys(values: Tensor, descending: bool) -> tuple[Tensor, int]:
    """Return integers in the order of the values, and their width in bits. NaN is the largest."""
    bits = 64 if values.dtype.itemsize == 8 else 32
    keys = values.long() if not values.is_floating_point() else values
    if values.is_floating_point():
        float_dtype, int_dtype = (torch.float64, torch.int64) if bits == 64 else (torch.float32, torch.int32)
        raw = (values.to(float_dtype) + 0.0).view(int_dtype)  # adding zero makes -0.0 equal to 0.0
        keys = torch.where(raw < 0, raw ^ torch.iinfo(int_dtype).max, raw)
        keys = torch.where(values.isnan(), torch.iinfo(int_dtype).max, keys).long()
    return (~keys if descending else keys), bits


def _positions(keys: Tensor, bits: int, targets: Sequence[int], holders: _Holders) -> list[int]:
    """For each target position in the global order, return how many of these sorted keys precede it.

    Equal keys are ordered by shard.
    """
    wanted = torch.tensor(targets, device=keys.device)
    low = torch.full((len(targets),), -(1 << (bits - 1)), device=keys.device)
    steps = torch.arange(1, 1 << DIGIT, device=keys.device)
    for shift in range(bits - DIGIT, -1, -DIGIT):
        marks = low[:, None] + (steps << shift)
        below = comm.all_reduce(torch.searchsorted(keys, marks), holders.group)
        low = low + ((below <= wanted[:, None]).sum(1) << shift)
    less = torch.searchsorted(keys, low)
    equal = torch.searchsorted(keys, low, right=True) - less
    seen = comm.all_gather(torch.stack([less, equal])[None], holders.group)
    before = torch.tensor([shard < holders.mine for shard in holders.indices], device=keys.device)
    left = wanted - seen[:, 0].sum(0) - seen[before, 1].sum(0)
    return (less + left.clamp(min=0).minimum(equal)).tolist()


def _exchange(local: Tensor, sends: Sequence[int], receives: Sequence[int], holders: _Holders) -> Tensor:
    """Send consecutive parts of a tensor to their shards; return the received parts in shard order."""
    parts = torch.split(local, list(sends))
    received = comm.all_to_all(
        [parts[shard].contiguous() for shard in holders.indices],
        [(receives[shard],) for shard in holders.indices],
        holders.group,
    )
    return torch.cat([received[holders.indices.index(shard)] for shard in range(len(holders.indices))])


class Exchange(torch.autograd.Function):
    """`_exchange`, with the reverse exchange as its backward."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, sends: Sequence[int], receives: Sequence[int], holders: _Holders) -> Tensor:
        ctx.counts, ctx.holders = (receives, sends), holders
        return _exchange(local, sends, receives, holders)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        back: Tensor = Exchange.apply(gradient, *ctx.counts, ctx.holders)  # type: ignore[no-untyped-call]  # untyped in torch
        return back, None, None, None


def sort_distributed(name: str, input: Any, shards: Shards, descending: bool) -> tuple[Any, Any]:
    """Sort a 1-dimensional tensor stably; return values and indices, sharded as the input."""
    input = completed(name, input)
    layout = input._layout
    policy.check(name, [(layout, layout.replace(placements=[REPLICATE] * layout.mesh.ndim))])
    with no_torch_function():
        trace.record_redistribution(layout, layout, input.numel() * (input.element_size() + 8), backward=False)
        if input.is_meta:
            return tag(torch.empty_like(input), layout), tag(torch.empty_like(input, dtype=torch.long), layout)
        holders = _holders(shards)
        values, order = input.sort(stable=True, descending=descending)
        starts = [0, *accumulate(shards.sizes)]
        ends = [min(start, starts[-1] - 1) for start in starts[1:-1]]  # an empty last shard starts past the end
        positions = _positions(*_keys(values.detach(), descending), ends, holders) if ends else []
        positions = [
            len(values) if start == starts[-1] else position
            for start, position in zip(starts[1:-1], positions, strict=True)
        ]
        sends = [stop - start for start, stop in pairwise([0, *positions, len(values)])]
        table = comm.all_gather(torch.tensor([sends], device=values.device), holders.group)
        receives = [int(table[holders.indices.index(shard), holders.mine]) for shard in range(len(shards.sizes))]
        received: Tensor = Exchange.apply(values, sends, receives, holders)  # type: ignore[no-untyped-call]  # untyped in torch
        sources = _exchange(order + shards.start, sends, receives, holders)
        final = _keys(received.detach(), descending)[0].sort(stable=True)[1]
        return tag(received[final], layout), tag(sources[final], layout)


def kth_element(name: str, input: Any, shards: Shards, position: int) -> tuple[Any, Any]:
    """Return the element at this position of the order and its index, as partial sums held by one rank."""
    policy.check(name, [(input._layout, input._layout.replace(placements=[REPLICATE] * input._layout.mesh.ndim))])
    rows = shards.flat().row_layout
    placements: list[Placement] = [SUM if p.is_shard() else REPLICATE for p in rows.placements]
    target = Layout(rows.mesh, placements, ())
    with no_torch_function():
        trace.record_redistribution(input._layout, target, 0, backward=False)
        values, order = input.reshape(-1).sort(stable=True)
        first = last = 0
        if not input.is_meta:
            keys, bits = _keys(values.detach(), descending=False)
            total = sum(shards.sizes)
            positions = _positions(keys, bits, [position, min(position + 1, total - 1)], _holders(shards))
            first, last = positions[0], positions[1] if position + 1 < total else len(values)
        chosen = values[first:last].sum(dtype=values.dtype), (order + shards.start)[first:last].sum()
        return tag(chosen[0], target), tag(chosen[1], target)
