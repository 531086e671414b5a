"""The same commands on checkpoints that others wrote: PyTorch's DCP, Hugging Face's folders, files of torch.save."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path

import pytest
import torch

from shardwright import checkpoint
from tests.cli.conftest import Cli

FORMATS = ["dcp", "huggingface", "torch"]


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "model.layers.0.w": torch.randn(40, 30, generator=generator),
        "model.layers.1.w": torch.randn(40, 30, generator=generator),
        "model.norm": torch.ones(30, dtype=torch.bfloat16),
        "ids": torch.arange(5),
    }


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tensors in every format, written by those who defined it."""
    import safetensors.torch
    import torch.distributed.checkpoint as dcp

    folder = tmp_path_factory.mktemp("formats")
    (folder / "huggingface").mkdir()
    safetensors.torch.save_file(tensors(), folder / "huggingface" / "model.safetensors")
    torch.save(tensors(), folder / "weights.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(tensors(), checkpoint_id=folder / "dcp", no_dist=True)
    checkpoint.save(tensors(), folder / "shardwright")
    found = {name: folder / name for name in ("dcp", "huggingface", "shardwright")}
    return {**found, "torch": folder / "weights.pt"}


@pytest.mark.parametrize("name", FORMATS)
def test_looking_works_on_every_format(cli: Cli, written: dict[str, Path], name: str) -> None:
    path = written[name]
    shown = cli("show", path, "--json").json
    assert shown["format"] == name
    assert {row["name"]: row["shape"] for row in shown["rows"]} == {
        key: list(tensor.shape) for key, tensor in tensors().items()
    }
    assert cli("show", path).code == 0
    assert "model.layers.{0-1}.w" in cli("show", path, "--patterns").out
    assert cli("show", path, "model.norm").code == 0
    values = cli("cat", path, "model.layers.1.w[3:5, ::7]", "--json").json["values"]
    assert torch.equal(torch.tensor(values), tensors()["model.layers.1.w"][3:5, ::7])
    (stats,) = cli("stats", path, "model.layers.0.w", "--json").json["tensors"]
    assert stats["maximum"] == tensors()["model.layers.0.w"].max().item()
    explained = cli("explain", path, "--mesh", "dp=4", "--json").json
    assert explained["ranks"][0]["held_bytes"] == 2 * 10 * 30 * 4 + 8 * 2 + 2 * 8


@pytest.mark.parametrize("name", FORMATS)
def test_comparing_works_across_formats(cli: Cli, written: dict[str, Path], name: str) -> None:
    assert cli("verify", written[name]).code == 0
    assert cli("diff", written[name], written["shardwright"]).code == 0
    fingerprints = {cli("fingerprint", path, "--json").json["fingerprint"] for path in written.values()}
    assert len(fingerprints) == 1


@pytest.mark.parametrize("name", ["dcp", "torch"])
def test_damage_that_torch_does_not_notice_is_found(
    cli: Cli, written: dict[str, Path], tmp_path: Path, name: str
) -> None:
    if written[name].is_dir():
        shutil.copytree(written[name], tmp_path / "c")
        file = next((tmp_path / "c").glob("*.distcp"))
    else:
        file = Path(shutil.copy(written[name], tmp_path / "c"))
    data = file.read_bytes()
    at = data.index(tensors()["model.layers.0.w"].numpy().tobytes()) + 100
    file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    done = cli("verify", tmp_path / "c", "--json")
    assert done.code == 1
    assert done.json["checkpoints"][0]["damaged_tensors"] == ["model.layers.0.w"]
    assert cli("stats", tmp_path / "c", "model.layers.0.w").code == 1
    assert cli("cat", tmp_path / "c", "model.norm").code == 0
    assert cli("merge", tmp_path / "c", written["shardwright"], "--out", tmp_path / "out").code == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", FORMATS)
def test_a_checkpoint_is_repaired_from_another_format(
    cli: Cli, written: dict[str, Path], tmp_path: Path, name: str
) -> None:
    checkpoint.save(tensors(), tmp_path / "c")
    file = next((tmp_path / "c").glob("*.safetensors"))
    data = file.read_bytes()
    file.write_bytes(data[:-3] + b"\0\0\0")
    assert cli("repair", tmp_path / "c", "--from", written[name]).code == 0
    assert file.read_bytes() == data


def test_merge_takes_any_format_and_rm_only_its_own(cli: Cli, written: dict[str, Path], tmp_path: Path) -> None:
    done = cli("merge", written["dcp"], written["huggingface"], written["torch"], "--out", tmp_path / "out")
    assert done.code == 0
    assert cli("diff", tmp_path / "out", written["shardwright"], "--rtol", "1e-6").code == 0
    for name in FORMATS:
        assert cli("rm", written[name], "--force").code in (2, 3)
        assert written[name].exists()


@pytest.mark.parametrize("to", ["hf", "dcp", "torch", "shardwright"])
def test_convert_writes_every_format(cli: Cli, written: dict[str, Path], tmp_path: Path, to: str) -> None:
    done = cli("convert", written["shardwright"], tmp_path / "out", "--to", to, "--json")
    assert done.code == 0, done.err
    assert done.json["tensors"] == 4
    assert cli("diff", written["shardwright"], tmp_path / "out", "--ignore-values").code == 0
    again = cli("convert", written["shardwright"], tmp_path / "out", "--to", to)
    assert again.code == 2
    assert "exists" in again.err


def test_convert_casts_selects_and_maps(cli: Cli, written: dict[str, Path], tmp_path: Path) -> None:
    rules = tmp_path / "rules"
    rules.write_text("model.layers.{i}.w = l.{i} : a b = b a\n* = *\n")
    options = ("--to", "hf", "--mapping", rules, "--only", "l.*", "--cast", "bfloat16")
    assert cli("convert", written["dcp"], tmp_path / "out", *options).code == 0
    import safetensors.torch

    found = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert sorted(found) == ["l.0", "l.1"]
    assert torch.equal(found["l.1"], tensors()["model.layers.1.w"].T.bfloat16())


@pytest.mark.parametrize(
    "options",
    [
        ("--to", "onnx"),
        (),
        ("--to", "hf", "--cast", "float31"),
        ("--to", "hf", "--cast", "x=y", "--cast", "float16"),
        ("--to", "hf", "--like", "/nowhere"),
        ("--to", "hf", "--max-shard-size", "many"),
    ],
)
def test_conversions_that_cannot_be_are_misuse_and_leave_nothing(
    cli: Cli, written: dict[str, Path], tmp_path: Path, options: tuple[str, ...]
) -> None:
    done = cli("convert", written["torch"], tmp_path / "out", *options)
    assert (done.code, done.out) == (2, "")
    assert os.listdir(tmp_path) == []
