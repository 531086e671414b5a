"""`shardwright verify`: every flip is found, with its tensor and its bytes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from shardwright import checkpoint
from tests.cli.conftest import Cli


def test_an_intact_run_is_verified_step_by_step(cli: Cli, example_run: Path) -> None:
    done = cli("verify", example_run, "--json")
    assert done.code == 0
    assert [(Path(each["path"]).name, each["intact"]) for each in done.json["checkpoints"]] == [
        ("step-00000100", True),
        ("step-00000200", True),
    ]


def test_every_flip_is_found_with_the_tensor_and_bytes_that_hold_it(cli: Cli, tmp_path: Path) -> None:
    checkpoint.save({"a": torch.zeros(3 << 18), "b": torch.ones(100_000)}, tmp_path / "c")
    file = next((tmp_path / "c").glob("*.safetensors"))
    data = file.read_bytes()
    generator = random.Random(3)
    for _ in range(12):
        at = generator.randrange(4096, len(data))
        file.write_bytes(data[:at] + bytes([data[at] ^ 1 << generator.randrange(8)]) + data[at + 1 :])
        done = cli("verify", tmp_path / "c", "--json")
        assert done.code == 1
        (verified,) = done.json["checkpoints"]
        (damage,) = verified["damage"]
        assert damage["first"] <= at < damage["end"]
        assert damage["end"] - damage["first"] <= 1 << 20
        assert damage["tensor"] == ("a" if at < 4096 + (3 << 20) else "b")
        assert verified["damaged_tensors"] == [damage["tensor"]]


@pytest.mark.parametrize("damage", ["header", "truncated", "missing", "manifest"])
def test_other_damage_is_found(cli: Cli, tmp_path: Path, damage: str) -> None:
    checkpoint.save({"a": torch.zeros(100)}, tmp_path / "c")
    file = next((tmp_path / "c").glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    if damage == "missing":
        file.unlink()
    elif damage == "truncated":
        file.write_bytes(data[:-1])
    elif damage == "manifest":
        manifest = tmp_path / "c" / "manifest.json"
        manifest.write_bytes(manifest.read_bytes()[:-1])
    else:
        data[60] ^= 1
        file.write_bytes(data)
    done = cli("verify", tmp_path / "c")
    assert done.code == 1
    assert ": damaged in " in done.out
    assert done.err == ""


def test_stray_files_are_listed_and_harmless(cli: Cli, tmp_path: Path) -> None:
    checkpoint.save({"a": torch.zeros(1)}, tmp_path / "c")
    (tmp_path / "c" / "notes.txt").write_text("mine")
    done = cli("verify", tmp_path / "c")
    assert done.code == 0
    assert "notes.txt is not part of the checkpoint" in done.out


def test_several_checkpoints_are_verified_and_one_that_is_missing_is_unreadable(cli: Cli, tmp_path: Path) -> None:
    for name in ("a", "b"):
        checkpoint.save({"w": torch.zeros(1)}, tmp_path / name)
    assert len(cli("verify", tmp_path / "a", tmp_path / "b", "--json").json["checkpoints"]) == 2
    assert cli("verify", tmp_path / "a", tmp_path / "none").code == 3
    assert cli("verify").code == 2
    assert cli("verify", tmp_path / "a", "--threads", "0").code == 2
