"""Wrong arguments of save, load, read and the manager raise typed errors that name them."""

from __future__ import annotations

import pytest
import torch

from shardwright.checkpoint import CheckpointManager, Codec, KeepBest, async_save, load, read, save
from shardwright.errors import (
    ArgumentTypeError,
    CheckpointError,
    CorruptionError,
    RankFailedError,
    StateError,
    StorageError,
)

STATE = {"w": torch.arange(64.0)}


def test_a_single_process_raises_errors_unwrapped(tmp_path):
    with pytest.raises(StateError, match="hook: builtins") as raised:
        save({"hook": print}, tmp_path)
    assert not isinstance(raised.value, RankFailedError)
    with pytest.raises(StateError, match="hook: builtins"):
        async_save({"hook": print}, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"exists and is not a directory|a part of the path is a file"):
        save(STATE, tmp_path / "file")
    save(STATE, tmp_path / "run")
    next((tmp_path / "run").glob("*.safetensors")).unlink()
    with pytest.raises(CorruptionError, match="a file of the checkpoint is missing"):
        load({"w": torch.zeros(64)}, tmp_path / "run")


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
def test_wrong_arguments_of_save_raise_with_their_name(tmp_path, options, kind, words):
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
def test_wrong_arguments_of_load_raise_with_their_name(tmp_path, options, kind, words):
    save(STATE, tmp_path)
    with pytest.raises(kind, match=words):
        load({"w": torch.zeros(64)}, tmp_path, **options)


def test_load_without_a_path_raises_and_suggests_read(tmp_path):
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
def test_load_without_a_path_raises_whatever_the_options(tmp_path, options):
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
def test_wrong_arguments_of_the_manager_raise_with_their_name(tmp_path, options, words):
    with pytest.raises(ArgumentTypeError, match=words):
        CheckpointManager(tmp_path, **options)


def test_metrics_must_be_a_mapping(tmp_path):
    with (
        CheckpointManager(tmp_path) as manager,
        pytest.raises(ArgumentTypeError, match=r"metrics must be a mapping .* got int"),
    ):
        manager.save(1, STATE, 5)
