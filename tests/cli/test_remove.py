"""`shardwright rm` and `gc`: what the rules do not keep is removed, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from shardwright import checkpoint
from shardwright.checkpoint import CheckpointManager
from tests.cli.conftest import Cli


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of six steps."""
    with CheckpointManager(tmp_path / "run") as manager:
        for step, loss in enumerate([5.0, 1.0, 4.0, 3.0, 2.0, 2.5]):
            manager.save(step * 10, {"w": torch.zeros(4)}, {"loss": loss})
    return tmp_path / "run"


def steps(root: Path) -> list[int]:
    return CheckpointManager(root).steps()


def test_rm_removes_a_step_and_says_how_much(cli: Cli, run: Path) -> None:
    done = cli("rm", run / "step-00000010", run / "step-00000020", "--json")
    assert done.code == 0
    assert [Path(each["path"]).name for each in done.json["removed"]] == ["step-00000010", "step-00000020"]
    assert done.json["nbytes"] > 8192
    assert steps(run) == [0, 30, 40, 50]
    assert not (run / "step-00000010").exists()


def test_rm_refuses_the_newest_step_unless_forced_and_then_removes_nothing(cli: Cli, run: Path) -> None:
    done = cli("rm", run / "step-00000010", run / "step-00000050")
    assert done.code == 2
    assert "--force" in done.err
    assert steps(run) == [0, 10, 20, 30, 40, 50]
    assert cli("rm", run / "step-00000050", "--force").code == 0
    assert steps(run) == [0, 10, 20, 30, 40]


def test_rm_with_dry_run_removes_nothing(cli: Cli, run: Path) -> None:
    done = cli("rm", run / "step-00000010", "--dry-run")
    assert done.code == 0
    assert done.lines[-1].startswith("would remove 1 item")
    assert 10 in steps(run)


def test_rm_refuses_whole_runs_and_what_is_not_a_checkpoint(cli: Cli, run: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("precious")
    assert cli("rm", run).code == 2
    assert cli("rm", tmp_path / "mine").code == 3
    assert cli("rm", tmp_path / "none").code == 3
    assert (tmp_path / "mine" / "file").exists()
    assert len(steps(run)) == 6


def test_rm_keeps_files_that_no_save_created_and_removes_damaged_checkpoints(cli: Cli, tmp_path: Path) -> None:
    checkpoint.save({"w": torch.zeros(4)}, tmp_path / "c")
    (tmp_path / "c" / "notes.txt").write_text("precious")
    (tmp_path / "c" / "manifest.json").write_text("damaged")
    assert cli("rm", tmp_path / "c").code == 0
    assert os.listdir(tmp_path / "c") == ["notes.txt"]


def test_rm_of_a_step_that_is_read_fails_and_leaves_it(cli: Cli, run: Path) -> None:
    with CheckpointManager(run).reading(10):
        done = cli("rm", run / "step-00000010")
        assert done.code == 3
        assert "is being read" in done.out
    assert 10 in steps(run)
    assert checkpoint.verify(run / "step-00000010")


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        ([], [0, 10, 20, 30, 40, 50]),
        (["--keep-last", "2"], [40, 50]),
        (["--keep-every", "20"], [0, 20, 40, 50]),
        (["--keep-best", "loss"], [10, 50]),
        (["--keep-best", "loss:2:max", "--keep-last", "1"], [0, 20, 50]),
    ],
)
def test_gc_keeps_what_any_rule_keeps_and_the_newest(cli: Cli, run: Path, rules: list[str], kept: list[int]) -> None:
    before = steps(run)
    would = cli("gc", run, *rules, "--dry-run", "--json").json
    assert steps(run) == before
    done = cli("gc", run, *rules, "--json").json
    assert steps(run) == kept
    assert [each["path"] for each in would["removed"]] == [each["path"] for each in done["removed"]]
    assert would["nbytes"] == done["nbytes"]


def test_gc_removes_what_failed_saves_left_and_nothing_of_the_user(cli: Cli, run: Path) -> None:
    stray = run / "step-00000050" / "0123456789ab-00000-0.safetensors"
    stray.write_bytes(b"")
    mine = run / "step-00000050" / "model-00001.safetensors"
    mine.write_bytes(b"mine")
    unfinished = run / "step-00000060"
    unfinished.mkdir()
    (unfinished / "0123456789ab-00000-0.safetensors").write_bytes(b"")
    done = cli("gc", run, "--json").json
    assert sorted(Path(each["path"]).name for each in done["removed"]) == [stray.name, unfinished.name]
    assert not stray.exists()
    assert not unfinished.exists()
    assert mine.exists()
    assert cli("gc", run).out == "removed nothing\n"


def test_gc_leaves_a_step_that_is_being_saved_or_read(cli: Cli, run: Path) -> None:
    with CheckpointManager(run).reading(10):
        done = cli("gc", run, "--keep-last", "1")
    assert done.code == 3
    assert "step-00000010 is being read" in done.out
    assert steps(run) == [10, 50]


@pytest.mark.parametrize(
    "rules",
    [["--keep-last", "0"], ["--keep-best", "loss:x"], ["--keep-best", ""], ["--keep-best", "loss:1:best"]],
)
def test_rules_that_are_wrong_are_misuse(cli: Cli, run: Path, rules: list[str]) -> None:
    assert cli("gc", run, *rules).code == 2
    assert len(steps(run)) == 6


def test_gc_of_a_folder_without_steps_is_unreadable(cli: Cli, tmp_path: Path) -> None:
    assert cli("gc", tmp_path).code == 3
    assert cli("gc", tmp_path / "none").code == 3
