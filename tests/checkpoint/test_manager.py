"""CheckpointManager saves, lists, keeps, removes and restores steps, on one rank and on several."""

from __future__ import annotations

import fcntl
import itertools
import math
import os
import shutil
import subprocess
import sys
import threading
import time
import warnings
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwright as sw
from shardwright import checkpoint, comm
from shardwright.checkpoint import CheckpointManager, CheckpointWarning, KeepBest
from shardwright.checkpoint import manager as manager_module
from shardwright.checkpoint.manage.steps import Steps
from shardwright.errors import (
    ArgumentTypeError,
    CheckpointError,
    CorruptionError,
    Failure,
    LoadMismatchError,
    NotACheckpointError,
    RankFailedError,
    StorageBusyError,
    StorageError,
    UnknownVersionError,
)
from shardwright.storage import Calls
from shardwright.testing import Raised, outcomes, run_ranks
from tests.checkpoint.fuzz import signed, unsigned


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((1000,), float(value), dtype=torch.float64), "note": float(value)}


def fill_up(manager: CheckpointManager, *steps: int, **metrics: Any) -> None:
    for step in steps:
        manager.save(step, state(step), {name: value[step] for name, value in metrics.items()})


def restored(manager: CheckpointManager, **options: Any) -> tuple[int | None, float]:
    target = state(-1.0)
    step = manager.restore(target, **options)
    assert bool((target["w"] == target["note"]).all())
    return step, target["note"]


def data_file(manager: CheckpointManager, step: int) -> Path:
    return next(Path(manager.path(step)).glob("*.safetensors"))


def damage(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


# Saving and finding


def test_each_step_has_its_own_directory_and_is_restored_by_number(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "a" / "run")
    assert (manager.steps(), manager.latest(), manager.restore(state(0))) == ([], None, None)
    assert not (tmp_path / "a").exists()  # looking makes nothing
    fill_up(manager, 1000, 0, 123_456_789_012)
    assert sorted(os.listdir(manager.root)) == ["step-00000000", "step-00001000", "step-123456789012"]
    assert manager.steps() == [0, 1000, 123_456_789_012]
    assert manager.latest() == 123_456_789_012
    assert checkpoint.read(manager.path(1000))["note"] == 1000
    assert restored(manager, step=1000) == (1000, 1000)
    assert restored(manager) == (123_456_789_012, 123_456_789_012)


@pytest.mark.parametrize("name", ["step-1", "step-0000001x", "step-000000001", "other", "step-00000001.bak"])
def test_directories_with_other_names_are_ignored(tmp_path: Path, name: str) -> None:
    manager = CheckpointManager(tmp_path, keep_last=1)
    checkpoint.save(state(7), tmp_path / name)
    fill_up(manager, 2, 3)
    assert manager.steps() == [3]
    assert checkpoint.read(tmp_path / name)["note"] == 7


@pytest.mark.parametrize(
    ("step", "error"), [(-1, CheckpointError), (1.0, ArgumentTypeError), (True, ArgumentTypeError)]
)
def test_a_step_that_is_not_a_non_negative_int_raises(tmp_path: Path, step: Any, error: type[Exception]) -> None:
    with pytest.raises(
        error, match=r"step must (not be negative, got -1|be an int, got float: 1.0|be an int, got bool: True)"
    ):
        CheckpointManager(tmp_path).save(step, state(0))


def test_metrics_and_time_are_stored_with_the_step(tmp_path: Path) -> None:
    before = datetime.now(UTC).replace(microsecond=0)
    given = {"loss": torch.tensor(0.25), "tokens": 10**6, "bad": math.nan, "worse": -math.inf}
    CheckpointManager(tmp_path).save(3, state(3), given)
    manager = CheckpointManager(tmp_path)
    found = manager.metrics(3)
    assert math.isnan(found.pop("bad"))
    assert found == {"loss": 0.25, "tokens": 1e6, "worse": -math.inf}
    at = manager.time(3)
    assert at is not None
    assert before <= at <= datetime.now(UTC)
    with pytest.raises(NotACheckpointError, match="step-00000004"):
        manager.metrics(4)
    with pytest.raises(CheckpointError, match="metric 'loss' must be a number, got str"):
        manager.save(4, state(4), {"loss": "low"})
    assert manager.steps() == [3]


def test_the_manager_finds_checkpoints_saved_without_it(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_best=(1, "loss"))
    checkpoint.save(state(5), manager.path(5))
    assert (manager.steps(), manager.metrics(5), manager.time(5), manager.best()) == ([5], {}, None, None)
    assert restored(manager) == (5, 5)


def test_best_returns_the_step_with_the_best_metric(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_best=KeepBest(4, "acc", "max"))
    fill_up(manager, 1, 2, 3, acc={1: 0.5, 2: 0.9, 3: 0.7}, loss={1: 3.0, 2: math.nan, 3: 1.0})
    assert manager.best() == 2
    assert manager.best("acc", "min") == 1
    assert manager.best("loss") == 3
    assert manager.best("loss", "max") == 1
    assert manager.best("unknown") is None
    with pytest.raises(CheckpointError, match="best needs a metric"):
        CheckpointManager(tmp_path).best()
    with pytest.raises(CheckpointError, match="got 'most'"):
        manager.best("acc", "most")


def test_save_every_saves_every_kth_step(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, save_every=3)
    ends = [manager.step_end(step, state(step)) for step in range(8)]
    assert ends == [False] * 8
    assert manager.steps() == [0, 3, 6]
    assert all(CheckpointManager(tmp_path).should_save(step) for step in range(3))
    with pytest.raises(CheckpointError, match="save_every must be at least 1 or None, got 0"):
        CheckpointManager(tmp_path, save_every=0)


def test_an_existing_step_is_replaced_only_with_force_or_after_going_back(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    fill_up(manager, 1, 2, 3)
    with pytest.raises(CheckpointError, match=r"step 2 is already saved in .*step-00000002; pass force=True"):
        manager.save(2, state(20))
    assert restored(CheckpointManager(tmp_path), step=2) == (2, 2)
    manager.save(2, state(20), force=True)
    assert restored(CheckpointManager(tmp_path), step=2) == (2, 20)
    rewound = CheckpointManager(tmp_path)
    rewound.restore(state(0), step=1)
    rewound.save(2, state(21))  # of the run that was given up
    assert restored(CheckpointManager(tmp_path), step=2) == (2, 21)
    with pytest.raises(CheckpointError, match="already"):
        rewound.save(1, state(0))


def test_remove_deletes_a_step_and_is_idempotent(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    fill_up(manager, 1, 2)
    manager.remove(2)
    manager.remove(2)
    assert manager.steps() == [1]
    assert os.listdir(tmp_path) == ["step-00000001"]


# Keeping


def test_retention_is_applied_after_every_save(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=2, keep_every=40, keep_best=(1, "loss"))
    loss = {step: abs(step - 30) for step in range(0, 101, 10)}
    seen = []
    for step in loss:
        fill_up(manager, step, loss=loss)
        seen.append(manager.steps())
    assert seen[:3] == [[0], [0, 10], [0, 10, 20]]  # 10 is one of the last two
    assert seen[-1] == [0, 30, 40, 80, 90, 100]
    assert sorted(os.listdir(tmp_path)) == [f"step-{step:08d}" for step in seen[-1]]


def test_retention_ignores_steps_after_the_saved_one(tmp_path: Path) -> None:
    fill_up(CheckpointManager(tmp_path), 10, 20, 30, 40)
    manager = CheckpointManager(tmp_path, keep_last=2)
    manager.restore(state(0), step=20)
    fill_up(manager, 25)
    assert manager.steps() == [20, 25, 30, 40]


def test_a_step_being_read_is_removed_only_after_the_reader_is_done(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=1)
    fill_up(manager, 1)
    with manager.reading(1) as path, CheckpointManager(tmp_path).reading() as same:
        assert path == same == manager.path(1)
        fill_up(manager, 2)
        assert manager.steps() == [1, 2]
        with pytest.raises(StorageBusyError, match="is being read"):
            manager.remove(1)
        assert checkpoint.read(path)["note"] == 1
    fill_up(manager, 3)
    assert manager.steps() == [3]
    with pytest.raises(NotACheckpointError), manager.reading(1):
        pass


def test_a_killed_reader_releases_its_lock(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=1)
    fill_up(manager, 1)
    code = (
        "import sys, time\nfrom shardwright.checkpoint.manage.steps import Steps\n"
        "with Steps(sys.argv[1]).reading(1):\n    print('held', flush=True)\n    time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "held\n"
        fill_up(manager, 2)
        assert manager.steps() == [1, 2]
        reader.kill()
        reader.wait()
    fill_up(manager, 3)
    assert manager.steps() == [3]


def test_a_reader_without_write_permission_keeps_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = CheckpointManager(tmp_path, keep_last=1)
    fill_up(manager, 1)
    opened = os.open

    def refuse(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR):
            raise PermissionError(13, "Permission denied")
        return opened(path, flags, *rest, **more)

    reader = CheckpointManager(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        holding = reader.reading(1)
        holding.__enter__()
    fill_up(manager, 2)
    assert manager.steps() == [1, 2]
    holding.__exit__(None, None, None)


def test_a_step_being_saved_by_another_process_is_not_removed(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=1)
    fill_up(manager, 1)
    (tmp_path / "step-00000000").mkdir()
    fds = [os.open(Path(manager.path(step), ".lock"), os.O_CREAT | os.O_RDWR) for step in (0, 1)]
    for fd in fds:
        fcntl.flock(fd, fcntl.LOCK_EX)
    fill_up(manager, 2)
    assert sorted(os.listdir(tmp_path)) == ["step-00000000", "step-00000001", "step-00000002"]
    for fd in fds:
        os.close(fd)
    fill_up(manager, 3)
    assert os.listdir(tmp_path) == ["step-00000003"]


def test_removing_a_step_keeps_files_that_a_save_did_not_create(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=1)
    fill_up(manager, 1)
    Path(manager.path(1), "notes.txt").write_text("mine")
    fill_up(manager, 2, 3)
    assert os.listdir(manager.path(1)) == ["notes.txt"]
    assert manager.steps() == [3]


def test_a_step_of_a_newer_format_version_is_neither_removed_nor_skipped(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=1)
    fill_up(manager, 1)
    manifest = Path(manager.path(1), "manifest.json")
    manifest.write_bytes(signed(unsigned(manifest.read_bytes()).replace(b'"shardwright":1', b'"shardwright":2')))
    fill_up(manager, 2, 3)
    assert manager.steps() == [1, 3]
    os.rename(manager.path(1), manager.path(9))
    assert manager.latest() == 3
    with pytest.raises(UnknownVersionError, match="the manifest has version 2"):
        manager.restore(state(0))
    with pytest.raises(UnknownVersionError):
        manager.metrics(9)


@pytest.mark.parametrize("bit", range(8))
def test_a_bit_flip_in_the_version_counts_as_corruption_and_is_skipped(tmp_path: Path, bit: int) -> None:
    manager = CheckpointManager(tmp_path)
    fill_up(manager, 1, 2)
    manifest = Path(manager.path(2), "manifest.json")
    data = bytearray(manifest.read_bytes())
    data[data.index(b":") + 1] ^= 1 << bit
    manifest.write_bytes(data)
    with pytest.warns(CheckpointWarning, match="step 2"):
        assert manager.restore(state(0)) == 1


class Failing(Calls):
    """Counts the calls that change something or make it safe; from the given one on, all fail: the disk is gone."""

    def __init__(self, at: float = math.inf) -> None:
        self.done: list[str] = []
        self._at = at

    def _count(self, what: str) -> None:
        if len(self.done) >= self._at:
            raise OSError(5, "Input/output error")
        self.done.append(what)

    def unlink(self, path: str) -> None:
        self._count(f"unlink {os.path.basename(path)}")
        super().unlink(path)

    def fsync(self, fd: int) -> None:
        self._count("fsync")
        super().fsync(fd)


def test_removal_deletes_and_flushes_the_manifest_first(tmp_path: Path) -> None:
    fill_up(CheckpointManager(tmp_path), 1)
    calls = Failing()
    Steps(tmp_path, calls).remove(1)
    assert calls.done[:2] == ["unlink manifest.json", "fsync"]
    assert calls.done[2].endswith(".safetensors")
    assert os.listdir(tmp_path) == []


def test_an_interrupted_removal_leaves_a_complete_checkpoint_or_none(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    left = []
    for at in itertools.count():
        step = 10 * at
        fill_up(manager, step)
        with pytest.raises(StorageError, match="Input/output error") if at < 5 else pytest.MonkeyPatch().context():
            Steps(tmp_path, Failing(at)).remove(step)
        if os.path.exists(manager.path(step)):
            left.append(at)
            if at == 0:
                assert restored(manager, step=step) == (step, step)
            else:
                assert step not in manager.steps()
                with pytest.raises(NotACheckpointError):
                    manager.restore(state(0), step=step)
        else:
            break
    assert left == [0, 1, 2, 3, 4]
    fill_up(CheckpointManager(tmp_path, keep_last=1), 1000)  # which cleans up after all of them
    assert os.listdir(tmp_path) == ["step-00001000"]


def test_the_next_save_removes_files_of_a_crashed_save(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    for step in (5, 50):
        left = tmp_path / f"step-{step:08d}"
        left.mkdir()
        (left / "0123456789ab-00000-0.safetensors").write_bytes(b"half")
        (left / "manifest.json.0123456789ab.tmp").write_bytes(b"half")
        (left / ".lock").touch()
    with pytest.warns(CheckpointWarning, match=r"nothing to restore in (.|\n)* step 50: it has no manifest"):
        assert manager.restore(state(0)) is None
    fill_up(manager, 10)
    assert sorted(os.listdir(tmp_path)) == ["step-00000010", "step-00000050"]  # 50 is after it: perhaps another's
    with pytest.warns(CheckpointWarning, match="restored step 10 (.|\n)*step 50: it has no manifest"):
        assert restored(manager) == (10, 10)
    fill_up(manager, 50)
    assert restored(manager) == (50, 50)


def test_a_failed_removal_only_warns_and_keeps_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = CheckpointManager(tmp_path, keep_last=1)
    fill_up(manager, 1)
    monkeypatch.setattr(manager._steps, "_calls", Failing(0))
    with pytest.warns(CheckpointWarning, match=r"step 2 is saved, but not all could be removed\n.*Input/output error"):
        fill_up(manager, 2)
    assert restored(manager) == (2, 2)


def test_a_save_that_completes_during_the_cleanup_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = CheckpointManager(tmp_path)
    fill_up(manager, 1)
    monkeypatch.setattr(Steps, "without_manifest", lambda _self: [1])  # as it was a moment ago
    monkeypatch.setattr(Steps, "is_abandoned", lambda _self, _step: True)
    fill_up(manager, 2)
    assert restored(manager, step=1) == (1, 1)


def test_a_lock_file_in_a_removed_directory_is_not_acquired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_up(CheckpointManager(tmp_path), 1)
    steps = Steps(tmp_path)
    take = Calls.lock

    def removed_first(self: Calls, fd: int) -> None:
        monkeypatch.setattr(Calls, "lock", take)
        steps.remove(1)
        take(self, fd)

    monkeypatch.setattr(Calls, "lock", removed_first)
    with pytest.raises(StorageBusyError, match="removing"), steps.storage(1).lock():
        pass


def test_a_briefly_held_shared_lock_does_not_fail_a_save(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    fill_up(manager, 1)
    fd = os.open(Path(manager.path(1), ".lock"), os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_SH)
    threading.Timer(0.02, os.close, (fd,)).start()
    manager.save(1, state(2), force=True)
    assert restored(manager) == (1, 2)


# Restoring


def cut_off(path: Path) -> None:
    os.truncate(path, 5000)


DAMAGES = {
    "a bit of the data": (lambda manager: damage(data_file(manager, 3), -1), "CorruptionError"),
    "a bit of a header": (lambda manager: damage(data_file(manager, 3), 100), "CorruptionError"),
    "a bit of the manifest": (lambda manager: damage(Path(manager.path(3), "manifest.json"), 60), "CorruptionError"),
    "an empty manifest": (lambda manager: os.truncate(Path(manager.path(3), "manifest.json"), 0), "FormatError"),
    "a data file gone": (lambda manager: data_file(manager, 3).unlink(), "does not exist|NotACheckpoint|lacks"),
    "a data file cut off": (lambda manager: cut_off(data_file(manager, 3)), "CorruptionError"),
    "no manifest": (lambda manager: Path(manager.path(3), "manifest.json").unlink(), "its save did not complete"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_restore_skips_a_corrupted_step_and_warns(tmp_path: Path, name: str) -> None:
    harm, message = DAMAGES[name]
    fill_up(CheckpointManager(tmp_path), 1, 2, 3)
    manager = CheckpointManager(tmp_path, keep_last=2)
    harm(manager)
    with pytest.warns(CheckpointWarning, match=rf"restored step 2 in .*, and skipped\n  step 3: .*({message})"):
        assert restored(manager) == (2, 2)
    fill_up(manager, 3)  # training comes by again
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert restored(CheckpointManager(tmp_path)) == (3, 3)
    assert manager.steps() == [2, 3]


def test_restore_raises_with_all_steps_if_every_step_is_corrupted(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    fill_up(manager, 1, 3)
    damage(data_file(manager, 1), -1)
    damage(data_file(manager, 3), 100)
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be restored(.|\n)* step 3: (.|\n)* step 1: "):
        manager.restore(state(0))


def test_restoring_a_corrupted_step_by_number_raises(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    fill_up(manager, 1, 3)
    damage(data_file(manager, 3), -1)
    with pytest.raises(CorruptionError):
        manager.restore(state(0), step=3)
    with pytest.raises(NotACheckpointError, match=r"step-00000002 holds no checkpoint"):
        manager.restore(state(0), step=2)


def test_a_load_mismatch_is_never_treated_as_corruption(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"other": torch.ones(2)})
    fill_up(manager, 2)
    with pytest.raises(LoadMismatchError, match="missing: 'other'"):
        manager.restore({"other": torch.ones(2)})
    assert manager.restore({"w": state(0)["w"]}, strict=False) == 2


def test_an_io_error_is_never_treated_as_corruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = CheckpointManager(tmp_path)
    fill_up(manager, 1, 2)

    def fail(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Calls, "preadv", fail)
    with pytest.raises(StorageError, match=r"Input/output error"):
        manager.restore(state(0))


def test_restore_reads_a_step_again_if_it_was_replaced_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = CheckpointManager(tmp_path)
    fill_up(manager, 1, 2)
    really = manager_module.load

    def too_late(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(manager_module, "load", really)
        CheckpointManager(tmp_path).save(2, state(20), force=True)
        raise RankFailedError("load", (Failure(0, "MissingKeyError", "a file of the old one is gone"),))

    monkeypatch.setattr(manager_module, "load", too_late)
    assert restored(manager) == (2, 20)


# In the background


def test_background_saves_apply_retention_and_store_every_step(tmp_path: Path) -> None:
    mine = state(0)
    with CheckpointManager(tmp_path, keep_last=2, background=True) as manager:
        for step in range(1, 6):
            mine["w"] += 1
            mine["note"] = float(step)
            manager.save(step, mine, {"loss": 1 / step})
        manager.wait()
        assert manager.steps() == [4, 5]
        assert manager.metrics(5) == {"loss": 0.2}
        manager.save(6, mine)
    assert manager.steps() == [5, 6]  # leaving waits, too
    assert restored(manager, step=4 + 1) == (5, 5)


def test_a_failed_background_save_is_raised_by_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = CheckpointManager(tmp_path, keep_last=1, background=True)
    fill_up(manager, 1)
    manager.wait()

    def fail(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(Calls, "rename", fail)
        manager.save(2, state(2))
        with pytest.raises(StorageError, match="Input/output error"):
            manager.wait()
    assert restored(CheckpointManager(tmp_path)) == (1, 1)
    fill_up(manager, 3)
    manager.wait()
    assert manager.steps() == [3]


def test_an_error_in_the_training_loop_still_completes_the_background_save(tmp_path: Path) -> None:
    def train() -> None:
        with CheckpointManager(tmp_path, background=True) as manager:
            fill_up(manager, 1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert restored(CheckpointManager(tmp_path)) == (1, 1)


# On several ranks


def _on_ranks(root: str, background: bool) -> Any:
    mesh = sw.init_device_mesh("cpu", (4,))
    weights = sw.distribute_tensor(torch.zeros(10, 3), mesh, [sw.Shard(0)])
    rank = comm.world().rank
    with CheckpointManager(root, keep_last=2, keep_best=(1, "loss"), background=background) as manager:
        for step in range(1, 6):
            weights += 1
            manager.save(step, {"w": weights, "mine": checkpoint.PerRank(rank * step)}, {"loss": abs(step - 2) + rank})
        manager.wait()
        answers = [manager.steps(), manager.latest(), manager.best(), manager.metrics(2)]
    other = {"w": sw.distribute_tensor(torch.zeros(10, 3), mesh, [sw.Shard(1)]), "mine": checkpoint.PerRank(0)}
    answers.append(manager.restore(other))
    return answers, other["mine"].value, bool((other["w"].to_local() == 5).all())


@pytest.mark.parametrize("background", [False, True])
def test_manager_methods_return_the_same_results_on_all_ranks(tmp_path: Path, background: bool) -> None:
    found = run_ranks(4, _on_ranks, str(tmp_path), background)
    answers = [[2, 4, 5], 5, 2, {"loss": 0.0}, 5]
    assert found == [(answers, rank * 5, True) for rank in range(4)]


def _restore_on_ranks(root: str) -> tuple[int | None, list[str], float]:
    target = state(0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        step = CheckpointManager(root).restore(target)
    return step, [str(one.message) for one in said], target["w"].sum().item()


def test_restore_skips_the_same_corrupted_step_on_all_ranks(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    fill_up(manager, 1, 2)
    damage(data_file(manager, 2), -1)
    found = run_ranks(3, _restore_on_ranks, str(tmp_path))
    assert len({str(one) for one in found}) == 1
    step, said, total = found[0]
    assert (step, total, len(said)) == (1, 1000.0, 1)
    assert "step 2: CorruptionError" in said[0]


def _disagree(root: str) -> None:
    rank = comm.world().rank
    CheckpointManager(root).save(7 + (rank == 2), state(0))


def _same_again(root: str) -> None:
    CheckpointManager(root).save(1, state(0))


def _bad_metric(root: str) -> None:
    CheckpointManager(root).save(1, state(0), {"loss": "low" if comm.world().rank == 1 else 1.0})


@pytest.mark.parametrize(
    ("work", "kind", "message"),
    [
        (_disagree, None, "step 8"),
        (_same_again, "CheckpointError", "step 1 is already saved in"),
        (_bad_metric, "RankFailedError", "rank 1: CheckpointError: metric 'loss' must be a number, got str"),
    ],
)
def test_invalid_calls_raise_the_same_error_on_all_ranks(
    tmp_path: Path, work: Any, kind: str | None, message: str
) -> None:
    fill_up(CheckpointManager(tmp_path), 1)
    found = outcomes(3, work, str(tmp_path))
    for one in found:
        assert isinstance(one, Raised), found
        assert kind in (None, one.kind)
        assert message in one.message


# Beside another process


READ = """
import sys, time, torch
from shardwright.checkpoint import CheckpointManager, read
manager = CheckpointManager(sys.argv[1])
seen = reads = 0
print("ready", flush=True)
while True:
    target = {"w": torch.zeros(300_000), "note": 0.0, "step": 0}
    step = manager.restore(target)
    assert step is not None and step >= seen, (step, seen)
    assert target["step"] == step and bool((target["w"] == target["note"]).all()), target
    seen, reads = step, reads + 1
    with manager.reading() as path:
        time.sleep(0.002)
        held = read(path)
        assert bool((held["w"] == held["note"]).all())
    if step >= 1000:
        break
print(reads)
"""


def test_concurrent_readers_always_see_complete_checkpoints(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=1)

    def put(step: int, value: float, force: bool = False) -> None:
        manager.save(step, {"w": torch.full((300_000,), value), "note": value, "step": step}, force=force)

    put(1, 0.5)
    command = [sys.executable, "-W", "error::UserWarning", "-c", READ, str(tmp_path)]
    readers = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        for reader in readers:
            assert reader.stdout is not None
            assert reader.stdout.readline() == "ready\n"
        seconds = 10.0 if os.environ.get("SHARDWRIGHT_BUDGET") == "full" else 2.0
        end = time.monotonic() + seconds
        step = 1
        # At least some steps, however slow the machine.
        while (time.monotonic() < end or step <= 20) and all(reader.poll() is None for reader in readers):
            step += 1
            put(step, step + 0.25)
            put(step, step + 0.5, force=True)
        put(1000, 1000.0)
        told = [reader.communicate(timeout=60) for reader in readers]
    finally:
        for reader in readers:
            reader.kill()
    assert [reader.returncode for reader in readers] == [0, 0], told
    assert step > 5
    assert all(int(out) > 5 for out, _ in told)
    fill_up(manager, 1001)
    assert os.listdir(tmp_path) == ["step-00001001"]


def test_restore_finds_a_newer_step_if_the_listed_one_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = CheckpointManager(tmp_path)
    fill_up(manager, 1)
    look, looks = Steps._directories, 0

    def late(self: Steps) -> list[int]:
        """What was there before: step 1 is removed and step 2 saved between the look and what comes of it."""
        nonlocal looks
        found = look(self)
        looks += 1
        if looks == 1:
            shutil.rmtree(tmp_path / "step-00000001")
            fill_up(CheckpointManager(tmp_path), 2)
        return found

    monkeypatch.setattr(Steps, "_directories", late)
    with CheckpointManager(tmp_path).reading() as path:
        assert path.endswith("step-00000002")
