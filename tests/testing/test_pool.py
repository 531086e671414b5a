"""The pool reuses rank processes, reports their failures and replaces those that die or hang."""

from __future__ import annotations

import dataclasses
import operator
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings

import pytest
import torch

from shardwright import comm
from shardwright.errors import RanksError
from shardwright.testing import Died, Hung, Raised, RankPool, Returned, on_ranks, outcomes, run_ranks
from shardwright.testing.ranks.pickling import dumps_call


@dataclasses.dataclass
class Point:
    x: int


def fail_on(rank, *, then=None):
    if comm.world().rank == rank:
        raise ValueError(f"rank {rank} failed")
    return then() if then else "fine"


def is_imported_here():
    return __name__ in sys.modules


def test_processes_are_reused():
    first = run_ranks(4, os.getpid)
    assert len(set(first)) == 4
    assert run_ranks(4, os.getpid) == first
    assert run_ranks(2, os.getpid) == first[:2]
    assert os.getpid() not in first


def test_the_world_has_the_requested_size():
    for size in (3, 1, 4, 2):
        assert run_ranks(size, lambda: (comm.world().rank, comm.world().size)) == [(r, size) for r in range(size)]


def test_closures_arguments_tensors_and_local_classes_are_pickled():
    offset = torch.tensor([10])
    results = run_ranks(2, lambda scale, *, shift: Point((offset * scale + shift).item()), 3, shift=4)
    assert results == [Point(34), Point(34)]


def test_the_error_contains_the_traceback_of_the_failing_rank():
    with pytest.raises(RanksError, match="1 of 3 ranks failed") as caught:
        run_ranks(3, fail_on, 1)
    text = str(caught.value)
    assert "rank 1 raised ValueError: rank 1 failed" in text
    assert 'raise ValueError(f"rank {rank} failed")' in text
    assert run_ranks(3, lambda: comm.all_gather(torch.ones(1)).tolist()) == [[1.0] * 3] * 3


def test_the_cause_is_reported_before_its_consequences():
    def body():
        if comm.world().rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.all_gather(torch.ones(1))

    with pytest.raises(RanksError) as caught:
        run_ranks(3, body)
    assert str(caught.value).splitlines()[:2] == ["3 of 3 ranks failed", "rank 2 died: SIGKILL"]


def test_a_killed_rank_is_reported_and_replaced():
    before = run_ranks(3, os.getpid)
    found = outcomes(3, lambda: os.kill(os.getpid(), signal.SIGKILL) if comm.world().rank == 1 else "alive")
    assert found == [Returned("alive"), Died(-9), Returned("alive")]
    assert found[1].signal == "SIGKILL"
    after = run_ranks(3, os.getpid)
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_a_hung_rank_is_reported_with_its_stack_and_replaced():
    def sleeps_forever():
        if comm.world().rank == 0:
            threading.Event().wait()
        return "done"

    found = outcomes(2, sleeps_forever, timeout=0.5)
    assert found[1] == Returned("done")
    assert isinstance(found[0], Hung)
    assert found[0].why == "no answer within 0.5 s"
    assert "in sleeps_forever" in found[0].stacks
    assert run_ranks(2, lambda: 1) == [1, 1]


def test_ranks_that_wait_for_a_failed_rank_count_as_hung_after_the_grace_period():
    start = time.monotonic()
    found = outcomes(3, fail_on, 2, then=lambda: comm.all_reduce(torch.ones(1)), grace=0.5)
    assert time.monotonic() - start < 10
    assert isinstance(found[2], Raised)
    for outcome in found[:2]:
        assert isinstance(outcome, Hung)
        assert outcome.why == "still waiting 0.5 s after rank 2 raised"
        assert "all_reduce" in outcome.stacks
    assert run_ranks(3, lambda: 1) == [1, 1, 1]


def test_functions_of_test_modules_are_pickled_by_value_in_arguments_too():
    called = run_ranks(2, operator.call, is_imported_here)  # operator.call itself is imported by the ranks
    assert called == [False, False]


def test_a_result_that_cannot_be_pickled_raises_with_its_type():
    (found,) = outcomes(1, threading.Lock)
    assert "rank 0: the result of type lock cannot be pickled" in found.message


def test_an_exception_that_cannot_be_pickled_keeps_its_text():
    def body():
        class AwkwardError(Exception):
            def __init__(self, left, right):
                super().__init__(f"{left} and {right}")

        raise AwkwardError("this", "that")

    (found,) = outcomes(1, body)
    assert (found.kind, found.message, found.exception) == ("AwkwardError", "this and that", None)


def test_warning_filters_apply_on_the_ranks():
    def body():
        warnings.warn("careful", UserWarning, stacklevel=1)

    (found,) = outcomes(1, body)
    assert (found.kind, found.message) == ("UserWarning", "careful")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert outcomes(1, body) == [Returned(None)]


@pytest.fixture
def seven():
    return 7


@pytest.mark.parametrize("factor", [2, 3])
@on_ranks(2)
def test_a_decorated_body_runs_on_every_rank_with_fixtures_and_parameters(seven, factor):
    assert comm.world().size == 2
    assert comm.all_reduce(torch.tensor(seven * factor)).item() == 14 * factor


def test_pools_have_separate_processes_and_end_with_their_context():
    with RankPool() as pool:
        pids = pool.run(2, os.getpid)
        assert pool.pids == pids
        assert not set(pids) & set(run_ranks(2, os.getpid))
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_ranks_end_when_the_parent_process_is_killed():
    script = textwrap.dedent("""
        import os, signal, sys
        from shardwright.testing import run_ranks
        print(*run_ranks(2, os.getpid), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    # A script without a main guard: ranks must not run it again.
    process = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, timeout=60)
    assert process.returncode == -signal.SIGKILL
    pids = [int(pid) for pid in process.stdout.split()]
    deadline = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_calls_are_pickled_from_several_threads_at_once():
    """The list of modules that are pickled by value is shared by all threads."""

    def pickle_often():
        try:
            for _ in range(50):
                dumps_call(lambda: 1, (), {})
        except ValueError as error:
            failures.append(error)

    failures = []
    threads = [threading.Thread(target=pickle_often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
