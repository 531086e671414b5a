"""A second world in the same store is not affected by errors of the first."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from shardwright import comm
from shardwright.errors import ProgramMismatchError, RankLostError
from shardwright.testing import Raised, outcomes


class FoundError(Exception):
    """Carries the results; the pool lets ranks that raise join a new world."""


def two_worlds(port: int) -> None:
    rank = comm.world().rank
    comm.leave()
    store = comm.reach_store(port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    comm.all_gather(torch.zeros(1))
    # Only the first rank takes part: it closes its listener and publishes the loss.
    if rank == 0:
        with pytest.raises(RankLostError):
            comm.gather_bytes(b"", what="alone", timeout=0.5)
    # Both wait for a message of the other: the watch ends the wait and publishes a verdict.
    with pytest.raises(ProgramMismatchError):
        comm.exchange({}, {1 - rank: torch.zeros(3)})
    dist.destroy_process_group()  # without comm.forget
    # torch counts its groups from 0 again, so gloo may read the addresses of the first world: give it other keys.
    dist.distributed_c10d._world.group_count = 1
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    dist.barrier()
    # The first rank is late: the other reads the loss published in the first world, ignores it, and waits.
    if rank == 0:
        time.sleep(1)
    gathered = comm.gather_bytes(f"from {rank}".encode(), what="second world", timeout=60)
    # Late again: the other queries its status, reads the verdict of the first world, and ignores it.
    if rank == 0:
        time.sleep(5)
    total = comm.all_reduce(torch.ones(2)).tolist()
    comm.leave()
    raise FoundError(total, gathered)


def test_a_second_world_in_the_same_store_ignores_errors_of_the_first():
    store = comm.host_store()
    for outcome in outcomes(2, two_worlds, store.port):
        assert isinstance(outcome, Raised), outcome
        assert outcome.exception is not None, outcome
        assert outcome.exception.args == ([2.0, 2.0], [b"from 0", b"from 1"]), outcome
