"""A rank that dies during a transfer is named by the others at once, and none of them waits for it."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from torch.nn import functional

from shardwright import comm, sharded
from shardwright.errors import RankLostError
from shardwright.sharded.transfer import transfer
from shardwright.testing import Died, Returned, outcomes

RANKS = [f"rank:{rank}/cpu" for rank in range(4)]


def _die() -> None:
    if comm.rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)


def _lose_a_rank(during: str) -> tuple[str, float]:
    table = sharded.rand(sharded.ChunkShardingSpec(0, RANKS), 64, 8, requires_grad=True)
    rows = functional.embedding(torch.arange(8), table).sum()
    run = transfer.ShardTransfer.run

    def run_and_die(self: transfer.ShardTransfer, *args: object, **kwargs: object) -> object:
        _die()
        return run(self, *args, **kwargs)  # type: ignore[arg-type]  # what was given

    def work() -> None:
        if during == "reshard":
            table.detach().reshard(sharded.ChunkShardingSpec(1, RANKS))
        else:
            _die()
            rows.backward()

    start = time.monotonic()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(transfer.ShardTransfer, "run", run_and_die)
        with pytest.raises(RankLostError) as error:
            work()
    return str(error.value), time.monotonic() - start


@pytest.mark.parametrize("during", ["reshard", "the backward of an embedding"])
def test_a_rank_that_dies_is_named_on_the_others_at_once(during: str) -> None:
    found = outcomes(4, _lose_a_rank, during)
    assert found[2] == Died(-signal.SIGKILL)
    for one in (found[0], found[1], found[3]):
        assert isinstance(one, Returned), one
        message, seconds = one.value
        assert "rank 2" in message
        assert seconds < 10
