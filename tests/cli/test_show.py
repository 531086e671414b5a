"""`shardwright show` and `ls`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from shardwright import checkpoint, sharded
from shardwright.testing import run_ranks
from tests.cli.conftest import Cli
from tests.cli.example import weights


def test_show_lists_every_tensor_with_dtype_shape_size_and_layout(cli: Cli, step: Path) -> None:
    done = cli("show", step, "--flat")
    assert done.code == 0
    rows = {line.split()[0]: line for line in done.lines if line.startswith("model.")}
    assert list(rows) == [*(f"model.{name}" for name in weights(200)), "model.head.weight"]
    assert "float32   [64, 32]   8.0 KiB" in rows["model.layers.3.wq.weight"]
    assert "(dp: S(0), tp: S(1))  0-3" in rows["model.layers.3.wq.weight"]
    assert "= model.tok.weight" in rows["model.head.weight"]
    assert "lr     0.001" in done.out


def test_show_counts_a_tensor_with_two_names_once(cli: Cli, step: Path) -> None:
    shown = cli("show", step, "--json").json
    assert shown["nbytes"] == sum(tensor.nbytes for tensor in weights(200).values())
    assert shown["tensors"] == 9
    assert len(shown["rows"]) == 10
    assert shown["format"] == "shardwright"


def test_patterns_fold_the_numbers_of_layers(cli: Cli, tmp_path: Path) -> None:
    kinds = ["wq", "wk", "wv", "wo", "w1", "w2", "w3", "norm1", "norm2"]
    state = {f"model.layers.{layer}.{kind}.weight": torch.zeros(2) for layer in range(32) for kind in kinds}
    state |= {"model.tok.weight": torch.zeros(3), "model.norm.weight": torch.zeros(2), "head": torch.zeros(1)}
    checkpoint.save(state, tmp_path / "c")
    shown = cli("show", tmp_path / "c", "--patterns", "--json").json
    assert [row["name"] for row in shown["rows"]][:2] == [
        "model.layers.{0-31}.wq.weight",
        "model.layers.{0-31}.wk.weight",
    ]
    assert len(shown["rows"]) == 12
    assert sum(row["names"] for row in shown["rows"]) == 291


def test_patterns_keep_tensors_of_different_shapes_apart(cli: Cli, tmp_path: Path) -> None:
    state = {"l": {str(n): torch.zeros(2 if n < 3 else 5) for n in (0, 1, 2, 3, 7)}}
    checkpoint.save(state, tmp_path / "c")
    rows = cli("show", tmp_path / "c", "--patterns", "--json").json["rows"]
    assert [(row["name"], row["shape"]) for row in rows] == [("l.{0-2}", [2]), ("l.{3,7}", [5])]


def test_one_tensor_is_drawn_with_who_holds_what_and_where_its_bytes_are(cli: Cli, step: Path) -> None:
    done = cli("show", step, "model.layers.0.wq.weight")
    assert "│ 0:32  │ rank 0 │ rank 1 │" in done.out
    assert "│ 32:64 │ rank 2 │ rank 3 │" in done.out
    shown = cli("show", step, "model.layers.0.wq.weight", "--json").json
    assert [(held["offset"], held["ranks"]) for held in shown["held"]] == [
        ([0, 0], [0]),
        ([0, 16], [1]),
        ([32, 0], [2]),
        ([32, 16], [3]),
    ]
    for held, stored in zip(shown["held"], shown["stored"], strict=True):
        data = (step / stored["file"]).read_bytes()[stored["first"] : stored["end"]]
        (row, column), (height, width) = held["offset"], held["size"]
        expected = weights(200)["layers.0.wq.weight"][row : row + height, column : column + width]
        assert torch.equal(torch.frombuffer(bytearray(data), dtype=torch.float32).view(height, width), expected)


def _save_boxes(path: str) -> None:
    spec = sharded.EnumerableShardingSpec(
        [
            sharded.ShardMetadata([0, 0], [3, 4], "rank:0/cpu"),
            sharded.ShardMetadata([3, 0], [1, 4], "rank:1/cpu"),
        ]
    )
    checkpoint.save({"w": sharded.ones(spec, 4, 4)}, path)


def test_a_tensor_of_explicit_boxes_is_shown_as_such(cli: Cli, tmp_path: Path) -> None:
    run_ranks(2, _save_boxes, str(tmp_path / "c"))
    done = cli("show", tmp_path / "c", "w")
    assert "saved as 2 boxes" in done.out
    assert [line.split() for line in done.lines if line.startswith("[")] == [
        ["[0:3,", "0:4]", "0"],
        ["[3:4,", "0:4]", "1"],
    ]
    assert "2 boxes" in cli("show", tmp_path / "c").out


@pytest.mark.parametrize(("wanted", "names"), [("model.layers.1", 2), ("*.norm.weight", 4), ("lr", 0), ("step", 0)])
def test_a_prefix_a_pattern_or_a_value_selects_what_is_shown(cli: Cli, step: Path, wanted: str, names: int) -> None:
    shown = cli("show", step, wanted, "--json").json
    assert len(shown["rows"]) == names
    assert list(shown["values"]) == ([] if names else [wanted])


def test_an_unknown_name_is_misuse_and_the_closest_is_suggested(cli: Cli, step: Path) -> None:
    done = cli("show", step, "model.tok.wight")
    assert (done.code, done.out) == (2, "")
    assert done.err == "shardwright: nothing is stored under 'model.tok.wight'; did you mean 'model.tok.weight'?\n"


def test_the_folder_of_a_run_is_not_a_checkpoint_and_the_message_names_the_newest_step(cli: Cli, own_run: Path) -> None:
    done = cli("show", own_run)
    assert done.code == 3
    assert "2 steps of a run" in done.err
    assert str(own_run / "step-00000200") in done.err


def test_ls_lists_steps_with_size_age_metrics_and_status(cli: Cli, example_run: Path) -> None:
    done = cli("ls", example_run)
    assert done.code == 0
    assert done.lines[0].split() == ["NAME", "STATUS", "SIZE", "AGE", "loss"]
    assert done.lines[2].split()[:3] == ["step-00000200", "valid,", "latest"]
    listed = cli("ls", example_run, "--json").json
    assert [(entry["step"], entry["metrics"]) for entry in listed["entries"]] == [
        (100, {"loss": 2.5}),
        (200, {"loss": 1.25}),
    ]
    assert listed["entries"][0]["nbytes"] == sum(
        path.stat().st_size for path in (example_run / "step-00000100").iterdir() if path.name[0] != "."
    )


def test_ls_finds_damaged_and_unfinished_steps(cli: Cli, own_run: Path) -> None:
    newest = own_run / "step-00000200"
    next(newest.glob("*.safetensors")).unlink()
    (own_run / "step-00000300").mkdir()
    (own_run / "step-00000300" / "0123456789ab-00000-0.safetensors").write_bytes(b"")
    done = cli("ls", own_run, "--json")
    assert done.code == 1
    assert [(entry["step"], entry["status"]) for entry in done.json["entries"]] == [
        (100, "valid"),
        (200, "corrupted"),
        (300, "unfinished"),
    ]
    assert done.json["latest"] == 100


def test_ls_finds_truncated_files(cli: Cli, own_run: Path) -> None:
    file = next((own_run / "step-00000100").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    done = cli("ls", own_run)
    assert done.code == 1
    assert "step-00000100: " in done.out
    assert "bytes, but the manifest says" in done.out


def test_ls_lists_checkpoints_of_any_name(cli: Cli, tmp_path: Path) -> None:
    checkpoint.save({"w": torch.zeros(3)}, tmp_path / "best")
    (tmp_path / "notes").mkdir()
    (tmp_path / "readme.txt").write_text("hello")
    entries = cli("ls", tmp_path, "--json").json["entries"]
    assert [(entry["name"], entry["status"], entry["step"]) for entry in entries] == [("best", "valid", None)]


def test_ls_of_a_folder_without_checkpoints_is_unreadable(cli: Cli, tmp_path: Path) -> None:
    assert cli("ls", tmp_path).code == 3
    assert cli("ls", tmp_path / "none").code == 3
    assert cli("ls", __file__).err == f"shardwright: {__file__} is not a folder\n"


@pytest.mark.parametrize("command", ["show", "ls", "cat", "stats"])
def test_errors_are_json_too(cli: Cli, tmp_path: Path, command: str) -> None:
    arguments = [command, tmp_path / "none", *(["w"] if command == "cat" else []), "--json"]
    done = cli(*arguments)
    assert done.code == 3
    assert json.loads(done.out)["error"]["exit_code"] == 3
    assert done.err.startswith("shardwright: ")
    assert done.err.count("\n") == 1
