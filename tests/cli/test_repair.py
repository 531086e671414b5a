"""`shardwright repair`: bit for bit what was saved, or it says what is missing; nothing good is lost."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from shardwright import checkpoint
from tests.cli.conftest import Cli


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


@pytest.fixture
def copies(tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint of several blocks, and a copy of it."""
    torch.manual_seed(0)
    checkpoint.save({"a": torch.randn(700_000), "b": torch.randn(300, 1000), "n": 3}, tmp_path / "c")
    shutil.copytree(tmp_path / "c", tmp_path / "copy")
    return tmp_path / "c", tmp_path / "copy"


def data_file(folder: Path) -> Path:
    return next(folder.glob("*.safetensors"))


def flip(path: Path, *places: int) -> None:
    data = bytearray(path.read_bytes())
    for place in places:
        data[place] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage", ["blocks", "header", "header and block", "truncated", "short", "missing", "manifest"]
)
def test_any_damage_is_restored_from_a_copy(cli: Cli, copies: tuple[Path, Path], damage: str) -> None:
    damaged, copy = copies
    before, file = contents(damaged), data_file(damaged)
    match damage:
        case "blocks":
            flip(file, 4096, 2_000_000, len(file.read_bytes()) - 1)
        case "header":
            flip(file, 200)
        case "header and block":
            flip(file, 60, 5000)
        case "truncated":
            file.write_bytes(file.read_bytes()[:-2_000_000])
        case "short":
            file.write_bytes(b"xx")
        case "missing":
            file.unlink()
        case "manifest":
            flip(damaged / "manifest.json", 100)
    assert cli("verify", damaged).code == 1
    would = cli("repair", damaged, "--from", copy, "--dry-run")
    assert would.code == 0
    assert cli("verify", damaged).code == 1
    done = cli("repair", damaged, "--from", copy)
    assert done.code == 0, done.out + done.err
    assert contents(damaged) == before


def test_a_damaged_header_needs_no_copy(cli: Cli, copies: tuple[Path, Path]) -> None:
    damaged, _ = copies
    before = contents(damaged)
    flip(data_file(damaged), 300, 40)
    assert cli("repair", damaged).code == 0
    assert contents(damaged) == before


def test_another_checkpoint_with_the_same_tensor_will_do(cli: Cli, copies: tuple[Path, Path], tmp_path: Path) -> None:
    damaged, _ = copies
    before, state = contents(damaged), checkpoint.read(damaged)
    checkpoint.save({"new": torch.zeros(3), "b": state["b"], "a": torch.zeros(700_000)}, tmp_path / "other")
    file = data_file(damaged)
    flip(file, len(file.read_bytes()) - 5)  # of b
    done = cli("repair", damaged, "--from", tmp_path / "other", "--json")
    assert done.json["repaired"] == {file.name: 1}
    assert contents(damaged) == before


def test_what_no_copy_has_is_named_and_the_rest_is_repaired(
    cli: Cli, copies: tuple[Path, Path], tmp_path: Path
) -> None:
    damaged, _ = copies
    state = checkpoint.read(damaged)
    checkpoint.save({"b": state["b"], "a": torch.zeros(700_000)}, tmp_path / "other")
    file = data_file(damaged)
    flip(file, 4096, len(file.read_bytes()) - 5)  # of a, and of b
    done = cli("repair", damaged, "--from", tmp_path / "other")
    assert done.code == 1
    assert "tensor 'a' is damaged, and no copy has it" in done.out
    (left,) = cli("verify", damaged, "--json").json["checkpoints"][0]["damage"]
    assert left["tensor"] == "a"


def test_nothing_changes_if_nothing_can_be_repaired_or_nothing_is_damaged(cli: Cli, copies: tuple[Path, Path]) -> None:
    damaged, copy = copies
    assert cli("repair", damaged, "--from", copy).out == f"{damaged}: intact, nothing to repair\n"
    flip(data_file(damaged), 4096)
    before = contents(damaged)
    assert cli("repair", damaged).code == 1
    assert contents(damaged) == before
    flip(data_file(copy), 4096)
    assert cli("repair", damaged, "--from", copy).code == 1
    assert contents(damaged) == before


def test_a_manifest_of_another_save_is_not_taken(cli: Cli, copies: tuple[Path, Path], tmp_path: Path) -> None:
    damaged, _ = copies
    checkpoint.save(checkpoint.read(damaged), tmp_path / "other")
    flip(damaged / "manifest.json", 100)
    before = contents(damaged)
    assert cli("repair", damaged, "--from", tmp_path / "other").code == 1
    assert contents(damaged) == before
    assert cli("repair", tmp_path / "none").code == 3
