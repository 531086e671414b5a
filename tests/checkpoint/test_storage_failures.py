"""A failed system call is never taken for an absent file: the step is neither removed nor skipped."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.checkpoint import CheckpointManager, read, save
from shardwright.errors import StorageBusyError, StorageError
from shardwright.storage import Calls, LocalStorage
from shardwright.testing import run_ranks

CODES = [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EACCES]


def state(number: int = 0) -> dict[str, torch.Tensor]:
    return {"w": torch.full((4,), float(number))}


def failing(monkeypatch: pytest.MonkeyPatch, name: str, part: str, code: int) -> None:
    """Make every call of this name fail whose path contains this part."""
    real = getattr(Calls, name)

    def call(self: Calls, path: str, *args: Any, **options: Any) -> Any:
        if part in path:
            raise OSError(code, os.strerror(code))
        return real(self, path, *args, **options)

    monkeypatch.setattr(Calls, name, call)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("name", ["stat", "open"])
def test_a_step_whose_stat_or_open_fails_is_never_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    manager = CheckpointManager(tmp_path, keep_last=1 if name == "stat" else None)
    manager.save(10, state(10))
    with monkeypatch.context() as patched, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # The failure begins while the save is being written, when step 10 has been looked at.
        manager.save(20, state(20), progress=lambda *_: failing(patched, name, "step-00000010/manifest.json", code))
        patched.undo()
        failing(patched, name, "step-00000010/manifest.json", code)
        with pytest.raises(StorageError, match="step-00000010"):
            CheckpointManager(tmp_path).latest()
        with pytest.raises(StorageError, match="step-00000010"):
            CheckpointManager(tmp_path).restore(state())
    assert torch.equal(read(manager.path(10))["w"], state(10)["w"])
    assert manager.restore(state()) == 20


def test_a_directory_that_cannot_be_listed_raises_the_same_error_on_all_ranks(tmp_path: Path) -> None:
    def body() -> list[str]:
        real, told = Calls.listdir, []
        manager = CheckpointManager(tmp_path)
        manager.save(10, state(10))

        def fail(_self: Calls, path: str) -> list[str]:
            raise OSError(errno.EIO, "the disk is gone", path)

        Calls.listdir = fail  # type: ignore[method-assign]  # put right below
        try:
            for work in (
                manager.steps,
                manager.latest,
                lambda: manager.restore(state()),
                lambda: manager.save(20, state()),
            ):
                with pytest.raises(StorageError, match="cannot list") as caught:
                    work()
                told.append(type(caught.value).__name__)
        finally:
            Calls.listdir = real  # type: ignore[method-assign]  # as above
        return told

    assert run_ranks(2, body) == [["StorageError"] * 4] * 2


def fifo(path: Path) -> None:
    os.mkfifo(path)


def link(path: Path) -> None:
    path.symlink_to("/etc/hostname")


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        here = os.getcwd()
        os.chdir(path.parent)  # its path is too long
        made.bind(path.name)
        os.chdir(here)


KINDS = [fifo, link, listening, Path.mkdir]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", KINDS)
def test_lock_files_that_are_not_regular_files_raise_without_waiting(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    manager = CheckpointManager(tmp_path, keep_last=1)
    manager.save(10, state(10))
    step = Path(manager.path(10))
    (step / ".readers").unlink()
    make(step / ".readers")
    with pytest.raises(StorageError, match=r"\.readers"):
        manager.restore(state())
    with pytest.warns(UserWarning, match=r"\.readers"):
        manager.save(20, state(20))  # step 10 is to go, and cannot be held alone
    assert torch.equal(read(manager.path(10))["w"], state(10)["w"])
    (step / ".lock").unlink()
    make(step / ".lock")
    with pytest.raises(StorageError, match=r"\.lock"):
        save(state(), step)
    (step / "manifest.json").unlink()  # now step 10 is one that was cut short
    with pytest.warns(UserWarning, match=r"\.lock"):
        manager.save(30, state(30))
    assert step.exists()


PROGRAM = """
import os, sys, time, torch
from shardwright.storage import LocalStorage
with LocalStorage(sys.argv[1]).lock():
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
    print("held", flush=True)
    time.sleep(60)
"""


def test_the_lock_of_a_killed_process_is_released_while_its_child_is_alive(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, tmp_path], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            with pytest.raises(StorageBusyError), LocalStorage(tmp_path).lock():
                pass
            process.kill()
            process.wait(10)
            with LocalStorage(tmp_path).lock():
                pass
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # the child is still there


LEAVING = """
import os, sys, torch
from shardwright.checkpoint import CheckpointManager
manager = CheckpointManager(sys.argv[1])
manager.save(10, {"w": torch.ones(3)})
with manager.reading(10):
    child = os.fork()
    if child == 0:
        files = [os.open("/dev/null", os.O_RDONLY) for _ in range(50)]  # one of them has the number that the lock had
if child == 0:
    for file in files:
        os.fstat(file)
    os._exit(0)
sys.exit(os.waitpid(child, 0)[1])
"""


def test_a_forked_child_that_leaves_its_parents_lock_closes_none_of_its_own_files(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", LEAVING, tmp_path], check=True, timeout=60)
