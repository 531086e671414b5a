"""A separate control channel of a group: two threads of each rank communicate concurrently and independently."""

from __future__ import annotations

import random
import threading
import time

from shardwright import comm
from shardwright.testing import on_ranks, run_ranks


@on_ranks(4)
def test_two_threads_communicate_concurrently_on_separate_channels() -> None:
    everyone = comm.world()
    side = everyone.side_channel("checkpoint")
    rank, rounds = everyone.rank, 60
    dice = random.Random(rank)
    gathered: list[list[bytes]] = []
    errors: list[BaseException] = []

    def communicate() -> None:
        pauses = random.Random(100 + rank)
        try:
            for number in range(rounds):
                time.sleep(pauses.random() * 0.002)
                message = f"side {rank} {number}".encode()
                gathered.append(comm.gather_bytes(message, side, what=f"side {number}", timeout=20))
        except BaseException as error:  # noqa: BLE001  # raised below, in the test's own thread
            errors.append(error)

    thread = threading.Thread(target=communicate)
    thread.start()
    for number in range(rounds):
        time.sleep(dice.random() * 0.002)
        messages = comm.gather_bytes(f"main {rank} {number}".encode(), everyone, what=f"main {number}", timeout=20)
        assert messages == [f"main {other} {number}".encode() for other in range(4)]
        assert comm.agree(lambda: rank, what="agree", group=everyone, timeout=20) == rank
    thread.join()
    assert errors == []
    assert gathered == [[f"side {other} {number}".encode() for other in range(4)] for number in range(rounds)]


@on_ranks(2)
def test_a_side_channel_is_kept_until_forget() -> None:
    side = comm.world().side_channel("checkpoint")
    assert comm.world().side_channel("checkpoint") is side
    assert comm.world().side_channel("other") is not side
    comm.gather_bytes(b"", side, what="first")
    assert side.channel is not None
    assert comm.world().channel is not side.channel
    comm.gather_bytes(b"", what="barrier, so that no rank closes its connections early")
    comm.forget()
    assert side.channel is None
    assert comm.world().side_channel("checkpoint") is not side


def test_the_pool_works_after_forget() -> None:
    assert run_ranks(2, lambda: comm.world().size) == [2, 2]
