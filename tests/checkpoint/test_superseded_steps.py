"""A run that goes back to an earlier step supersedes the later ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.checkpoint import CheckpointManager, CheckpointWarning
from shardwright.errors import StorageError
from shardwright.storage import LocalStorage
from shardwright.testing import run_ranks


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((10,), float(value))}


def fill_up(root: Path, *steps: int, sign: int = 1, **options: Any) -> None:
    with CheckpointManager(root, **options) as run:
        for step in steps:
            run.save(step, state(sign * step), {"loss": 1 / step})


def restored(root: Path, step: int | None = None) -> tuple[int | None, float]:
    """What a new process would go on from."""
    with CheckpointManager(root) as run:
        target = state(0)
        return run.restore(target, step), float(target["w"][0])


def go_back(root: Path, to: int, *steps: int, **options: Any) -> CheckpointManager:
    run = CheckpointManager(root, **options)
    run.restore(state(0), step=to)
    for step in steps:
        run.save(step, state(-step), {"loss": float(step)})
    return run


def test_after_going_back_and_a_crash_the_new_run_is_restored_and_old_steps_are_kept(tmp_path: Path) -> None:
    fill_up(tmp_path, *range(10, 110, 10))
    run = go_back(tmp_path, 50)
    assert (run.latest(), run.superseded(), restored(tmp_path)) == (100, [], (100, 100))  # nothing was saved yet
    run.save(60, state(-60))
    assert run.steps() == list(range(10, 110, 10))
    assert (run.latest(), run.superseded()) == (60, [70, 80, 90, 100])
    assert restored(tmp_path) == (60, -60)
    assert restored(tmp_path, step=100) == (100, 100)
    with CheckpointManager(tmp_path).reading() as path:
        assert path == run.path(60)
    fresh = CheckpointManager(tmp_path)
    assert fresh.restore(state(0)) == 60
    fresh.save(70, state(-70), {"loss": 9.0})  # in place of what was left behind
    fresh.save(75, state(-75), {"loss": 9.0})
    assert (fresh.latest(), fresh.superseded(), fresh.best("loss")) == (75, [80, 90, 100], 50)
    fresh.remove(60)  # whichever step of the new run is left knows it
    assert restored(tmp_path) == (75, -75)
    said = json.loads(Path(fresh.path(75), "manifest.json").read_bytes())["manager"]
    assert (said["parent"], said["line"], sorted(said["superseded"])) == (60, 1, ["100", "80", "90"])


def test_retention_removes_superseded_steps_without_counting_them(tmp_path: Path) -> None:
    fill_up(tmp_path, 10, 20, 30, 40, 50)
    run = go_back(tmp_path, 20, 25, keep_last=2)
    assert run.steps() == [20, 25, 30, 40, 50]
    run.save(35, state(-35))
    assert (run.steps(), run.superseded()) == ([25, 30, 35, 40, 50], [30, 40, 50])  # 30 is not older than the last two
    run.save(45, state(-45))
    assert run.steps() == [35, 40, 45, 50]
    run.save(55, state(-55))
    assert (run.steps(), run.superseded(), restored(tmp_path)) == ([45, 50, 55], [50], (55, -55))
    run.save(65, state(-65))
    assert (run.steps(), run.superseded()) == ([55, 65], [])


def test_going_back_to_a_superseded_step_continues_its_run(tmp_path: Path) -> None:
    fill_up(tmp_path, 10, 20, 30)
    go_back(tmp_path, 10, 15)
    assert restored(tmp_path) == (15, -15)
    go_back(tmp_path, 30, 40)
    run = CheckpointManager(tmp_path)
    assert (run.superseded(), run.latest()) == ([15], 40)
    run.remove(40)
    assert restored(tmp_path) == (15, -15)  # nobody is left who knows better
    go_back(tmp_path, 30, 40)
    with open(next(Path(run.path(40)).glob("*.safetensors")), "r+b") as file:
        file.truncate(5000)
    with pytest.warns(CheckpointWarning, match="step 40"):
        assert restored(tmp_path) == (30, 30)


def _save_and_wait(run: CheckpointManager, step: int) -> None:
    run.save(step, state(-step))
    run.wait()


def test_a_failed_first_save_supersedes_nothing_but_the_next_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise StorageError("the disk is gone")

    fill_up(tmp_path, 10, 20, 30)
    for background in (False, True):
        run = go_back(tmp_path, 10, background=background)
        with monkeypatch.context() as patched:
            patched.setattr(LocalStorage, "replace", fail)
            with pytest.raises(StorageError, match="gone"):
                _save_and_wait(run, 15)
        assert CheckpointManager(tmp_path).latest() == 30
        _save_and_wait(run, 15)
        assert restored(tmp_path) == (15, -15)
        run.remove(15)


def _go_back_on_ranks(folder: str) -> list[Any]:
    root = Path(folder)
    fill_up(root, 10, 20, 30)
    run = CheckpointManager(root, save_every=10)
    run.restore(state(0))
    run.save(40, state(40))
    run.restore(state(0), step=10)
    run.step_end(40, state(-40))  # the number that this manager saved last, of another run now
    return [run.latest(), run.superseded(), restored(root)]


def test_all_ranks_go_back_together(tmp_path: Path) -> None:
    assert run_ranks(2, _go_back_on_ranks, str(tmp_path)) == [[40, [20, 30], (40, -40)]] * 2


def test_restoring_the_newest_step_by_number_supersedes_nothing(tmp_path: Path) -> None:
    fill_up(tmp_path, 10, 20)
    run = go_back(tmp_path, 20, 30)
    said = json.loads(Path(run.path(30), "manifest.json").read_bytes())["manager"]
    assert (said["parent"], said["line"], said["superseded"]) == (20, 0, {})
