"""A rank that dies before the ranks have met on a channel is named, though nobody has a connection to it."""

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
    """Let all ranks come into the world anew, with no channel open, each able to tell the others where to ask."""
    comm.forget()
    comm.world()
    comm.all_gather(torch.zeros(1))


def errors_of(calls: dict[str, Callable[[], object]]) -> dict[str, tuple[str, tuple[int, ...], float]]:
    """Make these calls at the same time, and return what each raised, whom it named, and after how long."""
    found: dict[str, tuple[str, tuple[int, ...], float]] = {}

    def attempt(name: str, call: Callable[[], object]) -> None:
        start = time.monotonic()
        try:
            call()
        except RankLostError as error:
            found[name] = (str(error), error.ranks, time.monotonic() - start)

    threads = [threading.Thread(target=attempt, args=item) for item in calls.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def wait_for_the_dead(victim: int, opened: bool, fanout: int) -> dict[str, tuple[str, tuple[int, ...], float]]:
    rank = comm.world().rank
    arrive()
    pair = tuple(sorted({victim, (victim + 1) % RANKS}))
    groups = {"world": comm.world(), "aside": comm.world().aside("checkpoint")}
    if rank in pair:
        groups["subgroup"] = comm.subgroup(pair)
    comm.all_gather(torch.zeros(1))
    for group in groups.values():
        if rank != victim or opened:
            group.channel = Channel(group, fanout)  # which tells the others the address, and connects to nobody
    if rank == victim:
        die()
    calls: dict[str, Callable[[], object]] = {
        "world": lambda: comm.agree(lambda: None, what="agree"),
        "aside": lambda: comm.gather_bytes(b"", groups["aside"], what="gather"),
    }
    if rank in pair:
        calls["subgroup"] = lambda: comm.agree(lambda: None, what="agree", group=groups["subgroup"])
    return errors_of(calls)


@pytest.mark.parametrize("opened", [False, True], ids=["before it opens its door", "before it connects"])
@pytest.mark.parametrize(("victim", "fanout"), [(0, 32), (1, 1), (2, 32)])
def test_a_rank_that_dies_before_the_ranks_have_met_is_named_within_seconds(victim, fanout, opened):
    found = outcomes(RANKS, wait_for_the_dead, victim, opened, fanout, grace=30)
    for rank, outcome in enumerate(found):
        if rank == victim:
            assert outcome == Died(-signal.SIGKILL)
            continue
        assert isinstance(outcome, Returned), outcome
        expected = {"world", "aside", "subgroup"} if rank == (victim + 1) % RANKS else {"world", "aside"}
        assert outcome.value.keys() == expected
        for text, ranks, seconds in outcome.value.values():
            assert ranks == (victim,)
            assert f"rank {victim}" in text
            assert seconds < BOUND


def test_a_rank_that_dies_before_it_asks_for_a_subgroup_is_named_within_seconds():
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


def test_a_rank_that_comes_late_is_waited_for():
    def body() -> list[bytes]:
        arrive()
        if comm.world().rank == 1:
            time.sleep(4)
        return comm.gather_bytes(b"here", what="late")

    assert outcomes(RANKS, body) == [Returned([b"here"] * RANKS)] * RANKS


def test_a_rank_that_opens_its_door_again_late_is_waited_for():
    """The address of its first door is in the store, and refuses connections for longer than a shut door used to be."""

    def body() -> list[bytes]:
        arrive()
        comm.gather_bytes(b"", what="first")
        comm.all_gather(torch.zeros(1))
        comm.forget()
        if comm.world().rank == 0:
            time.sleep(7)
        return comm.gather_bytes(b"here", what="again")

    assert outcomes(2, body) == [Returned([b"here"] * 2)] * 2
