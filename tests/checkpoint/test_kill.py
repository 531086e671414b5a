"""Killing a rank (SIGKILL) during a save, a removal or a restore loses no checkpoint."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

from shardwright import comm
from shardwright.checkpoint import CheckpointManager, PerRank, load, read, save, verify
from shardwright.checkpoint.commit import Commit, MakeManifest
from shardwright.errors import CommError, RankFailedError, ShardwrightError
from shardwright.storage import Calls, LocalStorage
from shardwright.testing import Died, Raised, Returned, outcomes, run_ranks

FULL = os.environ.get("SHARDWRIGHT_BUDGET") == "full"
ROUNDS = 50 if FULL else 5
RANKS = 4
BOUND = 15.0  # seconds in which survivors raise
CHANGING = ("open", "close", "pwritev", "fsync", "rename", "unlink", "lock", "unlock")

pytestmark = pytest.mark.timeout(1200 if FULL else 180)


class DeadlyCalls(Calls):
    """The process is killed before, or right after, its call of this number."""

    def __init__(self, deadly: int = -1, *, after: bool = False) -> None:
        self.made: list[str] = []
        for name in CHANGING:
            setattr(self, name, self._guarded(name, getattr(self, name), deadly, after))

    def _guarded(self, name: str, call: Any, deadly: int, after: bool) -> Any:
        def guarded(*args: Any) -> Any:
            here = len(self.made) == deadly
            self.made.append(name)
            if here and not after:
                die()
            result = call(*args)
            if here:
                die()
            return result

        return guarded


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def state(number: int, rank: int) -> dict[str, Any]:
    return {
        "number": number,
        "w": torch.arange(1 << 19, dtype=torch.float32) * (number + 1),
        "b": torch.full((3, 5), number).t(),
        "own": PerRank(torch.full((1000,), 10 * number + rank)),
    }


def save_all(path: Path, number: int) -> float:
    start = time.monotonic()
    save(state(number, comm.world().rank), path)
    return time.monotonic() - start


def holds(path: Path) -> int:
    """The number of the state that loads, exactly, on four ranks and on one."""
    number = int(read(path)["number"])
    expected = state(number, 0)
    plain = read(path)
    assert torch.equal(plain["w"], expected["w"])
    assert torch.equal(plain["b"], expected["b"])
    return number


def holds_on_ranks(path: Path) -> int:
    def body() -> int:
        rank = comm.world().rank
        target = state(-1, -1)
        load(target, path)
        expected = state(target["number"], rank)
        assert torch.equal(target["w"], expected["w"])
        assert torch.equal(target["b"], expected["b"])
        assert torch.equal(target["own"].value, expected["own"].value)
        return int(target["number"])

    (number,) = set(run_ranks(RANKS, body))
    return number


def data_files(path: Path) -> int:
    return len([name for name in os.listdir(path) if name.endswith((".safetensors", ".tmp"))])


def killed_at_a_moment(path: Path, number: int, victim: int, moment: float) -> None:
    """The victim is killed so many seconds after the save began, wherever it is then."""
    rank = comm.world().rank
    comm.gather_bytes(b"all here")
    if rank == victim:
        threading.Thread(target=lambda: (time.sleep(moment), die()), daemon=True).start()
    save(state(number, rank), path)
    if rank == victim:
        time.sleep(60)  # it was faster than its end


def killed_at_a_call(path: Path, number: int, victim: int, call: int, after: bool) -> None:
    rank = comm.world().rank
    save(state(number, rank), LocalStorage(path, DeadlyCalls(call, after=after) if rank == victim else Calls()))
    if rank == victim:
        die()


def check_round(path: Path, found: list[Any], took: float, victim: int, old: int, new: int) -> str:
    """What every round promises; returns which of the two states was left."""
    assert found[victim] == Died(-signal.SIGKILL), found[victim]
    assert took < BOUND
    survivors = [outcome for rank, outcome in enumerate(found) if rank != victim]
    for outcome in survivors:
        assert isinstance(outcome, Raised | Returned), outcome
        if isinstance(outcome, Raised):
            assert isinstance(outcome.exception, CommError), outcome
            assert str(victim) in outcome.message
    left = holds(path)
    assert left in (old, new)
    if any(isinstance(outcome, Returned) for outcome in survivors):
        assert left == new, "a rank was told that it is saved"
    assert holds_on_ranks(path) == left
    run_ranks(RANKS, save_all, path, new + 1)
    assert holds(path) == new + 1
    assert data_files(path) == RANKS
    return "old" if left == old else "new"


def test_killing_a_rank_during_a_save_loses_no_checkpoint(tmp_path, capsys):
    chance = random.Random(11)
    usual = max(run_ranks(RANKS, save_all, tmp_path, 1))

    def calls() -> list[str]:
        made = DeadlyCalls()
        save(state(1, comm.world().rank), LocalStorage(tmp_path, made))
        return made.made

    made = run_ranks(RANKS, calls)
    number, seen = 1, {"old": 0, "new": 0}
    for turn in range(ROUNDS):
        victim = chance.randrange(RANKS)
        start = time.monotonic()
        if turn % 2:
            call = chance.randrange(len(made[victim]))
            found = outcomes(
                RANKS, killed_at_a_call, tmp_path, number + 1, victim, call, chance.random() < 0.5, grace=BOUND
            )
        else:
            moment = chance.uniform(0, 1.3 * usual)
            found = outcomes(RANKS, killed_at_a_moment, tmp_path, number + 1, victim, moment, grace=BOUND)
        seen[check_round(tmp_path, found, time.monotonic() - start, victim, number, number + 1)] += 1
        number += 2
    with capsys.disabled():
        print(f"\n{ROUNDS} times: {seen}", end=" ")  # noqa: T201  the count is part of the proof
    assert seen["old"] > 0


@pytest.mark.parametrize("victim", [0, 2])
def test_killing_a_rank_during_the_commit_loses_no_checkpoint(tmp_path, victim):
    """The others cannot know whether it is committed: a rank that removed its file would remove the checkpoint."""

    def body() -> None:
        rank = comm.world().rank
        right = Commit._replace_manifest

        def commit(self: Commit, entries: Sequence[bytes], make_manifest: MakeManifest) -> Any:
            if rank == victim == 0:
                right(self, entries, make_manifest)
            if rank == victim:
                die()
            return right(self, entries, make_manifest)

        Commit._replace_manifest = commit  # type: ignore[method-assign]  # the pool's process is replaced, or restored below
        try:
            save(state(2, rank), tmp_path)
        finally:
            Commit._replace_manifest = right  # type: ignore[method-assign]  # as above

    run_ranks(RANKS, save_all, tmp_path, 1)
    start = time.monotonic()
    found = outcomes(RANKS, body, grace=BOUND)
    took = time.monotonic() - start
    assert all(isinstance(outcome, Raised) for rank, outcome in enumerate(found) if rank != victim), found
    assert check_round(tmp_path, found, took, victim, 1, 2) == "new"


def test_a_commit_whose_flush_fails_keeps_its_data_files(tmp_path):
    """The new manifest is in place when the flush of the folder fails: it must not lose what it refers to."""

    class NoSecondFlush(Calls):
        committed = False

        def rename(self, source: str, target: str) -> None:
            super().rename(source, target)
            self.committed = True

        def fsync(self, fd: int) -> None:
            if self.committed:
                raise OSError(5, "lost")
            super().fsync(fd)

    def body() -> str:
        rank = comm.world().rank
        save(state(1, rank), tmp_path)
        with pytest.raises(RankFailedError, match="may not outlive a crash") as caught:
            save(state(2, rank), LocalStorage(tmp_path, NoSecondFlush() if rank == 0 else Calls()))
        return str(caught.value)

    assert len(set(run_ranks(RANKS, body))) == 1
    assert holds_on_ranks(tmp_path) == 2
    run_ranks(RANKS, save_all, tmp_path, 3)
    assert data_files(tmp_path) == RANKS


def in_background(root: Path, number: int) -> None:
    with CheckpointManager(root, background=True) as manager:
        manager.save(number, state(number, comm.world().rank))


def with_retention(root: Path, number: int) -> None:
    CheckpointManager(root, keep_last=1).save(number, state(number, comm.world().rank))


def restoring(root: Path, number: int) -> None:
    target = state(-1, -1)
    assert CheckpointManager(root).restore(target) == number - 1
    check_state(target, number - 1)


Operation: TypeAlias = Callable[[Path, int], None]
OPERATIONS: dict[str, Operation] = {"async save": in_background, "retention": with_retention, "restore": restoring}


def check_state(found: dict[str, Any], number: int) -> None:
    expected = state(number, comm.world().rank)
    assert found["number"] == number
    assert torch.equal(found["w"], expected["w"])
    assert torch.equal(found["b"], expected["b"])
    assert torch.equal(found["own"].value, expected["own"].value)


def timed(work: Operation, root: Path, number: int) -> float:
    start = time.monotonic()
    work(root, number)
    return time.monotonic() - start


def killed_in(work: Operation, root: Path, number: int, victim: int, moment: float, call: int) -> None:
    """The victim is killed so many seconds after the work began, or at this call, whichever comes first."""
    comm.gather_bytes(b"all here")
    if comm.world().rank == victim:
        threading.Thread(target=lambda: (time.sleep(moment), die()), daemon=True).start()
        left = iter(range(call))
        for name in CHANGING:
            setattr(Calls, name, deadly(getattr(Calls, name), left))
    work(root, number)
    if comm.world().rank == victim:
        die()  # it was faster than its end


def deadly(call: Any, left: Iterator[int]) -> Any:
    def deadly(*args: Any) -> Any:
        if next(left, None) is None:
            die()
        return call(*args)

    return deadly


def newest_of(root: Path) -> int:
    """The newest step, restored on all ranks; every step that is there is whole."""
    manager = CheckpointManager(root)
    for step in manager.steps():
        assert verify(manager.path(step)), step
    target = state(-1, -1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a step whose save did not end is told
        newest = manager.restore(target)
    assert newest is not None
    check_state(target, newest)
    return newest


@pytest.mark.parametrize("name", OPERATIONS)
def test_killing_a_rank_during_any_operation_loses_no_checkpoint(tmp_path, name, capsys):
    work, chance = OPERATIONS[name], random.Random(name)
    root = tmp_path / "run"
    last = 2
    for step in range(1, last + 1):
        run_ranks(2, in_background, root, step)
    shutil.copytree(root, tmp_path / "timed")
    usual = max(run_ranks(2, timed, work, tmp_path / "timed", last + 1))
    seen = {"old": 0, "new": 0}
    for turn in range(ROUNDS if FULL else 2):
        before = sorted(os.listdir(root))
        victim = chance.randrange(2)
        moment, call = (chance.uniform(0, 1.2 * usual), 10**6) if turn % 2 else (60.0, chance.randrange(20))
        found = outcomes(2, killed_in, work, root, last + 1, victim, moment, call, grace=BOUND)
        assert found[victim] == Died(-signal.SIGKILL), found[victim]
        other = found[1 - victim]
        assert isinstance(other, Raised | Returned), other
        assert isinstance(other, Returned) or isinstance(other.exception, ShardwrightError), other
        (newest,) = set(run_ranks(2, newest_of, root))
        assert newest in (last, last + 1)
        if isinstance(other, Returned) and name != "restore":
            assert newest == last + 1, "a rank was told that it is saved"
        if name == "restore":
            assert sorted(os.listdir(root)) == before
        elif newest == last or name != "retention":
            assert set(before) <= set(os.listdir(root)), "a step was removed that was not to go"
        seen["new" if newest > last else "old"] += 1
        if name != "restore":
            last += 2
            run_ranks(2, with_retention, root, last)
            assert os.listdir(root) == [f"step-{last:08d}"]
            assert data_files(root / f"step-{last:08d}") == 2
    with capsys.disabled():
        print(f"\n{name}, {sum(seen.values())} kills: {seen}", end=" ")  # noqa: T201  the count is part of the proof
