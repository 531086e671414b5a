"""`shardwright merge`: torch's numbers, a whole checkpoint or nothing."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright import checkpoint
from tests.cli.conftest import Cli


def state(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(70, 50, generator=generator)
    return {
        "model": {"w": w, "half": torch.randn(9, generator=generator).bfloat16(), "tied": w, "ids": torch.arange(4)},
        "optimizer": [torch.randn((), generator=generator), {"step": 3}],
        "seed": 0,
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for seed in range(3):
        checkpoint.save(state(seed), tmp_path / f"c{seed}")
    return tmp_path


def test_the_average_is_that_of_torch(cli: Cli, folder: Path) -> None:
    assert cli("merge", *(folder / f"c{seed}" for seed in range(3)), "--out", folder / "out").code == 0
    merged, states = checkpoint.read(folder / "out"), [state(seed) for seed in range(3)]
    for name in ("w", "half"):
        expected = sum(each["model"][name].double() for each in states) / 3
        assert torch.allclose(merged["model"][name].double(), expected, rtol=1e-6 if name == "w" else 4e-3)
        assert merged["model"][name].dtype == states[0]["model"][name].dtype
    assert merged["model"]["tied"] is merged["model"]["w"]
    assert torch.equal(merged["model"]["ids"], torch.arange(4))
    assert merged["optimizer"][1] == {"step": 3}
    assert checkpoint.verify(folder / "out")


def test_weights_are_divided_by_their_sum(cli: Cli, folder: Path) -> None:
    done = cli(
        "merge", folder / "c0", folder / "c1", "--weight", "3", "--weight", "1", "--out", folder / "out", "--json"
    )
    assert done.json["weights"] == [0.75, 0.25]
    expected = 0.75 * state(0)["model"]["w"].double() + 0.25 * state(1)["model"]["w"].double()
    assert torch.equal(checkpoint.read(folder / "out")["model"]["w"], expected.float())


def test_the_average_of_equal_checkpoints_is_the_same(cli: Cli, folder: Path) -> None:
    cli("merge", folder / "c0", folder / "c0", folder / "c0", folder / "c0", "--out", folder / "out")
    assert cli("diff", folder / "c0", folder / "out").code == 0


def test_a_tensor_of_many_blocks_is_merged(cli: Cli, tmp_path: Path) -> None:
    for seed in range(2):
        torch.manual_seed(seed)
        checkpoint.save({"w": torch.randn(3, 1 << 20)}, tmp_path / f"c{seed}")
    cli("merge", tmp_path / "c0", tmp_path / "c1", "--out", tmp_path / "out")
    a, b, merged = (checkpoint.read(tmp_path / name)["w"].double() for name in ("c0", "c1", "out"))
    assert torch.equal(merged, ((a * 0.5) + (b * 0.5)).float().double())


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"extra": torch.zeros(1)}, "'extra' is only in"),
        ({"w": torch.zeros(3)}, "'w' is float32 [2] in"),
        ({"w": torch.zeros(2).double()}, "but float64 [2] in"),
        ({"n": torch.tensor([5])}, "'n' is int64, which cannot be averaged"),
    ],
)
def test_checkpoints_that_do_not_fit_are_refused_and_nothing_is_left(
    cli: Cli, tmp_path: Path, change: dict[str, torch.Tensor], problem: str
) -> None:
    base = {"w": torch.zeros(2), "n": torch.tensor([4])}
    checkpoint.save(base, tmp_path / "a")
    checkpoint.save({**base, **change}, tmp_path / "b")
    done = cli("merge", tmp_path / "a", tmp_path / "b", "--out", tmp_path / "out")
    assert (done.code, done.out) == (2, "")
    assert problem in done.err
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_an_output_that_exists_or_arguments_that_do_not_fit_are_refused(cli: Cli, folder: Path) -> None:
    pair = folder / "c0", folder / "c1"
    for arguments in (
        (*pair, "--out", folder / "c2"),
        (folder / "c0", "--out", folder / "out"),
        (*pair,),
        (*pair, "--out", folder / "out", "--weight", "1"),
        (*pair, "--out", folder / "out", "--weight", "1", "--weight", "-1"),
        (*pair, "--out", folder / "out", "--weight", "nan", "--weight", "1"),
        (*pair, "--out", folder / "out", "--alpha", "1"),
        (*pair, "--out", folder / "out", "--lora", folder / "c2"),
    ):
        assert cli("merge", *arguments).code == 2, arguments
    assert cli("merge", *pair, "--out", folder / "no" / "out").code == 3
    assert sorted(os.listdir(folder)) == ["c0", "c1", "c2"]


def test_damage_in_an_input_leaves_no_output(cli: Cli, folder: Path) -> None:
    file = next((folder / "c1").glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[4200] ^= 1
    file.write_bytes(data)
    assert cli("merge", folder / "c0", folder / "c1", "--out", folder / "out").code == 1
    assert sorted(os.listdir(folder)) == ["c0", "c1", "c2"]


def test_an_interrupt_or_a_full_disk_leaves_no_output(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = "merge", folder / "c0", folder / "c1", "--out", folder / "out"

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        done = cli(*arguments)
    assert done.code == 3
    assert "No space left on device" in done.err
    for module in ("merge.read_box", "merge.with_tensors"):  # while tensors are merged, and before they are saved
        with monkeypatch.context() as patched:
            patched.setattr(f"shardwright.cli.{module}", interrupted)
            done = cli(*arguments)
        assert (done.code, done.err) == (130, "shardwright: interrupted\n")
    assert sorted(os.listdir(folder)) == ["c0", "c1", "c2"]


@pytest.fixture
def lora(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    base = {"model.q.weight": torch.randn(40, 30), "model.k.weight": torch.randn(20, 30).bfloat16(), "b": torch.ones(2)}
    checkpoint.save(base, tmp_path / "base")
    adapter = {}
    for name, rows in (("q", 40), ("k", 20)):
        adapter[f"base_model.model.model.{name}.lora_A.weight"] = torch.randn(4, 30)
        adapter[f"base_model.model.model.{name}.lora_B.weight"] = torch.randn(rows, 4)
    checkpoint.save(adapter, tmp_path / "adapter")
    return tmp_path


@pytest.mark.parametrize("use_rslora", [False, True])
def test_an_adapter_is_added_to_its_base(cli: Cli, lora: Path, use_rslora: bool) -> None:
    (lora / "adapter" / "adapter_config.json").write_text(
        json.dumps({"lora_alpha": 16, "r": 4, "use_rslora": use_rslora})
    )
    done = cli("merge", lora / "base", "--lora", lora / "adapter", "--out", lora / "out", "--json")
    assert done.json["changed"] == 2
    base, adapter, merged = (checkpoint.read(lora / name) for name in ("base", "adapter", "out"))
    for name in ("q", "k"):
        a, b = (adapter[f"base_model.model.model.{name}.lora_{part}.weight"] for part in "AB")
        weight = base[f"model.{name}.weight"]
        expected = (weight.float() + (b @ a) * (16 / (2 if use_rslora else 4))).to(weight.dtype)
        assert torch.allclose(merged[f"model.{name}.weight"], expected, rtol=1e-5 if name == "q" else 1e-2)
    assert torch.equal(merged["b"], base["b"])


def test_adapters_that_do_not_fit_are_refused(cli: Cli, lora: Path) -> None:
    def merge(*options: object) -> int:
        return cli("merge", lora / "base", "--lora", lora / "adapter", "--out", lora / "out", *options).code

    assert merge() == 2  # no alpha
    assert merge("--alpha", "nan") == 2
    config = lora / "adapter" / "adapter_config.json"
    for text in ('{"use_dora": true, "lora_alpha": 1}', "[]", "{", '{"lora_alpha": "x"}'):
        config.write_text(text)
        assert merge() == 2, text
    config.unlink()
    good = checkpoint.read(lora / "adapter")
    prefix = "base_model.model.model"
    for bad in (
        {f"{prefix}.x.lora_A.weight": torch.ones(4, 30), f"{prefix}.x.lora_B.weight": torch.ones(4, 4)},
        {f"{prefix}.q.lora_A.weight": torch.ones(4, 30)},
        {f"{prefix}.q.lora_A.weight": torch.ones(4, 31), f"{prefix}.q.lora_B.weight": torch.ones(40, 4)},
        {**good, f"{prefix}.q.lora_magnitude_vector": torch.ones(40)},
        {"w": torch.ones(1)},
        {},
    ):
        checkpoint.save(bad, lora / "adapter")
        assert merge("--alpha", "8") == 2
    assert not (lora / "out").exists()
    checkpoint.save(good, lora / "adapter")
    assert merge("--alpha", "8") == 0
