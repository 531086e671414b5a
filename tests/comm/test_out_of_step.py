"""Ranks that run different programs raise instead of receiving each other's data; slow ranks are waited for."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
import torch

import shardwright as sw
from shardwright import comm
from shardwright.comm.ledger import code, tag
from shardwright.errors import ProgramMismatchError, RankLostError
from shardwright.testing import Died, Raised, Returned, outcomes

FULL = os.environ.get("SHARDWRIGHT_BUDGET") == "full"
LARGE = 1 << 15  # elements: more than is sent point to point

DIFFERENT: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "sizes of an all-gather": (
        lambda: comm.all_gather(torch.ones(2)),
        lambda: comm.all_gather(torch.ones(4)),
    ),
    "dtypes of one size": (
        lambda: comm.all_gather(torch.ones(2)),
        lambda: comm.all_gather(torch.ones(2, dtype=torch.int32)),
    ),
    "kinds": (
        lambda: comm.all_gather(torch.ones(2)),
        lambda: comm.all_reduce(torch.ones(2)),
    ),
    "sizes of a large all-reduce": (
        lambda: comm.all_reduce(torch.ones(LARGE)),
        lambda: comm.all_reduce(torch.ones(2 * LARGE)),
    ),
    "sizes of a broadcast": (
        lambda: comm.broadcast(torch.ones(2)),
        lambda: comm.broadcast(torch.ones(LARGE)),
    ),
    "pieces of an all-to-all": (
        lambda: comm.all_to_all([torch.ones(2)] * 2, [(2,)] * 2),
        lambda: comm.all_to_all([torch.ones(3)] * 2, [(3,)] * 2),
    ),
    "sizes of a message": (
        lambda: comm.exchange({1: torch.ones(2)}, {1: torch.empty(2)}),
        lambda: comm.exchange({0: torch.ones(3)}, {0: torch.empty(3)}),
    ),
    "a message and a collective": (
        lambda: comm.exchange({1: torch.ones(2)}, {1: torch.empty(2)}),
        lambda: comm.all_gather(torch.ones(2)),
    ),
}


@pytest.mark.parametrize("what", list(DIFFERENT)[:: 1 if FULL else 2])
def test_mismatched_collectives_raise_on_both_ranks(what: str) -> None:
    def work() -> object:
        comm.all_reduce(torch.ones(1))
        return DIFFERENT[what][comm.rank()]()

    start = time.monotonic()
    for outcome in outcomes(2, work, timeout=30, grace=20):
        assert isinstance(outcome, Raised), outcome
        assert isinstance(outcome.exception, ProgramMismatchError), outcome
        assert "rank 0: " in outcome.message
        assert "rank 1: " in outcome.message
        assert "test_out_of_step.py:" in outcome.message
    assert time.monotonic() - start < 20


def test_gathering_different_tensors_of_one_layout_raises() -> None:
    def work() -> list[float]:
        mesh = sw.init_device_mesh("cpu", (2,))
        logged = sw.distribute_tensor(torch.arange(4.0), mesh, [sw.Shard(0)])
        wanted = sw.distribute_tensor(torch.arange(40.0, 44.0), mesh, [sw.Shard(0)])
        if comm.rank() == 1:
            logged.full_tensor()  # `if rank == 1: log(x)`
        return wanted.full_tensor().tolist()

    for outcome in outcomes(2, work, timeout=30, grace=20):
        assert isinstance(outcome, Raised), outcome
        assert isinstance(outcome.exception, ProgramMismatchError), outcome


def test_a_cycle_of_waiting_ranks_raises() -> None:
    def work() -> None:
        comm.all_reduce(torch.ones(1))
        comm.exchange({}, {(comm.rank() + 1) % 3: torch.empty(2)})

    for outcome in outcomes(3, work, timeout=30, grace=20):
        assert isinstance(outcome, Raised), outcome
        assert isinstance(outcome.exception, ProgramMismatchError), outcome
        assert all(f"rank {rank}: exchange" in outcome.message for rank in range(3))


def test_ranks_wait_for_a_slow_rank() -> None:
    def work() -> list[float]:
        comm.all_reduce(torch.ones(1))
        if comm.rank() == 1:
            time.sleep(5)  # it is queried several times meanwhile
        return comm.all_gather(torch.full((1,), float(comm.rank()))).tolist()

    assert outcomes(3, work, timeout=30) == [Returned([0.0, 1.0, 2.0])] * 3


def test_a_killed_rank_is_detected_while_its_child_holds_connections_open() -> None:
    def work() -> None:
        comm.all_reduce(torch.ones(1))
        if comm.rank() == 1:
            if os.fork() == 0:
                time.sleep(20)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        comm.all_gather(torch.ones(2))

    start = time.monotonic()
    found = outcomes(3, work, timeout=30, grace=15)
    assert found[1] == Died(-signal.SIGKILL)
    for outcome in (found[0], found[2]):
        assert isinstance(outcome, Raised), outcome
        assert isinstance(outcome.exception, RankLostError), outcome
        assert outcome.exception.ranks == (1,)
    assert time.monotonic() - start < 18


def test_surviving_ranks_do_not_wait_for_each_other() -> None:
    def work() -> None:
        comm.all_gather(torch.ones(1))
        if comm.rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if comm.rank() == 1:
            time.sleep(1.5)  # rank 0 has posted its messages by now; this rank detects the loss while it posts
        comm.all_gather(torch.ones(1))

    found = outcomes(3, work)
    for outcome in found[:2]:
        assert isinstance(outcome, Raised), outcome
        assert isinstance(outcome.exception, RankLostError), outcome
        assert outcome.exception.ranks == (2,)


def test_tags_distinguish_numbers_sizes_and_kinds() -> None:
    kind, other = code(("all_gather", torch.float32, "")), code(("all_gather", torch.int32, ""))
    numbers = {tag(number, kind, 8) for number in range(1000)}
    sizes = {tag(7, kind, nbytes) for nbytes in range(1000)}
    assert len(numbers) == len(sizes) == 1000
    assert tag(7, kind, 8) != tag(7, other, 8)
    assert all(1 << 30 <= value < 1 << 31 for value in numbers | sizes)


def test_a_scalar_is_redistributed_between_a_submesh_and_all_ranks() -> None:
    def work() -> tuple[float, float]:
        part, everyone = sw.DeviceMesh("cpu", [1, 2]), sw.DeviceMesh("cpu", [0, 1, 2])
        scalar = sw.distribute_tensor(torch.tensor(5.0), part)
        moved = scalar.redistribute(everyone, [sw.Replicate()])
        back = moved.redistribute(part, [sw.Replicate()]).redistribute(everyone, [sw.Replicate()])
        return moved.to_local().item(), back.to_local().item()

    assert outcomes(3, work, timeout=30) == [Returned((5.0, 5.0))] * 3


def test_tensor_numbers_agree_after_one_rank_called_forget():
    def body() -> list[float]:
        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        sw.distribute_tensor(torch.ones(4), mesh, [sw.Shard(0)])
        if comm.world().rank == 0:
            comm.forget()
        second = sw.distribute_tensor(torch.arange(4.0), mesh, [sw.Shard(0)])
        full: list[float] = second.full_tensor().tolist()
        comm.forget()  # on all ranks, so that they can open their channels again
        return full

    assert outcomes(2, body) == [Returned([0.0, 1.0, 2.0, 3.0])] * 2
