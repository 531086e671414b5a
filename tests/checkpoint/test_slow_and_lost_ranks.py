"""While ranks of a host read together, slow ranks are waited for and killed ones are named at once."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from shardwright import checkpoint, comm
from shardwright.checkpoint.reading import collective_read, host_window
from shardwright.checkpoint.reading.host_window import Process
from shardwright.errors import RankLostError
from shardwright.testing import Died, Raised, outcomes, run_ranks
from tests.checkpoint.two_ranks import is_right, stored, wanted

MIB = 1 << 20


def _load_slowly(folder: str) -> list[bool]:
    stored(folder)
    os.environ["SHARDWRIGHT_TIMEOUT"] = "0.6"
    collective_read._MIN_BYTES_PER_SECOND = 2 * MIB

    def slow(done: int, total: int) -> None:
        time.sleep(1.2 * 4 * MIB / total if done >= total and comm.rank() else 0)

    try:
        return [is_right(checkpoint.load(wanted(dim), folder, progress=slow), dim) for dim in (0, 1)]
    finally:
        del os.environ["SHARDWRIGHT_TIMEOUT"]
        collective_read._MIN_BYTES_PER_SECOND = 5 * MIB


def test_a_slow_rank_is_waited_for(tmp_path: Path) -> None:
    assert run_ranks(2, _load_slowly, str(tmp_path)) == [[True, True]] * 2


def _load_and_die(folder: str) -> None:
    stored(folder, rows=4096)

    def die(done: int, total: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    began = time.monotonic()
    try:
        checkpoint.load(wanted(1, rows=4096), folder, progress=die if comm.rank() else None)
    except RankLostError as error:
        raise RuntimeError(f"lost {error.ranks} after {time.monotonic() - began:.2f} s") from error


def test_a_rank_killed_during_shared_reads_is_named_at_once(tmp_path: Path) -> None:
    first, second = outcomes(2, _load_and_die, str(tmp_path), grace=30)
    assert isinstance(second, Died)
    assert isinstance(first, Raised)
    message = str(first)
    assert "lost (1,) after" in message
    assert float(message.split(" after ")[1].split()[0]) < 5


def test_a_zombie_process_counts_as_gone() -> None:
    own = Process.own()
    assert own is not None
    assert not own.is_gone()
    assert own._replace(started="1").is_gone()  # its number is another's now
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    began = host_window._state_of(child)[1]
    assert own._replace(pid=child, started=began).is_gone()
    os.waitpid(child, 0)
    assert own._replace(pid=child, started=began).is_gone()
