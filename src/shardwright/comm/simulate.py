"""Act as one rank of a world that does not exist: collectives of meta tensors send nothing, but are counted.

Everything that decides on communication runs unchanged, so the counts are those of the ranks themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from shardwright.comm import group as groups
from shardwright.comm.group import Group
from shardwright.errors import CommError

__all__ = ["device_type", "is_simulated", "simulate"]

_device = "cpu"


@contextmanager
def simulate(ranks: int, rank: int = 0, *, device: str = "cpu") -> Iterator[Group]:
    """Make this process rank `rank` of `ranks` inside the context; only meta tensors can be communicated there.

    A collective returns a meta tensor at once, and reports what it would have received (`comm.count`) on ranks with
    this type of device. Bytes gathered by `gather_bytes` or `agree` are taken to be the same on every rank. The world
    that the process belongs to, if any, is untouched.

    >>> import torch
    >>> from shardwright import comm
    >>> with simulate(4, rank=1), comm.count() as traffic:
    ...     comm.all_gather(torch.empty(2, 3, device="meta")).shape
    torch.Size([8, 3])
    >>> traffic.calls["all_gather"], traffic.bytes
    (1, 72)
    """
    global _device
    if not 0 <= rank < ranks:
        raise CommError(f"simulate: rank {rank} is not among {ranks} ranks: pass a rank from 0 to {ranks - 1}")
    before_device, _device = _device, device
    before = groups.replace_world(Group(tuple(range(ranks)), rank, None))
    try:
        yield groups.world()
    finally:
        _device = before_device
        groups.restore_world(before)


def is_simulated() -> bool:
    """Return whether this process acts as a rank of a simulated world.

    >>> with simulate(2):
    ...     is_simulated()
    True
    """
    return groups.world().simulated


def device_type(tensor: Tensor) -> str:
    """Return the type of a tensor's device; of a meta tensor in a simulated world, that of the simulated ranks.

    >>> import torch
    >>> device_type(torch.ones(1))
    'cpu'
    """
    if tensor.is_meta and is_simulated():
        return _device
    return tensor.device.type
