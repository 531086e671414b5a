"""A rank that dies before the connections of a channel exist is named."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
import torch

from shardwright import comm
from shardwright.comm.coordinate import Channel
from shardwright.errors import RankLostError
from shardwright.testing import Died, Returned, outcomes

RANKS = 3
BOUND = 10.0  # seconds; the timeout of the waits is 300


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arrive() -> None:
    """Enter the world again on all ranks, with no channel open and all beacons published."""
    comm.forget()
    comm.world()
    comm.all_gather(torch.zeros(1))


def errors_of(calls: dict[str, Callable[[], object]]) -> dict[str, tuple[str, tuple[int, ...], float]]:
    """Make these calls concurrently, and return the message, the lost ranks and the seconds until each raised."""
    errors: dict[str, tuple[str, tuple[int, ...], float]] = {}

    def attempt(name: str, call: Callable[[], object]) -> None:
        start = time.monotonic()
        try:
            call()
        except RankLostError as error:
            errors[name] = (str(error), error.ranks, time.monotonic() - start)

    threads = [threading.Thread(target=attempt, args=item) for item in calls.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def wait_for_the_dead(victim: int, opened: bool, fanout: int) -> dict[str, tuple[str, tuple[int, ...], float]]:
    rank = comm.world().rank
    arrive()
    pair = tuple(sorted({victim, (victim + 1) % RANKS}))
    groups = {"world": comm.world(), "side": comm.world().side_channel("checkpoint")}
    if rank in pair:
        groups["subgroup"] = comm.subgroup(pair)
    comm.all_gather(torch.zeros(1))
    for group in groups.values():
        if rank != victim or opened:
            group.channel = Channel(group, fanout)  # publishes its address, but does not connect
    if rank == victim:
        die()
    calls: dict[str, Callable[[], object]] = {
        "world": lambda: comm.agree(lambda: None, what="agree"),
        "side": lambda: comm.gather_bytes(b"", groups["side"], what="gather"),
    }
    if rank in pair:
        calls["subgroup"] = lambda: comm.agree(lambda: None, what="agree", group=groups["subgroup"])
    return errors_of(calls)


@pytest.mark.parametrize("opened", [False, True], ids=["before it listens", "before it connects"])
@pytest.mark.parametrize(("victim", "fanout"), [(0, 32), (1, 1), (2, 32)])
def test_a_rank_that_dies_before_channels_are_connected_is_named_within_seconds(victim, fanout, opened):
    found = outcomes(RANKS, wait_for_the_dead, victim, opened, fanout, grace=30)
    for rank, outcome in enumerate(found):
        if rank == victim:
            assert outcome == Died(-signal.SIGKILL)
            continue
        assert isinstance(outcome, Returned), outcome
        expected = {"world", "side", "subgroup"} if rank == (victim + 1) % RANKS else {"world", "side"}
        assert outcome.value.keys() == expected
        for text, ranks, seconds in outcome.value.values():
            assert ranks == (victim,)
            assert f"rank {victim}" in text
            assert seconds < BOUND


def test_a_rank_that_dies_before_creating_a_subgroup_is_named_within_seconds():
    def body() -> dict[str, tuple[str, tuple[int, ...], float]]:
        arrive()
        if comm.world().rank == 1:
            die()
        return errors_of({"subgroup": lambda: comm.subgroup([0, 1])} if comm.world().rank == 0 else {})

    found = outcomes(RANKS, body, grace=30)
    assert found[1] == Died(-signal.SIGKILL)
    assert isinstance(found[0], Returned), found[0]
    ((text, ranks, seconds),) = found[0].value.values()
    assert text.startswith("subgroup (0, 1): rank 1 has ended")
    assert ranks == (1,)
    assert seconds < BOUND


def test_ranks_wait_for_a_late_rank():
    def body() -> list[bytes]:
        arrive()
        if comm.world().rank == 1:
            time.sleep(4)
        return comm.gather_bytes(b"here", what="late")

    assert outcomes(RANKS, body) == [Returned([b"here"] * RANKS)] * RANKS


def test_ranks_wait_for_a_rank_that_reopens_its_listener_late():
    """The address of its first listener is in the store, and refuses connections for 7 s."""

    def body() -> list[bytes]:
        arrive()
        comm.gather_bytes(b"", what="first")
        comm.all_gather(torch.zeros(1))
        comm.forget()
        if comm.world().rank == 0:
            time.sleep(7)
        return comm.gather_bytes(b"here", what="again")

    assert outcomes(2, body) == [Returned([b"here"] * 2)] * 2
