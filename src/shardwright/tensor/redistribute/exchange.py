"""Execute the steps that transfer regions unchanged: exchange and all-to-all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwright import comm
from shardwright.comm.region_exchange import Part, RegionTensor, all_to_all_regions, copy_region, exchange_regions
from shardwright.comm.rounds import split_region
from shardwright.tensor.redistribute.context import ExecutionContext, Finish
from shardwright.tensor.redistribute.schedule import Message, held, schedule
from shardwright.tensor.redistribute.steps import AllToAll, Exchange

__all__ = ["exchange"]


def exchange(step: Exchange | AllToAll, local: Tensor, context: ExecutionContext) -> Finish:
    """Start to send exactly the missing regions."""
    mine = schedule(step.before, step.after, context.rank)
    splits = context.rounds(step)
    want, have = held(step.after, context.rank), held(step.before, context.rank)
    shape = step.after.local_shape(context.rank) if context.rank in step.after.mesh else (0,) * max(1, step.after.ndim)
    out = torch.empty(shape, dtype=local.dtype, device=local.device)
    source, target = RegionTensor(local, have), RegionTensor(out, want)
    if mine.kept is not None:
        copy_region(mine.kept, source, target)
    if isinstance(step, AllToAll) and splits == 1:
        group = context.group(step.before.mesh, (step.mesh_dim,))
        finish = all_to_all_regions(
            _parts(mine.sends, source, group), _parts(mine.receives, target, group), local, group
        )
    else:
        group = context.groups.everyone
        boxes = (box for message in (*mine.sends, *mine.receives) for box in message.boxes)
        finish = exchange_regions(
            _parts(mine.sends, source, group),
            _parts(mine.receives, target, group),
            group,
            splits=splits,
            rounds=max((len(split_region(box, splits)) for box in boxes), default=0),
        )

    def result() -> Tensor:
        finish()
        return out

    return result


def _parts(messages: Sequence[Message], tensor: RegionTensor, group: comm.Group) -> dict[int, list[Part]]:
    return {group.ranks.index(message.peer): [Part(box, tensor) for box in message.boxes] for message in messages}
