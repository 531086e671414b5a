"""The steps that are collectives of a group: all-gather, reduce-scatter, all-reduce.

Where pieces lie one after the other and fit the buffer, `comm` does it all. Elsewhere the boxes are packed one after
the other in rounds, in the group's order of ranks, which need not be the mesh's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from shardwright import comm
from shardwright.comm.packing import pack, unpack
from shardwright.comm.rounds import in_rounds, split_region
from shardwright.layout import Layout, Ragged, Region, Shard
from shardwright.tensor.redistribute.context import ExecutionContext, Finish
from shardwright.tensor.redistribute.steps import AllGather, AllReduce, ReduceScatter, piece

__all__ = ["all_gather", "all_reduce", "reduce_scatter"]


def all_gather(step: AllGather, local: Tensor, seat: ExecutionContext) -> Finish:
    """Begins to make shards whole."""
    group = seat.group(step.before.mesh, step.mesh_dims)
    whole = step.after.region(seat.rank)
    count = seat.rounds(step)
    pieces = _in_a_row(step.before, step.mesh_dims, whole, group.ranks)
    if pieces is not None:
        dim, sizes = pieces
        if count == 1 or local.shape[:dim].numel() == 1:  # received in place, whatever the size
            return comm.start_all_gather(local, group, sizes, dim).wait
    parts = [split_region(step.before.region(peer), count) for peer in group.ranks]
    mine = step.before.region(seat.rank)
    out = torch.empty(whole.size, dtype=local.dtype, device=local.device)

    def begin(number: int) -> Callable[[], None]:
        boxes, volumes = _parts(parts, number)
        pending = comm.start_all_gather(pack(local, mine, boxes[group.rank]), group, volumes)
        return lambda: unpack(pending.wait(), out, whole, _all(boxes))

    return in_rounds(max(map(len, parts)), begin, out)


def reduce_scatter(step: ReduceScatter, local: Tensor, seat: ExecutionContext) -> Finish:
    """Begins to reduce addends to shards."""
    group = seat.group(step.before.mesh, (step.mesh_dim,))
    whole = step.before.region(seat.rank)
    count = seat.rounds(step)
    pieces = _in_a_row(step.after, (step.mesh_dim,), whole, group.ranks)
    if pieces is not None and count == 1:
        dim, sizes = pieces
        return comm.start_reduce_scatter(local, group, sizes, dim, step.op).wait  # type: ignore[arg-type]  # Partial checked it
    parts = [split_region(step.after.region(peer), count) for peer in group.ranks]
    mine = step.after.region(seat.rank)
    out = torch.empty(mine.size, dtype=local.dtype, device=local.device)

    def begin(number: int) -> Callable[[], None]:
        boxes, volumes = _parts(parts, number)
        packed = pack(local, whole, _all(boxes))
        pending = comm.start_reduce_scatter(packed, group, volumes, 0, step.op)  # type: ignore[arg-type]  # likewise
        return lambda: unpack(pending.wait(), out, mine, boxes[group.rank])

    return in_rounds(max(map(len, parts)), begin, out)


def all_reduce(step: AllReduce, local: Tensor, seat: ExecutionContext, *, owned: bool) -> Finish:
    """Begins to reduce addends on every rank; `owned` says that the input may be written over.

    On a CPU as a reduce-scatter and an all-gather of equal pieces of the flattened tensor, for every dtype.
    """
    group = seat.group(step.before.mesh, step.mesh_dims)
    if local.device.type != "cpu":
        return comm.start_all_reduce(local, group, step.op).wait  # type: ignore[arg-type]  # Partial checked it
    flat = local.contiguous().reshape(-1)
    sizes = [piece(flat.numel(), group.size, index) for index in range(group.size)]
    count = seat.rounds(step)
    if count == 1:
        mine = comm.reduce_scatter(flat, group, sizes, 0, step.op)  # type: ignore[arg-type]  # likewise
        pending = comm.start_all_gather(mine, group, sizes)
        return lambda: pending.wait().view(local.shape)
    out = flat if owned or flat.data_ptr() != local.data_ptr() else torch.empty_like(flat)
    whole = Region.whole(flat.shape)
    parts = [split_region(Region((sum(sizes[:index]),), (size,)), count) for index, size in enumerate(sizes)]

    def begin(number: int) -> Callable[[], None]:
        boxes, volumes = _parts(parts, number)
        mine = comm.reduce_scatter(pack(flat, whole, _all(boxes)), group, volumes, 0, step.op)  # type: ignore[arg-type]  # likewise
        pending = comm.start_all_gather(mine, group, volumes)
        return lambda: unpack(pending.wait(), out, whole, _all(boxes))

    return in_rounds(max(map(len, parts)), begin, out.view(local.shape))


@lru_cache(maxsize=4096)
def _in_a_row(
    layout: Layout, mesh_dims: tuple[int, ...], whole: Region, ranks: tuple[int, ...]
) -> tuple[int, tuple[int, ...]] | None:
    """The tensor dimension along which the ranks' pieces of `whole` lie one after the other, and their sizes."""
    cut_dims = {p.dim for m in mesh_dims if isinstance(p := layout.placements[m], Shard | Ragged)}
    if len(cut_dims) != 1:
        return None
    dim = cut_dims.pop()
    regions = [layout.region(rank) for rank in ranks]
    reached = whole.offset[dim]
    for region in regions:
        if region.offset[dim] != reached:
            return None
        reached += region.size[dim]
    return dim, tuple(region.size[dim] for region in regions)


def _parts(parts: Sequence[Sequence[Region]], number: int) -> tuple[list[Sequence[Region]], list[int]]:
    """What each rank's piece has for this round, none or one box, and how many elements that is."""
    boxes = [one[number : number + 1] for one in parts]
    return boxes, [sum(box.volume for box in some) for some in boxes]


def _all(boxes: Sequence[Sequence[Region]]) -> list[Region]:
    return [box for some in boxes for box in some]
