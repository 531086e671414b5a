"""`sw.interop.convert`: formats, mappings, casts, ties, budgets; and nothing half-written, whatever fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import shardwright as sw
from shardwright import checkpoint
from shardwright.errors import ArgumentTypeError, CheckpointError, LoadMismatchError, MappingError, StorageError
from shardwright.interop import convert
from shardwright.interop.conversion.source import ConversionSource
from shardwright.testing import run_ranks


def state_of_many_dtypes() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "w": torch.randn(7, 5),
        "half": torch.randn(3, 4).half(),
        "brain": torch.randn(9).bfloat16(),
        "count": torch.arange(6).reshape(2, 3),
        "mask": torch.tensor([True, False, True]),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "small": torch.randint(0, 255, (5,), dtype=torch.uint8),
    }


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def test_every_format_holds_what_was_saved_as_its_own_reader_sees_it(tmp_path: Path) -> None:
    state = state_of_many_dtypes()
    checkpoint.save(state, tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "hf", to="hf")
    assert_same(load_file(tmp_path / "hf/model.safetensors"), state)
    convert(tmp_path / "ours", tmp_path / "w.pt", to="torch")
    for mmap in (False, True):
        assert_same(torch.load(tmp_path / "w.pt", weights_only=True, mmap=mmap), state)
    convert(tmp_path / "ours", tmp_path / "again", to="shardwright")
    assert_same(checkpoint.read(tmp_path / "again"), state)
    assert sorted(os.listdir(tmp_path)) == ["again", "hf", "ours", "w.pt"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_loads_a_distributed_checkpoint_that_was_converted(tmp_path: Path) -> None:
    state = state_of_many_dtypes()
    state["tied"] = state["w"]
    checkpoint.save(state, tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "dcp", to="dcp")
    found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(found, checkpoint_id=tmp_path / "dcp")
    assert_same(found, state)
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "theirs.pt")
    assert_same(torch.load(tmp_path / "theirs.pt"), state)


def test_the_records_of_a_torch_file_are_aligned_and_have_right_checksums(tmp_path: Path) -> None:
    checkpoint.save(state_of_many_dtypes(), tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "w.pt", to="torch")
    with zipfile.ZipFile(tmp_path / "w.pt") as archive:
        assert archive.testzip() is None
        for info in archive.infolist():
            assert info.compress_type == zipfile.ZIP_STORED
    reader = torch._C.PyTorchFileReader(str(tmp_path / "w.pt"))
    assert all(reader.get_record_offset(f"data/{key}") % 64 == 0 for key in range(8))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint16, torch.complex64, torch.complex128])
def test_rarer_dtypes_are_written_or_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    state = {"w": torch.arange(6).to(dtype)}
    checkpoint.save(state, tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "w.pt", to="torch")
    found = torch.load(tmp_path / "w.pt", weights_only=True)["w"]
    assert found.dtype == dtype
    assert torch.equal(found.view(torch.uint8), state["w"].view(torch.uint8))
    convert(tmp_path / "ours", tmp_path / "again", to="shardwright")
    assert torch.equal(checkpoint.read(tmp_path / "again")["w"].view(torch.uint8), state["w"].view(torch.uint8))
    if dtype == torch.complex128:
        with pytest.raises(CheckpointError, match=r"'w' has the dtype torch\.complex128, which safetensors does not"):
            convert(tmp_path / "ours", tmp_path / "hf", to="hf")
    else:
        convert(tmp_path / "ours", tmp_path / "hf", to="hf")
        read = load_file(tmp_path / "hf/model.safetensors")["w"]
        assert torch.equal(read.view(torch.uint8), state["w"].view(torch.uint8))


def test_a_checkpoint_of_ours_keeps_its_tree_and_values_in_our_format(tmp_path: Path) -> None:
    state = {"model": {"layers": [torch.ones(2), torch.zeros(3)]}, "epoch": 3, "name": "run"}
    state["tied"] = state["model"]["layers"][0]  # type: ignore[index]  # a dict
    checkpoint.save(state, tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b", to="shardwright", cast="bfloat16")
    found = checkpoint.read(tmp_path / "b")
    assert found["epoch"] == 3
    assert found["name"] == "run"
    assert found["tied"] is found["model"]["layers"][0]
    assert torch.equal(found["model"]["layers"][0], torch.ones(2, dtype=torch.bfloat16))
    assert checkpoint.verify(tmp_path / "b")


def test_large_tensors_go_through_windows_of_bounded_size(tmp_path: Path) -> None:
    torch.manual_seed(0)
    state = {"a": torch.randn(1500, 1301), "b": torch.randn(3_000_001).half(), "c": torch.randn(1301, 1500)}
    checkpoint.save(state, tmp_path / "ours")
    rules = sw.Mapping("a = a : x y = y x\nb = b\nc = c.p, c.q : (u + v) z = u z, v z", u=700)
    seen: list[int] = []
    with checkpoint.open(tmp_path / "ours", mapping=rules) as opened:
        source = ConversionSource(opened, None, None, 4 << 20)
        for tensor in source.tensors:
            seen += [window.nbytes for window in source.windows(tensor)]
    assert max(seen) <= 1 << 20
    expected = {"a": state["a"].t().contiguous(), "b": state["b"], "c.p": state["c"][:700], "c.q": state["c"][700:]}
    for to in ("hf", "dcp", "torch", "shardwright"):
        convert(tmp_path / "ours", tmp_path / to, to=to, mapping=rules, memory=4 << 20)  # type: ignore[arg-type]  # of the three
    assert_same(load_file(tmp_path / "hf/model.safetensors"), expected)
    assert_same(torch.load(tmp_path / "torch"), expected)
    assert_same(checkpoint.read(tmp_path / "shardwright"), expected)


def test_files_are_split_by_size_and_listed_in_the_index(tmp_path: Path) -> None:
    state = {f"layers.{number}.w": torch.randn(100, 10) for number in range(5)} | {"big": torch.randn(5000)}
    checkpoint.save(state, tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "hf", to="hf", max_shard_size="10KB")
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 5 * 4000 + 20000
    assert index["weight_map"].keys() == state.keys()
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-0000{number}-of-00004.safetensors" for number in range(1, 5)]
    assert sorted(os.listdir(tmp_path / "hf")) == [*files, "model.safetensors.index.json"]
    found = {name: load_file(tmp_path / "hf" / file)[name] for name, file in index["weight_map"].items()}
    assert_same(found, state)


def test_only_and_cast_choose_by_the_new_names(tmp_path: Path) -> None:
    checkpoint.save(state_of_many_dtypes(), tmp_path / "ours")
    convert(
        tmp_path / "ours",
        tmp_path / "hf",
        to="hf",
        mapping=sw.Mapping("w = new.w\n* = *"),
        only=["new.*", "count", "half"],
        cast={"new.*": torch.bfloat16, "*": "float64"},
    )
    found = load_file(tmp_path / "hf/model.safetensors")
    state = state_of_many_dtypes()
    assert_same(found, {"new.w": state["w"].bfloat16(), "count": state["count"], "half": state["half"].double()})


def test_a_result_that_would_differ_from_the_folder_to_be_like_is_refused(tmp_path: Path) -> None:
    checkpoint.save({"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(1)}, tmp_path / "ours")
    (tmp_path / "like").mkdir()
    checkpoint.save({"a": torch.ones(2).half(), "b": torch.ones(4), "d": torch.ones(1)}, tmp_path / "like")
    with pytest.raises(LoadMismatchError) as raised:
        convert(tmp_path / "ours", tmp_path / "hf", to="hf", like=tmp_path / "like")
    message = str(raised.value)
    assert "in 4 places; nothing was written" in message
    assert "'a' would be torch.float32, but is torch.float16" in message
    assert "'b' has the shape [3], but [4]" in message
    assert "'c' is not in" in message
    assert "'d' is in" in message
    with pytest.raises(StorageError, match=r"like: .* is not a folder"):
        convert(tmp_path / "ours", tmp_path / "hf", to="hf", like=tmp_path / "nowhere")
    assert sorted(os.listdir(tmp_path)) == ["like", "ours"]


def test_a_folder_to_be_like_may_have_a_configuration_only(tmp_path: Path) -> None:
    checkpoint.save({"a": torch.ones(2)}, tmp_path / "ours")
    (tmp_path / "like").mkdir()
    (tmp_path / "like/config.json").write_text("{}")
    convert(tmp_path / "ours", tmp_path / "hf", to="hf", like=tmp_path / "like")
    assert sorted(os.listdir(tmp_path / "hf")) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("to", ["hf", "dcp", "torch", "shardwright"])
def test_an_output_that_exists_is_refused_and_left_as_it_is(to: Any, tmp_path: Path) -> None:
    checkpoint.save({"a": torch.ones(2)}, tmp_path / "ours")
    (tmp_path / "there").write_text("mine")
    with pytest.raises(StorageError, match=r"there exists; nothing was written"):
        convert(tmp_path / "ours", tmp_path / "there", to=to)
    assert (tmp_path / "there").read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["ours", "there"]


@pytest.mark.parametrize("to", ["hf", "dcp", "torch", "shardwright"])
def test_a_conversion_that_fails_leaves_nothing(to: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save({"a": torch.ones(2), "b": torch.ones(3)}, tmp_path / "ours")
    original, count = ConversionSource.windows, [0]

    def failing(self: ConversionSource, tensor: Any) -> Any:
        count[0] += 1
        if count[0] == 2:
            raise OSError(28, "No space left on device")
        return original(self, tensor)

    monkeypatch.setattr(ConversionSource, "windows", failing)
    with pytest.raises(sw.errors.ShardwrightError, match="No space left"):
        convert(tmp_path / "ours", tmp_path / "new", to=to)
    assert os.listdir(tmp_path) == ["ours"]


KILLED = """
import os, signal, sys
from shardwright.interop import convert
from shardwright.interop.conversion.source import ConversionSource
windows, count = ConversionSource.windows, [0]
def killing(self, tensor):
    count[0] += 1
    if count[0] == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return windows(self, tensor)
ConversionSource.windows = killing
convert(sys.argv[1], sys.argv[2], to="hf")
"""


def test_a_conversion_that_is_killed_leaves_nothing_under_its_name(tmp_path: Path) -> None:
    state = {"a": torch.ones(2), "b": torch.ones(3)}
    checkpoint.save(state, tmp_path / "ours")
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path / "ours", tmp_path / "hf"], check=False, timeout=120)
    assert done.returncode == -signal.SIGKILL
    left = sorted(set(os.listdir(tmp_path)) - {"ours"})
    assert len(left) == 1
    assert left[0].startswith(".hf.")
    convert(tmp_path / "ours", tmp_path / "hf", to="hf")
    assert_same(load_file(tmp_path / "hf/model.safetensors"), state)


def test_a_corrupted_source_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    checkpoint.save({"a": torch.ones(1000)}, tmp_path / "ours")
    [file] = (tmp_path / "ours").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    with pytest.raises(sw.errors.CorruptionError):
        convert(tmp_path / "ours", tmp_path / "new", to="hf")
    assert os.listdir(tmp_path) == ["ours"]


def test_wrong_arguments_are_typed_errors(tmp_path: Path) -> None:
    checkpoint.save({"a": torch.ones(2), "n": torch.arange(2)}, tmp_path / "ours")
    ours, new = tmp_path / "ours", tmp_path / "new"
    with pytest.raises(ArgumentTypeError, match="to must be one of 'hf', 'dcp', 'torch', 'shardwright'"):
        convert(ours, new, to="onnx")  # type: ignore[arg-type]  # the mistake
    with pytest.raises(ArgumentTypeError, match=r"mapping must be a shardwright\.Mapping"):
        convert(ours, new, to="hf", mapping="a = b")  # type: ignore[arg-type]  # the mistake
    with pytest.raises(ArgumentTypeError, match="max_shard_size must be"):
        convert(ours, new, to="hf", max_shard_size="many")
    with pytest.raises(ArgumentTypeError, match="cast must be a floating-point dtype"):
        convert(ours, new, to="hf", cast=torch.int8)
    with pytest.raises(ArgumentTypeError, match="cast must be a dtype"):
        convert(ours, new, to="hf", cast="float31")
    with pytest.raises(StorageError, match="the scheme s3:// is not supported"):
        convert(ours, "s3://bucket/new", to="hf")
    with pytest.raises(CheckpointError, match="memory must be at least"):
        convert(ours, new, to="hf", memory=1)
    with pytest.raises(CheckpointError, match="there is nothing to convert, only='x'"):
        convert(ours, new, to="hf", only="x")
    with pytest.raises(MappingError, match="no rule matches 'n'"):
        convert(ours, new, to="hf", mapping=sw.Mapping("a = b"))
    with pytest.raises(MappingError, match="it joins 'a' of float32 and 'n' of int64"):
        convert(ours, new, to="hf", mapping=sw.Mapping("a, n = b : d, d = (d + d)"))
    with pytest.raises(sw.errors.NotACheckpointError):
        convert(tmp_path / "nowhere", new, to="hf")
    assert os.listdir(tmp_path) == ["ours"]


def _convert_on_ranks(folder: str) -> None:
    sw.interop.convert(f"{folder}/ours", f"{folder}/hf", to="hf", max_shard_size=5000)
    sw.interop.convert(f"{folder}/ours", f"{folder}/w.pt", to="torch")
    with pytest.raises(StorageError, match="exists"):
        sw.interop.convert(f"{folder}/ours", f"{folder}/hf", to="hf")


def test_ranks_share_the_files_of_a_conversion(tmp_path: Path) -> None:
    state = {f"layers.{number}.w": torch.randn(100, 10) for number in range(5)}
    checkpoint.save(state, tmp_path / "ours")
    run_ranks(2, _convert_on_ranks, str(tmp_path))
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 5
    found = {name: load_file(tmp_path / "hf" / file)[name] for name, file in index["weight_map"].items()}
    assert_same(found, state)
    assert_same(torch.load(tmp_path / "w.pt"), state)
    assert sorted(os.listdir(tmp_path)) == ["hf", "ours", "w.pt"]


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    state = {"a": torch.ones(1 << 20)}
    checkpoint.save(state, tmp_path / "ours")
    for to in ("hf", "dcp", "torch", "shardwright"):
        seen: list[tuple[int, int]] = []
        convert(tmp_path / "ours", tmp_path / to, to=to, progress=lambda done, total: seen.append((done, total)))  # type: ignore[arg-type]  # noqa: B023  called at once
        assert seen[-1] == (4 << 20, 4 << 20)


def test_a_file_of_safetensors_written_here_is_what_safetensors_writes(tmp_path: Path) -> None:
    state = {"b": torch.randn(4), "a": torch.randn(3).half(), "c": torch.arange(2)}
    checkpoint.save(state, tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "hf", to="hf")
    save_file(state, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    ours = (tmp_path / "hf/model.safetensors").read_bytes()
    assert ours == (tmp_path / "theirs.safetensors").read_bytes()
