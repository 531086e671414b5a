"""Files that `torch.save` wrote: read without executing them, by byte ranges, with every checksum."""

from __future__ import annotations

import argparse
import collections
import io
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright import checkpoint
from shardwright.errors import CheckpointError, CorruptionError, FormatError, PickleError
from shardwright.storage import LocalStorage
from shardwright.testing import run_ranks
from tests.checkpoint.calls import CountingReads

FULL = os.environ.get("SHARDWRIGHT_BUDGET") == "full"
DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.bool, torch.complex64, torch.complex128),
]


def saved(tmp_path: Path, value: Any, name: str = "file.pt") -> Path:
    torch.save(value, tmp_path / name)
    return tmp_path / name


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and left.equal(right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_read_as_torch_reads_it(dtype: torch.dtype, tmp_path: Path) -> None:
    value = (torch.arange(24) % 2 if dtype is torch.bool else torch.arange(24)).to(dtype).reshape(4, 6)
    path = saved(tmp_path, {"x": value, "p": nn.Parameter(value, requires_grad=False)})
    loaded = torch.load(path)
    state = checkpoint.read(path)
    for name in ("x", "p"):
        assert state[name].dtype is loaded[name].dtype
        assert state[name].view(torch.uint8).equal(loaded[name].view(torch.uint8))


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.t(),
    "columns": lambda x: x[:, 3:9],
    "every third": lambda x: x[1::3, ::2],
    "expanded": lambda x: x[0].expand(5, -1),
    "a row": lambda x: x[3],
    "an element": lambda x: x[2, 2],
    "nothing": lambda x: x[5:5],
    "channels last": lambda x: x[:12, :18].reshape(2, 6, 6, 3).to(memory_format=torch.channels_last),
    "unsqueezed": lambda x: x[:, None, :],
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_are_read_with_their_strides(view: str, tmp_path: Path) -> None:
    base = torch.randn(30, 20)
    value = VIEWS[view](base)
    path = saved(tmp_path, {"view": value, "base": base})
    assert same(checkpoint.read(path), {"view": value, "base": base})
    assert checkpoint.verify(path)
    if value.dim() > 1:
        with checkpoint.open(path) as opened:
            assert torch.equal(opened["view"][:, -1:], value[:, -1:])


def test_a_tensor_that_repeats_one_byte_a_trillion_times_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, {"x": torch.ones(1).expand(1 << 40)})
    with pytest.raises(FormatError, match="repeats its 4 bytes too often"):
        checkpoint.read(path)


@pytest.mark.parametrize("dtype", [torch.complex128, torch.float8_e4m3fn, torch.bool], ids=str)
def test_strided_tensors_of_any_itemsize_are_read_in_parts(dtype: torch.dtype, tmp_path: Path) -> None:
    value = (torch.arange(600).reshape(20, 30) % 2).to(dtype).t()
    path = saved(tmp_path, {"x": value})

    def load(path: str) -> torch.Tensor:
        mesh = sw.init_device_mesh("cpu", (2,))
        target = sw.distribute_tensor(torch.zeros(30, 20, dtype=dtype), mesh, [sw.Shard(1)])
        checkpoint.load({"x": target}, path)
        return target.full_tensor().view(torch.uint8)

    assert run_ranks(2, load, str(path))[0].equal(value.contiguous().view(torch.uint8))


def test_tied_tensors_are_one(tmp_path: Path) -> None:
    weight = torch.randn(3, 4)
    path = saved(tmp_path, {"embed": weight, "head": weight, "other": weight.clone()})
    with checkpoint.open(path) as opened:
        assert len(set(opened.metadata.state_dict_metadata)) == 3
        assert len(opened._manifest.tensors) == 2
    model = nn.ParameterDict({"embed": nn.Parameter(torch.zeros(3, 4)), "other": nn.Parameter(torch.zeros(3, 4))})
    model["head"] = model["embed"]
    checkpoint.load(model, path)
    assert torch.equal(model["head"], weight)


def test_plain_values_and_common_containers_are_read(tmp_path: Path) -> None:
    state = {
        "epoch": 3,
        "lr": [0.5, None, True, "text", b"bytes", 1 << 70, 2 + 3j],
        "nested": ({"a": (1, 2)}, [[]]),
        "counter": collections.Counter("abca"),
        "default": collections.defaultdict(list, {"x": [1]}),
        "dtype": torch.float16,
        "device": torch.device("cuda", 1),
        "size": torch.Size([2, 3]),
        "numpy": np.float64(2.5),
        5: "a key that is a number",
    }
    path = saved(tmp_path, state | {"args": argparse.Namespace(layers=2)})
    expected = state | {"args": {"layers": 2}, "size": (2, 3)}
    assert same(checkpoint.read(path), expected)


def test_what_cannot_be_a_value_is_opaque_and_the_tensors_are_read(tmp_path: Path) -> None:
    path = saved(tmp_path, {"w": torch.ones(2), "set": {1, 2}, "array": np.arange(3), "keys": {(1, 2): 3}})
    state = checkpoint.read(path)
    assert torch.equal(state["w"], torch.ones(2))
    assert {type(state[name]) for name in ("set", "array", "keys")} == {checkpoint.Opaque}


def test_a_state_dict_is_loaded_into_a_sharded_model(tmp_path: Path) -> None:
    source = nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5))
    path = saved(tmp_path, source.state_dict())
    mesh = sw.init_device_mesh("cpu", (1,))
    model = sw.distribute_module(nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5)), mesh)
    checkpoint.load(model, path)
    for name, value in source.state_dict().items():
        assert torch.equal(model.state_dict()[name].full_tensor(), value)


def test_a_slice_of_a_large_tensor_reads_its_bytes_only(tmp_path: Path) -> None:
    value = torch.randn(2000, 1000)
    path = saved(tmp_path, {"x": value})
    calls = CountingReads()
    with checkpoint.open(LocalStorage(path, calls)) as opened:
        calls.read = 0
        assert torch.equal(opened["x"][700:703], value[700:703])
    assert calls.read == 12_000


def test_two_tensors_with_one_dotted_name_are_both_read(tmp_path: Path) -> None:
    state = {"a.b": torch.ones(1), "a": {"b": torch.zeros(2)}}
    assert same(checkpoint.read(saved(tmp_path, state)), state)


def test_a_single_tensor_is_a_checkpoint_too(tmp_path: Path) -> None:
    value = torch.randn(3)
    assert torch.equal(checkpoint.read(saved(tmp_path, value)), value)


def test_a_folder_with_one_file_is_read(tmp_path: Path) -> None:
    saved(tmp_path, {"x": torch.ones(1)}, "pytorch_model.bin")
    assert checkpoint.read(tmp_path)["x"] == 1
    with checkpoint.open(tmp_path) as opened:
        assert opened.format == "torch"


def test_a_file_that_would_execute_code_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Hostile:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return os.system, ("touch executed",)

    path = saved(tmp_path, {"x": torch.ones(1), "evil": Hostile()})
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PickleError, match=r"'posix.system'"):
        checkpoint.read(path)
    assert not checkpoint.verify(path)
    assert os.listdir(tmp_path) == ["file.pt"]


def edited(path: Path, change: Callable[[str, bytes], bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    """Write the archive again with other contents of its records."""
    with zipfile.ZipFile(path) as source:
        records = {name: source.read(name) for name in source.namelist()}
    with zipfile.ZipFile(path, "w", compression) as target:
        for name, data in records.items():
            target.writestr(name, change(name, data))
    return path


def binary(value: int) -> bytes:
    return b"K" + bytes([value])


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "a compressed record": (lambda p: edited(p, lambda n, d: d, zipfile.ZIP_DEFLATED), "compressed"),
    "a stride that leaves the storage": (
        lambda p: edited(p, lambda n, d: d.replace(binary(5) + b"K\x01\x86", binary(6) + b"K\x01\x86")),
        "leaves its storage",
    ),
    "a size that leaves the storage": (
        lambda p: edited(p, lambda n, d: d.replace(binary(4) + b"K\x05\x86", binary(5) + b"K\x05\x86")),
        "leaves its storage",
    ),
    "a record of another size": (
        lambda p: edited(p, lambda n, d: d[:-4] if n.endswith("data/0") else d),
        "76 bytes, but its storage 80",
    ),
    "another byte order": (
        lambda p: edited(p, lambda n, d: b"big" if n.endswith("byteorder") else d),
        "only little-endian",
    ),
    "a truncated file": (lambda p: p.write_bytes(p.read_bytes()[:-50]), "truncated"),
    "half a file": (lambda p: p.write_bytes(p.read_bytes()[: p.stat().st_size // 2]), "truncated"),
    "a file of four bytes": (lambda p: p.write_bytes(b"PK\x03\x04"), "truncated"),
    "no pickle": (lambda p: zipfile.ZipFile(p, "w").writestr("a/b", b"c"), "data.pkl"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_malformed_file_is_refused_with_the_reason(case: str, tmp_path: Path) -> None:
    path = saved(tmp_path, {"x": torch.arange(20.0).reshape(4, 5)})
    change, reason = BAD[case]
    change(path)
    with pytest.raises(CheckpointError, match=reason):
        checkpoint.read(path)
    assert not checkpoint.verify(path)


def test_the_form_before_pytorch_1_6_is_refused_with_the_remedy(tmp_path: Path) -> None:
    torch.save({"x": torch.ones(1)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(FormatError, match=r"rewrite it with torch\.save"):
        checkpoint.read(tmp_path / "old.pt")


def test_a_file_of_anything_else_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello, this is not a checkpoint")
    with pytest.raises(CheckpointError, match="nor a safetensors file"):
        checkpoint.open(tmp_path / "notes.txt")


def test_a_directory_that_lies_about_its_size_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, {"x": torch.ones(4)})
    data = bytearray(path.read_bytes())
    struct.pack_into("<Q", data, len(data) - 22 - 20 - 56 + 40, 1 << 40)
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"not possible|outside|damaged"):
        checkpoint.read(path)


def test_every_flipped_bit_of_a_tensor_is_found_by_verify_and_by_load(tmp_path: Path) -> None:
    """PyTorch stores a CRC-32 for each record and never checks it: count what it loads in silence beside us."""
    generator = torch.Generator().manual_seed(1)
    state = {f"w{n}": torch.randn(50, 40, generator=generator) for n in range(5)}
    path = saved(tmp_path, state)
    original = path.read_bytes()
    with checkpoint.open(path) as opened:
        ranges = {name: opened[name].stored_ranges()[0] for name in state}
    flips = 200 if FULL else 30
    found = loads = silent = 0
    for flip in range(flips):
        name = f"w{flip % 5}"
        at = ranges[name].first + int(torch.randint(8000, (1,), generator=generator))
        data = bytearray(original)
        data[at] ^= 1 << flip % 8
        path.write_bytes(data)
        report = checkpoint.verify(path)
        found += [corruption.tensor for corruption in report.corruptions] == [name]
        try:
            checkpoint.load({name: torch.zeros(50, 40) for name in state}, path)
        except CorruptionError as error:
            loads += repr(name) in str(error)
        silent += len(torch.load(io.BytesIO(bytes(data)))) == 5
    assert (found, loads) == (flips, flips)
    assert silent == flips
