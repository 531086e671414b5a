"""All ranks succeed or all raise the same error, and no rank hangs."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from shardwright import comm
from shardwright.comm.coordinate import open_channel
from shardwright.errors import CommError, RankFailedError, RankLostError
from shardwright.testing import Died, Raised, Returned, outcomes, run_ranks


def fail_on(*ranks):
    def step():
        me = comm.world().rank
        if me in ranks:
            raise ValueError(f"no from {me}")
        return me * 10

    return step


def caught(step, **options):
    try:
        return comm.agree(step, what="save", **options)
    except CommError as error:
        return type(error).__name__, str(error), repr(error.__cause__)


def test_each_rank_gets_its_own_result_when_all_succeed():
    assert run_ranks(4, lambda: comm.agree(fail_on(), what="save")) == [0, 10, 20, 30]


@pytest.mark.parametrize("fanout", [2, 32])
def test_every_rank_raises_the_same_error_and_the_group_stays_usable(fanout):
    def body():
        open_channel(comm.world(), fanout=fanout)
        return [caught(fail_on(*ranks)) for ranks in ([3], [0, 2], [0, 1, 2, 3, 4], [])]

    for rank, (one, two, everyone, none) in enumerate(run_ranks(5, body)):
        own = f"ValueError('no from {rank}')"
        assert one == (
            "RankFailedError",
            "save failed on 1 rank\n  rank 3: ValueError: no from 3",
            own if rank == 3 else "None",
        )
        assert two[1] == "save failed on 2 ranks\n  rank 0: ValueError: no from 0\n  rank 2: ValueError: no from 2"
        assert two[2] == (own if rank in (0, 2) else "None")
        assert everyone[1].startswith("save failed on 5 ranks")
        assert none == rank * 10


def test_agree_gathers_bytes_of_all_ranks():
    def body():
        me = comm.world().rank
        result = comm.agree(lambda: (me, b"-" * me), what="save", gather=True)
        try:
            comm.agree(lambda: (1 // me, b"bytes"), what="save", gather=True)
        except RankFailedError as error:
            return result, [failure.kind for failure in error.failures]

    gathered = [b"", b"-", b"--"]
    assert run_ranks(3, body) == [((me, gathered), ["ZeroDivisionError"]) for me in range(3)]


def test_failures_include_the_traceback_of_the_failing_rank():
    def body():
        try:
            comm.agree(fail_on(1), what="save")
        except RankFailedError as error:
            return error.rank, error.failures[0].traceback

    for rank, traceback in run_ranks(2, body):
        assert rank == 1
        assert "in step" in traceback


def test_a_subset_of_ranks_can_agree():
    def body():
        me = comm.world().rank
        return caught(fail_on(3), group=comm.subgroup([1, 3])) if me in (1, 3) else None

    found = run_ranks(4, body)
    assert found[0] is found[2] is None
    assert found[1][1] == found[3][1] == "save failed on 1 rank\n  rank 3: ValueError: no from 3"


def test_an_interrupt_is_reported_to_other_ranks_and_reraised():
    def body():
        def step():
            if comm.world().rank == 1:
                raise KeyboardInterrupt

        try:
            comm.agree(step, what="save")
        except KeyboardInterrupt:
            return "interrupted"
        except RankFailedError as error:
            return error.failures[0].kind

    assert run_ranks(3, body) == ["KeyboardInterrupt", "interrupted", "KeyboardInterrupt"]


def test_agreeing_on_different_steps_raises_with_the_step_of_each_rank():
    def body():
        with pytest.raises(CommError, match="rank 0 is in 'load', rank 1 in 'save'"):
            comm.agree(lambda: None, what="save" if comm.world().rank else "load")
        return comm.gather_bytes(b"fine")

    assert run_ranks(3, body) == [[b"fine"] * 3] * 3


@pytest.mark.parametrize("fanout", [2, 32])
@pytest.mark.parametrize("victim", range(4))
def test_a_killed_rank_is_named_on_all_others_within_seconds(victim, fanout):
    def body():
        open_channel(comm.world(), fanout=fanout)

        def step():
            if comm.world().rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)

        comm.agree(step, what="save")

    start = time.monotonic()
    found = outcomes(4, body)
    assert time.monotonic() - start < 10
    assert found[victim] == Died(-signal.SIGKILL)
    for rank, outcome in enumerate(found):
        if rank != victim:
            assert isinstance(outcome, Raised), outcome
            assert isinstance(outcome.exception, RankLostError), outcome
            assert outcome.exception.ranks == (victim,), (rank, str(outcome.exception))
            assert f"rank {victim} closed its connection" in outcome.message


@pytest.mark.parametrize("victim", [0, 1, 3])
def test_a_rank_that_never_arrives_is_named_on_all_others(victim):
    def body():
        open_channel(comm.world(), fanout=2)
        comm.gather_bytes(b"all here once")
        if comm.world().rank == victim:
            time.sleep(5)
            return
        time.sleep(0.2 * comm.world().rank)
        comm.agree(lambda: None, what="save", timeout=1.0)

    for rank, outcome in enumerate(outcomes(4, body)):
        if rank != victim:
            assert isinstance(outcome, Raised), outcome
            assert outcome.exception.ranks == (victim,), (rank, outcome.message)
            assert "save: " in outcome.message
            assert "within 1 s" in outcome.message


def test_a_rank_that_never_connects_is_named():
    def body():
        if comm.world().rank == 0:
            time.sleep(3)
            return
        comm.agree(lambda: None, what="save", timeout=1.0)

    found = outcomes(2, body)
    assert found[0] == Returned(None)
    assert found[1].message == "save: rank 0 did not arrive within 1 s"


def test_a_group_cannot_agree_after_a_loss():
    def body():
        comm.gather_bytes(b"all here once")
        if comm.world().rank == 1:
            os._exit(0)
        for _ in range(2):
            with pytest.raises(RankLostError) as caught:
                comm.agree(lambda: None, what="save")
        return str(caught.value)

    found = outcomes(3, body)
    assert all(
        "cannot continue after an earlier loss: save: rank 1 closed its connection" in found[r].value for r in (0, 2)
    )


@pytest.mark.parametrize("fanout", [2, 32])
def test_gather_bytes_takes_messages_of_any_length(fanout):
    def body():
        open_channel(comm.world(), fanout=fanout)
        me = comm.world().rank
        return comm.gather_bytes(bytes([me]) * (me * 500_000))

    assert run_ranks(5, body) == [[bytes([rank]) * (rank * 500_000) for rank in range(5)]] * 5


def test_a_collective_names_the_peer_that_died():
    def body():
        me = comm.world().rank
        comm.all_gather(torch.ones(1))
        if me == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.all_gather(torch.ones(1))

    for rank, outcome in enumerate(outcomes(3, body)):
        if rank != 2:
            assert isinstance(outcome.exception, RankLostError), outcome
            assert outcome.message.startswith("all_gather over ranks [0, 1, 2]: rank 2 has ended")
            assert outcome.exception.ranks == (2,)
    found = outcomes(2, lambda: os._exit(1) if comm.world().rank else comm.all_reduce(torch.ones(1)))
    assert isinstance(found[0].exception, RankLostError)
    assert found[0].message.startswith("all_reduce over ranks [0, 1]: rank 1 has ended")


def test_agree_in_a_single_process_raises_the_same_errors():
    with pytest.raises(RankFailedError, match="save failed on 1 rank\n  rank 0: ValueError: no from 0") as caught:
        comm.agree(fail_on(0), what="save")
    assert isinstance(caught.value.__cause__, ValueError)
    assert comm.gather_bytes(b"x") == [b"x"]
