"""All ranks save to one shared directory, and an argument error on one rank is raised on all of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright import comm
from shardwright.checkpoint import async_save, load, save
from shardwright.errors import (
    ShardwrightError,
)
from shardwright.storage import Calls, LocalStorage
from shardwright.testing import run_ranks

STATE = {"w": torch.arange(64.0)}


def told(call: Any, *args: Any, **options: Any) -> str:
    """The error of a call, with its type; "" where it returns."""
    try:
        call(*args, **options)
    except ShardwrightError as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Elsewhere(Calls):
    """The same paths, on a disk of this rank's own."""

    def __init__(self, here: str, there: str) -> None:
        self._here, self._there = here, there

    def open(self, path: str, flags: int, mode: int = 0o666) -> int:
        return super().open(path.replace(self._here, self._there), flags, mode)

    def unlink(self, path: str) -> None:
        super().unlink(path.replace(self._here, self._there))


def _on_ranks(root: Path) -> dict[str, str]:
    rank = comm.world().rank
    own = root / f"own{rank}"
    own.mkdir()
    found = {"different folders": told(save, STATE, own), "their files": " ".join(sorted(os.listdir(own)))}
    shared, disk = root / "shared", root / f"disk{rank}"
    disk.mkdir()
    save(STATE, shared)
    calls = Elsewhere(str(shared), str(disk)) if rank else Calls()
    found["unshared disk"] = told(save, {"w": torch.zeros(64)}, LocalStorage(shared, calls))
    found["unshared disk, async"] = told(async_save, {"w": torch.zeros(64)}, LocalStorage(shared, calls))
    found["left there"] = " ".join(sorted(os.listdir(disk)))
    found["still whole"] = str(torch.equal(load({"w": torch.zeros(64)}, shared)["w"], STATE["w"]))
    comm.agree(lambda: None, what="looked")
    if rank == 0:
        os.symlink(shared, root / "link")
        for name in "ab":
            (shared / f"{'0123456789a'}{name}.begun").write_text("left by a save that was killed")
        found["a link"] = ""
    comm.agree(lambda: None, what="linked")
    found["through a link"] = told(save, STATE, root / "link" if rank else shared)
    comm.agree(lambda: None, what="saved")
    found["files"] = " ".join(sorted(os.listdir(shared)))
    found["different checkpoints"] = told(load, {"w": torch.zeros(2)}, root / f"alone{rank}")
    found["same folder again"] = told(load, {"w": torch.zeros(64)}, shared)
    for name, call in {"save": save, "async_save": async_save}.items():
        found[f"{name} path"] = told(call, STATE, shared if rank else None)
        found[f"{name} group"] = told(call, STATE, shared, process_group=None if rank else 5)
        found[f"{name} same"] = told(call, {"hook": print}, shared)
    found["load path"] = told(load, {"w": torch.zeros(64)}, shared if rank else 7)
    found["load group"] = told(load, {"w": torch.zeros(64)}, shared, process_group=None if rank else "x")
    found["load same"] = told(load, {"w": torch.zeros(64)}, shared, threads=0)
    found["load one"] = told(load, {"w": torch.zeros(64)}, shared, threads=rank)
    return found


Found = tuple[dict[str, str], dict[str, str]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The outcomes of `_on_ranks` on ranks 0 and 1."""
    root = tmp_path_factory.mktemp("ranks")
    for rank in range(2):
        save({"w": torch.full((2,), float(rank))}, root / f"alone{rank}")
    zero, one = run_ranks(2, _on_ranks, root, timeout=40)
    return zero, one


def test_an_error_is_the_same_on_all_ranks(found: Found) -> None:
    zero, one = found
    assert "a link" in zero
    for what in one.keys() - {"left there", "their files"}:
        assert zero[what] == one[what], what


def test_saving_to_different_directories_raises_on_all_ranks(found: Found) -> None:
    zero, one = found
    assert zero["different folders"].startswith("StorageError: ranks save to 2 different locations: rank 0 to /")
    assert "own1; give all ranks the same path" in zero["different folders"]
    assert (zero["their files"], one["their files"]) == (".lock", "")


@pytest.mark.parametrize("what", ["unshared disk", "unshared disk, async"])
def test_a_directory_that_ranks_do_not_share_is_refused(found: Found, what: str) -> None:
    assert "rank 1: StorageError: the ranks do not share LocalStorage(" in found[0][what]


def test_a_refused_save_leaves_no_files_and_keeps_the_checkpoint(found: Found) -> None:
    zero, one = found
    assert (zero["left there"], one["left there"], zero["still whole"]) == ("", "", "True")


def test_a_symbolic_link_to_the_directory_is_the_same_location(found: Found) -> None:
    zero, _ = found
    assert zero["through a link"] == zero["same folder again"] == ""


def test_tokens_of_this_and_of_killed_saves_are_removed(found: Found) -> None:
    zero, _ = found
    assert len(zero["files"].split()) == 3  # .lock, a file, the manifest
    assert ".begun" not in zero["files"]


def test_loading_different_checkpoints_raises_on_all_ranks(found: Found) -> None:
    zero, _ = found
    assert zero["different checkpoints"].startswith("CheckpointError: ranks read different checkpoints")
    assert all(f"rank {rank} reads save " in zero["different checkpoints"] for rank in range(2))


@pytest.mark.parametrize("name", ["save", "async_save"])
def test_a_bad_path_on_one_rank_raises_on_all(found: Found, name: str) -> None:
    expected = "rank 0: ArgumentTypeError: path must be a str, os.PathLike or Storage, got NoneType"
    assert expected in found[0][f"{name} path"]


@pytest.mark.parametrize("name", ["save", "async_save"])
def test_a_bad_process_group_on_one_rank_raises_on_all(found: Found, name: str) -> None:
    assert (
        "rank 0: ArgumentTypeError: process_group must be a torch process group or None, got int: 5"
        in found[0][f"{name} group"]
    )


@pytest.mark.parametrize("name", ["save", "async_save"])
def test_an_error_common_to_all_ranks_is_raised_unwrapped(found: Found, name: str) -> None:
    assert found[0][f"{name} same"].startswith("StateError: hook: ")


def test_a_bad_argument_of_load_on_one_rank_raises_on_all(found: Found) -> None:
    zero, _ = found
    assert "rank 0: ArgumentTypeError: path must be a str, os.PathLike or Storage, got int" in zero["load path"]
    assert (
        "rank 0: ArgumentTypeError: process_group must be a torch process group or None, got str: 'x'"
        in zero["load group"]
    )
    assert zero["load one"].startswith("RankFailedError: ")


def test_a_bad_argument_of_load_on_all_ranks_is_raised_unwrapped(found: Found) -> None:
    assert found[0]["load same"] == "CheckpointError: threads must be at least 1, got 0"
