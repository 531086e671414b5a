"""Execute the steps that are collectives of a group: all-gather, reduce-scatter, all-reduce.

If the shards are consecutive along one dimension and fit the buffer, one call of `comm` does it. Otherwise boxes are
packed in rounds, in the rank order of the group, which may differ from the mesh's.
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


def all_gather(step: AllGather, local: Tensor, context: ExecutionContext) -> Finish:
    """Start an all-gather."""
    group = context.group(step.before.mesh, step.mesh_dims)
    whole = step.after.region(context.rank)
    count = context.rounds(step)
    shards = _consecutive(step.before, step.mesh_dims, whole, group.ranks)
    if shards is not None:
        dim, sizes = shards
        if count == 1 or local.shape[:dim].numel() == 1:  # received in place, without a buffer
            return comm.start_all_gather(local, group, sizes, dim).wait
    parts = [split_region(step.before.region(peer), count) for peer in group.ranks]
    mine = step.before.region(context.rank)
    out = torch.empty(whole.size, dtype=local.dtype, device=local.device)

    def begin(number: int) -> Callable[[], None]:
        boxes, volumes = _parts(parts, number)
        pending = comm.start_all_gather(pack(local, mine, boxes[group.rank]), group, volumes)
        return lambda: unpack(pending.wait(), out, whole, _flat(boxes))

    return in_rounds(max(map(len, parts)), begin, out)


def reduce_scatter(step: ReduceScatter, local: Tensor, context: ExecutionContext) -> Finish:
    """Start a reduce-scatter."""
    group = context.group(step.before.mesh, (step.mesh_dim,))
    whole = step.before.region(context.rank)
    count = context.rounds(step)
    shards = _consecutive(step.after, (step.mesh_dim,), whole, group.ranks)
    if shards is not None and count == 1:
        dim, sizes = shards
        return comm.start_reduce_scatter(local, group, sizes, dim, step.op).wait  # type: ignore[arg-type]  # Partial checked it
    parts = [split_region(step.after.region(peer), count) for peer in group.ranks]
    mine = step.after.region(context.rank)
    out = torch.empty(mine.size, dtype=local.dtype, device=local.device)

    def begin(number: int) -> Callable[[], None]:
        boxes, volumes = _parts(parts, number)
        packed = pack(local, whole, _flat(boxes))
        pending = comm.start_reduce_scatter(packed, group, volumes, 0, step.op)  # type: ignore[arg-type]  # likewise
        return lambda: unpack(pending.wait(), out, mine, boxes[group.rank])

    return in_rounds(max(map(len, parts)), begin, out)


def all_reduce(step: AllReduce, local: Tensor, context: ExecutionContext, *, owned: bool) -> Finish:
    """Start an all-reduce; `owned` allows it to overwrite the input.

    On CPU it is a reduce-scatter and an all-gather of equal chunks of the flattened tensor, for every dtype.
    """
    group = context.group(step.before.mesh, step.mesh_dims)
    if comm.device_type(local) != "cpu":
        return comm.start_all_reduce(local, group, step.op).wait  # type: ignore[arg-type]  # Partial checked it
    flat = local.contiguous().reshape(-1)
    sizes = [piece(flat.numel(), group.size, index) for index in range(group.size)]
    count = context.rounds(step)
    if count == 1:
        mine = comm.reduce_scatter(flat, group, sizes, 0, step.op)  # type: ignore[arg-type]  # likewise
        pending = comm.start_all_gather(mine, group, sizes)
        return lambda: pending.wait().view(local.shape)
    out = flat if owned or flat.data_ptr() != local.data_ptr() else torch.empty_like(flat)
    whole = Region.whole(flat.shape)
    parts = [split_region(Region((sum(sizes[:index]),), (size,)), count) for index, size in enumerate(sizes)]

    def begin(number: int) -> Callable[[], None]:
        boxes, volumes = _parts(parts, number)
        mine = comm.reduce_scatter(pack(flat, whole, _flat(boxes)), group, volumes, 0, step.op)  # type: ignore[arg-type]  # likewise
        pending = comm.start_all_gather(mine, group, volumes)
        return lambda: unpack(pending.wait(), out, whole, _flat(boxes))

    return in_rounds(max(map(len, parts)), begin, out.view(local.shape))


@lru_cache(maxsize=4096)
def _consecutive(
    layout: Layout, mesh_dims: tuple[int, ...], whole: Region, ranks: tuple[int, ...]
) -> tuple[int, tuple[int, ...]] | None:
    """Return the dimension along which the ranks' shards of `whole` are consecutive, and their sizes, or None."""
    cut_dims = {p.dim for m in mesh_dims if isinstance(p := layout.placements[m], Shard | Ragged)}
    if len(cut_dims) != 1:
        return None
    dim = cut_dims.pop()
    regions = [layout.region(rank) for rank in ranks]
    end = whole.offset[dim]
    for region in regions:
        if region.offset[dim] != end:
            return None
        end += region.size[dim]
    return dim, tuple(region.size[dim] for region in regions)


def _parts(parts: Sequence[Sequence[Region]], number: int) -> tuple[list[Sequence[Region]], list[int]]:
    """Return each rank's boxes (at most one) for this round, and their volumes."""
    boxes = [of_rank[number : number + 1] for of_rank in parts]
    return boxes, [sum(box.volume for box in of_rank) for of_rank in boxes]


def _flat(boxes: Sequence[Sequence[Region]]) -> list[Region]:
    return [box for of_rank in boxes for box in of_rank]
