"""`shardwright cat`: the same values as torch, read by slices."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch

from shardwright import checkpoint
from shardwright.cli.cat import write_raw
from tests.cli.conftest import Cli
from tests.cli.example import weights

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.bool, torch.complex64, torch.complex128),
]


@pytest.mark.parametrize(
    "index", ["", "[0]", "[-1, 3]", "[0:2, :3]", "[::-20, ::7]", "[..., -1]", "[None, 5:5]", "[ 1 : 64 : 9 , 2 ]"]
)
def test_cat_gives_what_indexing_gives(cli: Cli, step: Path, index: str) -> None:
    name = "layers.0.wq.weight"
    expected = eval(f"array{index}", {"array": weights(200)[name].numpy()})
    shown = cli("cat", step, f"model.{name}{index}", "--json").json
    assert shown["shape"] == list(expected.shape)
    assert np.array_equal(np.array(shown["values"], np.float32).reshape(expected.shape), expected)


def test_a_long_tensor_is_shown_by_its_ends_and_only_those_are_read(cli: Cli, tmp_path: Path) -> None:
    whole = torch.arange(64 << 18).view(16, -1)  # 128 MiB
    checkpoint.save({"w": whole}, tmp_path / "c")
    file = next((tmp_path / "c").glob("*.safetensors"))
    with file.open("r+b") as stream:  # damage in the middle is not seen
        stream.seek(60 << 20)
        stream.write(b"damage")
    done = cli("cat", tmp_path / "c", "w")
    assert done.code == 0
    assert done.lines[0].split() == ["[[", "0,", "1,", "2,", "...,", "1048573,", "1048574,", "1048575],"]
    assert done.lines[-2].split()[-1] == f"{whole[-1, -1]}]]"
    assert done.lines[-1] == "int64 [16, 1048576]"
    assert len(done.lines) == 8
    assert cli("cat", tmp_path / "c", "w[7]").code == 0
    assert cli("cat", tmp_path / "c", "w[7]", "--all").code == 1  # this reads the damaged block


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_text_hold_every_bit_of_the_tensor(cli: Cli, tmp_path: Path, dtype: torch.dtype) -> None:
    whole = (torch.randn(5, 7) * 3).abs().to(dtype)
    checkpoint.save({"w": whole}, tmp_path / "c")
    rows = [line.split(" ") for line in cli("cat", tmp_path / "c", "w", "--all").lines]
    assert [len(row) for row in rows] == [7] * 5
    kind = complex if dtype.is_complex else float
    numbers = [[value == "True" if dtype == torch.bool else kind(value) for value in row] for row in rows]
    if dtype in (torch.uint64, torch.int64):
        numbers = [[int(value) for value in row] for row in rows]
    assert torch.equal(torch.tensor(numbers).to(dtype).view(torch.uint8), whole.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_raw_bytes_are_those_of_the_tensor(tmp_path: Path, dtype: torch.dtype) -> None:
    whole = (torch.randn(50, 70) * 3).abs().to(dtype)
    checkpoint.save({"w": whole}, tmp_path / "c")
    for wanted, expected in (("w", whole), ("w[3:40:5, -1]", whole[3:40:5, -1])):
        stream = io.BytesIO()
        write_raw(str(tmp_path / "c"), wanted, stream)
        assert stream.getvalue() == expected.contiguous().view(torch.uint8).numpy().tobytes()


def test_a_row_longer_than_a_block_is_one_line(cli: Cli, tmp_path: Path) -> None:
    whole = torch.arange(2 * 300_000, dtype=torch.int64).view(2, -1)
    checkpoint.save({"w": whole}, tmp_path / "c")
    lines = cli("cat", tmp_path / "c", "w", "--all").lines
    assert [list(map(int, line.split(" "))) for line in lines] == whole.tolist()


def test_scalars_empty_tensors_and_plain_values(cli: Cli, tmp_path: Path) -> None:
    state = {"loss": torch.tensor(2.5), "none": torch.zeros(0, 3), "run": {"name": "x\x1b[31m", "tags": [1, "a"]}}
    checkpoint.save(state, tmp_path / "c")
    assert cli("cat", tmp_path / "c", "loss").lines == ["2.5", "float32 []"]
    assert cli("cat", tmp_path / "c", "loss", "--all").out == "2.5\n"
    assert cli("cat", tmp_path / "c", "none").lines == ["[]", "float32 [0, 3]"]
    assert cli("cat", tmp_path / "c", "none", "--all").out == ""
    assert cli("cat", tmp_path / "c", "run.name").out == "x\\x1b[31m\n"
    assert cli("cat", tmp_path / "c", "run.tags.1", "--json").json == {"name": "run.tags.1", "value": "a"}


def test_a_name_with_brackets_is_found_as_it_is(cli: Cli, tmp_path: Path) -> None:
    checkpoint.save({"w[0]": torch.tensor([1, 2]), "w": torch.tensor([3, 4])}, tmp_path / "c")
    assert cli("cat", tmp_path / "c", "w[0]").lines == ["[1, 2]", "int64 [2]"]
    assert cli("cat", tmp_path / "c", "w[0][1]").lines == ["2", "int64 []"]
    assert cli("cat", tmp_path / "c", "w[1]").lines == ["4", "int64 []"]


@pytest.mark.parametrize(
    ("index", "problem"),
    [
        ("[100, 0]", "index 100 is out of range"),
        ("[0, 0, 0]", "too many indices"),
        ("[..., ...]", "too many indices"),
        ("[x]", "'x' is not an index"),
        ("[0,,1]", "'' is not an index"),
        ("[::0]", "must not be 0"),
        ("[__import__('os')]", "is not an index"),
        ("[99999999999999999999]", "is not an index"),
    ],
)
def test_an_index_that_does_not_fit_is_misuse(cli: Cli, step: Path, index: str, problem: str) -> None:
    done = cli("cat", step, f"model.tok.weight{index}")
    assert (done.code, done.out) == (2, "")
    assert problem in done.err


def test_options_that_exclude_each_other_are_misuse(cli: Cli, step: Path) -> None:
    assert cli("cat", step, "model.tok.weight", "--all", "--json").code == 2


def test_json_of_too_many_values_is_refused_and_the_remedy_named(cli: Cli, tmp_path: Path) -> None:
    checkpoint.save({"w": torch.zeros(1_000_001, dtype=torch.int8)}, tmp_path / "c")
    done = cli("cat", tmp_path / "c", "w", "--json")
    assert done.code == 2
    assert "name a slice" in done.err
