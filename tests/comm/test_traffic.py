"""Traffic counts the bytes of payload received from other ranks exactly."""

from __future__ import annotations

import torch

from shardwright import comm
from shardwright.testing import run_ranks


def test_bytes_received_are_counted_exactly():
    def body():
        me = comm.world().rank
        with comm.count() as traffic:
            comm.all_gather(torch.ones([3, 0, 1, 5][me], 2), sizes=[3, 0, 1, 5])
            comm.reduce_scatter(torch.ones(9, dtype=torch.float64), sizes=[3, 0, 1, 5])
            comm.all_reduce(torch.ones(8))
            comm.all_to_all([torch.ones(me)] * 4, [(source,) for source in range(4)])
            comm.broadcast(torch.ones(5, dtype=torch.int8), src=1)
            comm.exchange({(me + 1) % 4: torch.ones(6)}, {(me - 1) % 4: torch.ones(6)})
        with comm.count() as nothing:
            pass
        comm.all_reduce(torch.ones(8))
        assert nothing.bytes == 0
        assert not nothing.calls
        return dict(traffic.calls), dict(traffic.received), traffic.bytes

    for me, (calls, received, total) in enumerate(run_ranks(4, body)):
        mine = [3, 0, 1, 5][me]
        assert received == {
            "all_gather": (9 - mine) * 2 * 4,
            "reduce_scatter": 3 * mine * 8,
            "all_reduce": 2 * 3 * 32 // 4,
            "all_to_all": (6 - me) * 4,
            "broadcast": 0 if me == 1 else 5,
            "exchange": 24,
        }
        assert set(calls.values()) == {1}
        assert total == sum(received.values())


def test_listeners_receive_kind_bytes_and_ranks():
    def body():
        seen = []
        with comm.listen(seen.append):
            comm.all_gather(torch.ones(2))
        return seen

    assert run_ranks(2, body) == [[comm.Transfer("all_gather", 8, (0, 1))]] * 2


def test_a_single_rank_has_no_traffic():
    with comm.count() as traffic:
        comm.all_gather(torch.ones(4))
        comm.all_to_all([torch.ones(4)], [(4,)])
        comm.exchange({0: torch.ones(1)}, {0: torch.ones(1)})
    assert traffic.bytes == 0
    assert not traffic.calls
