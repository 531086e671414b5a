"""Ranks that mean different places are told so; nobody's own files go; errors come as themselves; wrong arguments."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright import comm
from shardwright.checkpoint import CheckpointManager, Codec, KeepBest, async_save, load, read, save
from shardwright.errors import (
    ArgumentTypeError,
    CheckpointError,
    CorruptionError,
    RankFailedError,
    ShardwrightError,
    StateError,
    StorageError,
)
from shardwright.storage import Calls, LocalStorage, MemoryStorage
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


def test_ranks_that_mean_different_places_and_wrong_arguments_on_one_rank_are_told_on_all(tmp_path):
    for rank in range(2):
        save({"w": torch.full((2,), float(rank))}, tmp_path / f"alone{rank}")
    zero, one = run_ranks(2, _on_ranks, tmp_path, timeout=40)
    assert "a link" in zero
    for what in one:
        if what not in ("left there", "their files"):
            assert zero[what] == one[what], what
    assert zero["different folders"].startswith("StorageError: ranks save to 2 different locations: rank 0 to /")
    assert "own1; give all ranks the same path" in zero["different folders"]
    assert (zero["their files"], one["their files"]) == (".lock", "")
    for what in ("unshared disk", "unshared disk, async"):
        assert "rank 1: StorageError: the ranks do not share LocalStorage(" in zero[what]
    assert (zero["left there"], one["left there"], zero["still whole"]) == ("", "", "True")
    assert zero["through a link"] == zero["same folder again"] == ""
    assert len(zero["files"].split()) == 3  # .lock, a file, the manifest: no token, old or new
    assert ".begun" not in zero["files"]
    assert zero["different checkpoints"].startswith("CheckpointError: ranks read different checkpoints")
    assert all(f"rank {rank} reads save " in zero["different checkpoints"] for rank in range(2))
    for name in ("save", "async_save"):
        assert (
            "rank 0: ArgumentTypeError: path must be a str, os.PathLike or Storage, got NoneType"
            in zero[f"{name} path"]
        )
        assert (
            "rank 0: ArgumentTypeError: process_group must be a torch process group or None, got int: 5"
            in zero[f"{name} group"]
        )
        assert zero[f"{name} same"].startswith("StateError: hook: ")
    assert "rank 0: ArgumentTypeError: path must be a str, os.PathLike or Storage, got int" in zero["load path"]
    assert (
        "rank 0: ArgumentTypeError: process_group must be a torch process group or None, got str: 'x'"
        in zero["load group"]
    )
    assert zero["load same"] == "CheckpointError: threads must be at least 1, got 0"
    assert zero["load one"].startswith("RankFailedError: ")


def test_a_save_removes_no_file_that_it_cannot_have_made(tmp_path):
    mine = {
        "shard-00001-2.safetensors": b"mine",
        "model-00001-of-00002.safetensors": b"mine",
        "rank-00001-0.safetensors": b"mine",
        "5f3a9c-00001-0.safetensors": b"mine",
        "0123456789ab-00001-1.safetensors": b"mine",
        "manifest.json.0123.tmp": b"mine",
        "0123456789ab-00001-0.safetensors": b"\x40" + bytes(7) + b'{"weight":{"dtype":"F32","shape":[2]' + bytes(40),
    }
    left = {
        "abcdefabcdef-00000-0.safetensors": b"",
        "abcdefabcdef-00001-0.safetensors": b"cut off",
        "abcdefabcdef-00002-0.safetensors": bytes(5000),
        "abcdefabcdef-00003-0.safetensors": b"\xf8\x0f" + bytes(6) + b'{"__metadata__":{"cr' + bytes(5000),
        "abcdefabcdef.begun": b"abcdefabcdef",
        "manifest.json.abcdefabcdef.tmp": b"{",
    }
    save(STATE, tmp_path)
    for name, data in (mine | left).items():
        (tmp_path / name).write_bytes(data)
    save(STATE, tmp_path)
    names = set(os.listdir(tmp_path))
    assert mine.keys() <= names
    assert not left.keys() & names
    assert len(names - mine.keys()) == 3  # .lock, the manifest, one data file


def test_in_a_world_of_one_errors_come_as_themselves(tmp_path):
    with pytest.raises(StateError, match="hook: a builtins") as raised:
        save({"hook": print}, tmp_path)
    assert not isinstance(raised.value, RankFailedError)
    with pytest.raises(StateError, match="hook: a builtins"):
        async_save({"hook": print}, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"exists and is not a directory|a part of the path is a file"):
        save(STATE, tmp_path / "file")
    save(STATE, tmp_path / "run")
    next((tmp_path / "run").glob("*.safetensors")).unlink()
    with pytest.raises(CorruptionError, match="a file of the checkpoint is missing"):
        load({"w": torch.zeros(64)}, tmp_path / "run")


def test_an_unfinished_save_is_waited_for_by_a_load_and_through_a_link(tmp_path):
    (tmp_path / "run").mkdir()
    os.symlink(tmp_path / "run", tmp_path / "link")
    state = {"w": torch.ones(4_000_000)}
    async_save(state, tmp_path / "run")
    assert read(tmp_path / "link")["w"][0] == 1
    state["w"].fill_(2)
    async_save(state, tmp_path / "run")
    assert load({"w": torch.zeros(4_000_000)}, tmp_path / "run")["w"][0] == 2
    handles = []
    for number, name in enumerate(("run", "link", "run")):
        state["w"].fill_(3 + number)
        handles.append(async_save(state, tmp_path / name))
    for handle in handles:
        handle.wait()
    assert read(tmp_path / "run")["w"][-1] == 5
    memory = MemoryStorage()
    async_save(state, memory)
    assert read(memory)["w"][0] == 5


class Own:
    """A type of the user's."""


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"codecs": 5}, ArgumentTypeError, "codecs must be a mapping of types to Codecs, got int"),
        ({"codecs": {"Own": Codec("o", vars, vars)}}, ArgumentTypeError, "codecs: keys must be types, got str: 'Own'"),
        ({"codecs": {Own: print}}, ArgumentTypeError, "codecs: expected a Codec for Own, got builtin_function"),
        ({"extra": 5}, ArgumentTypeError, "extra must be a mapping of names to JSON values, got int"),
        ({"extra": {1: 2}}, ArgumentTypeError, "extra: names must be str, got int: 1"),
        ({"extra": {"a": float("nan")}}, StateError, "extra: 'a' contains nan, which JSON cannot represent"),
        ({"extra": {"a": {"b": [float("inf")]}}}, StateError, "extra: 'a' contains inf"),
        ({"extra": {"a": print}}, StateError, "extra: only JSON values can be stored"),
        ({"threads": "a"}, ArgumentTypeError, "threads must be an int, got str: 'a'"),
    ],
)
def test_wrong_arguments_of_a_save_are_named(tmp_path, options, kind, words):
    for call in (save, async_save):
        with pytest.raises(kind, match=words):
            call(STATE, tmp_path, **options)
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"threads": 0}, CheckpointError, "threads must be at least 1, got 0"),
        ({"threads": "a"}, ArgumentTypeError, "threads must be an int, got str: 'a'"),
        ({"codecs": 5}, ArgumentTypeError, "codecs must be a mapping of types to Codecs, got int"),
        ({"only": 5}, ArgumentTypeError, "only must be a pattern or a list of patterns, got int"),
        ({"only": ["w", 5]}, ArgumentTypeError, "only: patterns must be str, got int: 5"),
        ({"cast": "w"}, ArgumentTypeError, "cast must be a bool or a mapping of patterns to bools, got str"),
        (
            {"cast": {"w": torch.float16}},
            ArgumentTypeError,
            "cast: expected patterns with bools, got 'w': torch.float16",
        ),
    ],
)
def test_wrong_arguments_of_a_load_are_named(tmp_path, options, kind, words):
    save(STATE, tmp_path)
    with pytest.raises(kind, match=words):
        load({"w": torch.zeros(64)}, tmp_path, **options)


def test_load_without_a_path_names_read(tmp_path):
    save(STATE, tmp_path)
    with pytest.raises(ArgumentTypeError, match=r"load\(state, path\) needs a path; .* call read\(path\)"):
        load(tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        {"only": "w"},
        {"rename": {"w": "v"}},
        {"cast": True},
        {"strict": False},
        {"on_missing": "keep"},
        {"process_group": object()},
    ],
)
def test_load_without_a_path_is_refused_whatever_the_options(tmp_path, options):
    save(STATE, tmp_path)
    with pytest.raises(ArgumentTypeError):
        load(tmp_path, **options)
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        read(tmp_path, **options)


def test_read_checks_its_limits(tmp_path):
    save(STATE, tmp_path)
    with pytest.raises(CheckpointError, match="threads must be at least 1, got 0"):
        read(tmp_path, threads=0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"keep_best": 3}, r"keep_best must be KeepBest\(n, metric, mode\), .* got 3"),
        ({"keep_best": "loss"}, "keep_best must be KeepBest.* got 'loss'"),
        ({"keep_best": ("loss", 3)}, "metric and mode must be str"),
        ({"keep_best": KeepBest(1.5, "loss")}, "keep_best must be an int, got float: 1.5"),
        ({"keep_last": 1.5}, "keep_last must be an int, got float: 1.5"),
        ({"keep_last": True}, "keep_last must be an int, got bool: True"),
        ({"keep_every": "2"}, "keep_every must be an int, got str: '2'"),
        ({"save_every": "x"}, "save_every must be an int, got str: 'x'"),
    ],
)
def test_wrong_arguments_of_a_manager_are_named(tmp_path, options, words):
    with pytest.raises(ArgumentTypeError, match=words):
        CheckpointManager(tmp_path, **options)


def test_metrics_that_are_no_mapping_are_refused(tmp_path):
    with (
        CheckpointManager(tmp_path) as manager,
        pytest.raises(ArgumentTypeError, match=r"metrics must be a mapping .* got int"),
    ):
        manager.save(1, STATE, 5)
