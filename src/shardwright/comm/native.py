"""The backend's own collectives, started only when the ranks are known to be in the same one.

gloo matches its collectives by their count alone: ranks that meet in different sizes read each other's wrong bytes, or
end by a signal. So on a CPU the ranks first pass a barrier whose messages have the tag of the operation and its size:
only ranks in the same one pass it. Where few bytes move, they move point to point, which needs no such step.

NCCL has no tags, and a step like this one would stop the CPU at each collective: there nothing is added. Ranks out of
step are found by the record that each keeps of its collectives, once they wait.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.comm.exchange import Operation, post
from shardwright.comm.group import Group
from shardwright.comm.ledger import code
from shardwright.comm.pending import Flight, Pending, explain

__all__ = ["few", "native"]

_FEW = 1 << 16  # bytes sent by one rank to all others

_TOKEN = torch.zeros(1, dtype=torch.uint8)


def few(tensor: Tensor, group: Group) -> bool:
    """Return whether a tensor is small enough to be sent to every rank of the group one by one. NCCL needs no such."""
    if tensor.device.type != "cpu" and group.moves(tensor.device):
        return False
    return tensor.nbytes * (group.size - 1) <= _FEW


def native(call: Callable[[], dist.Work | None], group: Group, operation: Operation, payload: Tensor) -> list[Flight]:
    """Start one of the backend's own collectives."""
    if payload.device.type == "cpu" or not group.moves(payload.device):
        _meet(group, operation, payload.nbytes)
    try:
        work = call()
    except RuntimeError as error:
        raise explain(error, operation.kind, group, None) from error
    return [] if work is None else [Flight(work)]


def _meet(group: Group, operation: Operation, nbytes: int) -> None:
    """Return when all ranks of the group have come to the same operation of the same size.

    In each round a rank hears from one twice as far away, which has heard from those before: after log2(n) rounds, from
    all of them, each over messages of one tag.
    """
    distance = 1
    while distance < group.size:
        step = Operation(operation.kind, operation.code ^ code(("meet", nbytes, distance)), operation.number)
        landing = torch.empty(1, dtype=torch.uint8)
        after, before = (group.rank + distance) % group.size, (group.rank - distance) % group.size
        flights = post([(after, _TOKEN)], [(before, landing)], group, step)
        Pending(operation.kind, group, flights, lambda: None, operation.number).wait()
        distance *= 2
