"""If a system call of a save fails on any rank, all ranks raise, the old checkpoint is kept, the next save works."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright import comm
from shardwright.checkpoint import read, save
from shardwright.checkpoint.runtime.parallel import in_threads
from shardwright.errors import RankFailedError, StorageError
from shardwright.storage import Calls, LocalStorage, MemoryStorage
from shardwright.testing import run_ranks

FULL = os.environ.get("SHARDWRIGHT_BUDGET") == "full"
CODES = {errno.EIO: "Input/output error", errno.ENOSPC: "no space is left on the device"}
CALLS = ("open", "close", "pwritev", "fsync", "fstat", "rename", "unlink", "mkdir", "listdir", "lock", "unlock")
# A failure of these changes nothing: what was to be closed or let go of is, and leftovers are left to the next save.
HARMLESS = ("unlock", "close of a folder", "close of .lock", "close of a token", "close of data, read")


class FaultyCalls(Calls):
    """Call number `failing` fails, and no other; `made` has what was called, with the path, and what failed."""

    def __init__(self, failing: int = -1, code: int = errno.EIO) -> None:
        self.made: list[str] = []
        self._failing, self._code = failing, code
        self._paths: dict[int, str] = {}
        self._read: set[int] = set()  # the files that were there already
        for name in CALLS:
            setattr(self, name, self._guarded(name, getattr(self, name)))

    def _guarded(self, name: str, call: Any) -> Any:
        def guarded(*args: Any) -> Any:
            what = f"{name} of {self._said(args[0])}"
            self.made.append(what)
            if name == "close":  # closed it is in any case
                call(*args)
            if len(self.made) - 1 == self._failing:
                raise OSError(self._code, os.strerror(self._code))
            if name == "close":
                return None
            result = call(*args)
            if name == "open":
                self._paths[result] = args[0]
                self._read.discard(result)
                if not args[1] & os.O_CREAT:
                    self._read.add(result)
            return result

        return guarded

    def _said(self, what: int | str) -> str:
        path = self._paths.get(what, "?") if isinstance(what, int) else what
        name = os.path.basename(path)
        if os.path.isdir(path):
            return "a folder"
        if name.endswith(".begun"):
            return "a token"
        if "safetensors" in name:
            return "data, read" if what in self._read else "data"
        return "a temporary" if name.endswith(".tmp") else name

    @property
    def failed(self) -> str:
        return self.made[self._failing] if 0 <= self._failing < len(self.made) else ""


def state(number: int, rank: int = 0) -> dict[str, Any]:
    """Something that all ranks have, of which each writes a part."""
    return {"number": number, "w": torch.full((64, 512), float(number)), "b": torch.arange(10) * number}


def holds(path: Path) -> int:
    """The number of the state that loads, exactly."""
    loaded = read(path)
    number = loaded["number"]
    assert all(torch.equal(loaded[key], state(number)[key]) for key in ("w", "b"))
    return int(number)


def data_files(path: Path) -> int:
    return len([name for name in os.listdir(path) if name.endswith((".safetensors", ".tmp"))])


def attempt(number: int, path: Path, calls: Calls) -> RankFailedError | StorageError | None:
    try:
        save(state(number), LocalStorage(path, calls))
    except (RankFailedError, StorageError) as error:
        return error
    return None


def count_calls(path: Path) -> list[str]:
    """The calls of a save over an existing checkpoint with a leftover."""
    prepare(path)
    calls = FaultyCalls()
    save(state(2), LocalStorage(path, calls))
    return calls.made


def prepare(path: Path) -> None:
    save(state(1), path)
    (path / "000000000000-00007-0.safetensors").write_bytes(b"left by a save that was killed")


@pytest.mark.parametrize("code", CODES)
@pytest.mark.filterwarnings("ignore:saved, but")
def test_a_save_in_one_process_survives_a_failure_of_any_system_call(tmp_path, code):
    made = count_calls(tmp_path / "counted")
    assert {name.partition(" ")[0] for name in made} >= set(CALLS) - {"mkdir"}
    rename_index = made.index("rename of a temporary")
    failed = 0
    for failing, what in enumerate(made):
        path = tmp_path / f"{failing}"
        prepare(path)
        calls = FaultyCalls(failing, code)
        error = attempt(2, path, calls)
        assert calls.failed == what
        if error is None:
            assert what in HARMLESS or failing > rename_index + 1, what
            assert holds(path) == 2
        else:
            failed += 1
            assert isinstance(error, StorageError), what
            assert str(path) in str(error), what
            assert CODES[code] in str(error), what
            # After the rename the new state is there, though it may not outlive a crash.
            assert holds(path) == (1 if failing <= rename_index else 2), what
            # The one file of each save, and the leftover that was there: nothing of the save that failed.
            assert data_files(path) == (2 if failing <= rename_index else 3), what
        assert attempt(3, path, Calls()) is None
        assert holds(path) == 3
        assert data_files(path) == 1, what
    assert failed >= 12


@pytest.mark.parametrize("failing", [0, 1, 2, 3, 4, 5])
def test_a_failure_to_create_directories_raises_storage_error(tmp_path, failing):
    """The first calls of a save to a new place: flush, mkdir, flush, mkdir, flush."""
    path = tmp_path / "runs/step"
    error = attempt(1, path, FaultyCalls(failing, errno.ENOSPC))
    if error is not None:
        assert isinstance(error, StorageError)
        assert str(error).startswith("cannot")
        assert "no space is left" in str(error)
    assert attempt(2, path, Calls()) is None
    assert holds(path) == 2


def test_a_leftover_file_that_cannot_be_removed_only_warns(tmp_path):
    prepare(tmp_path)
    calls = FaultyCalls()
    removing = count_calls(tmp_path / "counted").index("unlink of data")
    calls = FaultyCalls(removing, errno.EACCES)
    with pytest.warns(UserWarning, match=r"saved, but files of earlier saves .* permission denied"):
        save(state(2), LocalStorage(tmp_path, calls))
    assert holds(tmp_path) == 2


def on_all_ranks(folder: Path, cases: list[tuple[int, int, int]]) -> list[tuple[str, str]]:
    """On each rank, of each case (which rank fails, at which of its calls, and how): what failed, and the error."""
    rank = comm.world().rank
    found = []
    for place, (victim, failing, code) in enumerate(cases):
        path = folder / str(place)
        save(state(1), path)
        calls = FaultyCalls(failing, code) if rank == victim else Calls()
        error = attempt(2, path, calls)
        found.append((calls.failed if rank == victim else "", str(error or "")))
    return found


@pytest.mark.filterwarnings("ignore:saved, but")
def test_a_save_on_four_ranks_survives_a_failure_of_any_system_call(tmp_path):
    def made(path: Path) -> list[str]:
        save(state(1), path)
        calls = FaultyCalls()
        save(state(2), LocalStorage(path, calls))
        return calls.made

    counted = run_ranks(4, made, tmp_path / "counted")
    cases = [
        (victim, failing, code)
        for victim in range(4)
        for failing in range(len(counted[victim]))
        for code in CODES
        if counted[victim][failing] not in HARMLESS
    ]
    assert len(cases) > 80
    if not FULL:
        cases = random.Random(5).sample(cases, 16)
        renames = (0, counted[0].index("rename of a temporary"), errno.EIO)
        cases += [renames, (0, renames[1] + 2, errno.EIO)]  # and the flush of the folder behind it
    told = run_ranks(4, on_all_ranks, tmp_path, cases, timeout=900 if FULL else 60)
    for place, (victim, failing, code) in enumerate(cases):
        path = tmp_path / str(place)
        what, error = told[victim][place]
        assert {one[place][1] for one in told} == {error}, what  # the same on all ranks
        expected = counted[victim][failing]
        after = victim == 0 and failing > counted[0].index("rename of a temporary")
        if error:
            assert f"rank {victim}: StorageError: " in error, expected
            assert str(path) in error, expected
            assert CODES[code] in error, expected
            assert holds(path) == (2 if after else 1), expected
            assert data_files(path) == (8 if after else 4), expected
        else:
            assert after, expected
            assert holds(path) == 2
    run_ranks(4, lambda: [save(state(3), tmp_path / str(place)) for place in range(len(cases))], timeout=300)
    for place in range(len(cases)):
        assert holds(tmp_path / str(place)) == 3
        assert data_files(tmp_path / str(place)) == 4


def test_saving_from_several_ranks_to_memory_storage_raises():
    def body() -> str:
        try:
            save(state(1), MemoryStorage())
        except StorageError as error:
            return str(error)
        return ""

    assert all("is private to one process, but 2 ranks save together" in text for text in run_ranks(2, body))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of half a megabyte: mounting it takes root."""
    place = tmp_path / "small"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(place)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no small file system can be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_full_disk_raises_and_keeps_the_old_checkpoint(small_disk, ranks):
    def body() -> str:
        save(state(1), small_disk / "run")
        try:
            save({**state(2), "large": torch.ones(1 << 20)}, small_disk / "run")
        except (RankFailedError, StorageError) as error:
            return str(error)
        return ""

    for text in run_ranks(ranks, body):
        assert "no space is left on the device" in text
        assert str(small_disk / "run") in text
    assert holds(small_disk / "run") == 1
    assert data_files(small_disk / "run") == ranks
    run_ranks(ranks, save, state(3), small_disk / "run")
    assert holds(small_disk / "run") == 3


def test_keyboard_interrupt_waits_for_running_threads():
    """Or they would write to a file that has been closed: perhaps to another that has its number by now."""
    working, told = threading.Event(), threading.Event()
    seen: list[str] = []

    def work(first, last, stop):
        if first == 0:
            working.wait(5)
            return
        working.set()
        told.wait(5)
        seen.append("stopped" if stop else "not told")

    join = threading.Thread.join

    def interrupted(thread, timeout=None):
        if not told.is_set():
            threading.Timer(0.05, told.set).start()
            raise KeyboardInterrupt
        join(thread, timeout)

    threading.Thread.join = interrupted
    try:
        with pytest.raises(KeyboardInterrupt):
            in_threads(work, [(0, 1), (1, 2)])
    finally:
        threading.Thread.join = join
    assert seen == ["stopped"]


@pytest.mark.parametrize("how", ["removed", "cut off"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_data_file_removed_or_truncated_during_the_save_fails_it(tmp_path, how, victim):
    """It is taken when its rank has written it and another rank still writes."""

    def body() -> tuple[str, float]:
        save(state(1), tmp_path)

        class Taken(Calls):
            def fsync(self, fd: int) -> None:
                super().fsync(fd)
                for path in tmp_path.glob(f"*-0000{victim}-0.safetensors"):
                    if path.name not in before:
                        if how == "removed":
                            path.unlink(missing_ok=True)  # both ranks do this
                        else:
                            os.truncate(path, 10)

        before = {path.name for path in tmp_path.iterdir()}
        comm.gather_bytes(b"all have looked")
        with pytest.raises(RankFailedError, match="another program") as caught:
            save(state(2), LocalStorage(tmp_path, Taken()))
        return str(caught.value), float(read(tmp_path)["number"])

    (found,) = set(run_ranks(2, body))
    assert f"rank {victim}" in found[0]
    assert found[1] == 1
    assert data_files(tmp_path) == 2
