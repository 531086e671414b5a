"""The backend's own collectives, started only when the ranks are known to be in the same one.

gloo matches collectives only by their count: ranks that call them with different sizes read wrong bytes, or crash. So
on a CPU the ranks first pass a barrier whose messages are tagged with the operation and its size; only ranks in the
same operation pass it. Small tensors are sent point to point, which needs no barrier.

NCCL has no tags, and a barrier would synchronise the CPU at each collective, so nothing is added there. Ranks out of
step are detected by the record that each keeps of its collectives, once they wait.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.comm.exchange import Operation, post
from shardwright.comm.flight import Flight
from shardwright.comm.group import Group
from shardwright.comm.ledger import code
from shardwright.comm.pending import Pending, explain
from shardwright.comm.simulate import device_type

__all__ = ["is_small", "native"]

_MAX_POINT_TO_POINT = 1 << 16  # bytes sent by one rank to all others

_TOKEN = torch.zeros(1, dtype=torch.uint8)


def is_small(tensor: Tensor, group: Group) -> bool:
    """True if a tensor is small enough to be sent to every rank point to point; never for NCCL."""
    if device_type(tensor) != "cpu" and group.moves(tensor.device):
        return False
    return tensor.nbytes * (group.size - 1) <= _MAX_POINT_TO_POINT


def native(call: Callable[[], dist.Work | None], group: Group, operation: Operation, payload: Tensor) -> list[Flight]:
    """Start one of the backend's own collectives."""
    if group.simulated:
        return post([], [(0, payload)], group, operation)  # it refuses values
    if payload.device.type == "cpu" or not group.moves(payload.device):
        _barrier(group, operation, payload.nbytes)
    try:
        work = call()
    except RuntimeError as error:
        raise explain(error, operation.kind, group, None) from error
    return [] if work is None else [Flight(work)]


def _barrier(group: Group, operation: Operation, nbytes: int) -> None:
    """Barrier: return when all ranks of the group are in the same operation with the same size.

    A dissemination barrier: log2(n) rounds, in each of which a rank receives from a peer twice as far away.
    """
    distance = 1
    while distance < group.size:
        step = Operation(operation.kind, operation.code ^ code(("meet", nbytes, distance)), operation.number)
        received = torch.empty(1, dtype=torch.uint8)
        after, before = (group.rank + distance) % group.size, (group.rank - distance) % group.size
        flights = post([(after, _TOKEN)], [(before, received)], group, step)
        Pending(operation.kind, group, flights, lambda: None, operation.number).wait()
        distance *= 2
