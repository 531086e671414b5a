"""Hugging Face folders: one safetensors file or an index, every dtype of safetensors, nothing that is not listed."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch

import shardwright as sw
from shardwright import checkpoint, comm
from shardwright.errors import CheckpointError, FormatError, LoadMismatchError
from shardwright.interop.formats.safetensors_header import SAFETENSORS_DTYPES
from shardwright.storage import LocalStorage
from shardwright.testing import run_ranks
from tests.checkpoint.calls import CountingReads


def write(path: Path, header: dict[str, Any] | bytes, data: bytes = b"") -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)


def entry(dtype: str, shape: list[int], first: int, last: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and left.view(torch.uint8).equal(right.view(torch.uint8))
    )


@pytest.mark.parametrize("name", SAFETENSORS_DTYPES)
def test_every_dtype_is_read_as_safetensors_reads_it(name: str, tmp_path: Path) -> None:
    itemsize = SAFETENSORS_DTYPES[name].itemsize
    width = 6 if name == "F4" else 3
    nbytes = 2 * width // 2 if name == "F4" else 2 * width * itemsize
    data = bytes(n % 2 if name == "BOOL" else n * 37 % 256 for n in range(nbytes))
    write(tmp_path / "model.safetensors", {"x": entry(name, [2, width], 0, nbytes)}, data)
    expected = safetensors.torch.load_file(tmp_path / "model.safetensors")["x"]
    assert same(checkpoint.read(tmp_path)["x"], expected)
    with checkpoint.open(tmp_path / "model.safetensors") as opened:
        assert opened.format == "huggingface"
        assert same(opened["x"][1:], expected[1:])


def test_the_dtypes_are_all_that_safetensors_knows(tmp_path: Path) -> None:
    write(tmp_path / "x", {"x": entry("F7", [1], 0, 1)}, b"a")
    with pytest.raises(safetensors.SafetensorError) as caught:
        safetensors.deserialize((tmp_path / "x").read_bytes())
    known = set(re.findall(r"`(\w+)`", str(caught.value))) - {"F7"}
    without_torch = {"F6_E2M3", "F6_E3M2"}  # PyTorch has no dtype for these, and safetensors refuses them for it
    assert known - without_torch == set(SAFETENSORS_DTYPES)


def sharded_folder(path: Path) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    tensors = {
        f"layers.{layer}.{name}": torch.randn(shape, generator=generator).to(torch.bfloat16)
        for layer in range(3)
        for name, shape in (("up", (1001, 257)), ("down", (257, 1001)), ("norm", (257,)))
    }
    path.mkdir()
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    weight_map = {name: files[index % 2] for index, name in enumerate(tensors)}
    for file in files:
        listed = {name: tensors[name] for name in tensors if weight_map[name] == file}
        safetensors.torch.save_file(listed, path / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "config.json").write_text("{}")
    return tensors


def test_an_index_says_what_belongs_to_the_model(tmp_path: Path) -> None:
    tensors = sharded_folder(tmp_path / "model")
    safetensors.torch.save_file({"stray": torch.ones(1)}, tmp_path / "model" / "consolidated.safetensors")
    state = checkpoint.read(tmp_path / "model")
    assert state.keys() == tensors.keys()
    assert all(torch.equal(state[name], tensors[name]) for name in tensors)
    report = checkpoint.verify(tmp_path / "model")
    assert report
    assert report.unchecked == sum(tensor.nbytes for tensor in tensors.values())
    assert "no checksum" in str(report)


def test_ranks_load_their_shards_and_read_no_more(tmp_path: Path) -> None:
    tensors = sharded_folder(tmp_path / "model")

    def load(path: str, whole: dict[str, torch.Tensor]) -> tuple[int, int]:
        mesh = sw.init_device_mesh("cpu", (comm.world().size,))
        state = {
            name: sw.distribute_tensor(torch.zeros_like(value), mesh, [sw.Shard(1 if name.endswith("up") else 0)])
            for name, value in whole.items()
        }
        calls = CountingReads()
        checkpoint.load(state, LocalStorage(path, calls))
        assert all(torch.equal(state[name].full_tensor(), whole[name]) for name in whole)
        return calls.read, sum(value.to_local().nbytes for value in state.values())

    for ranks in (1, 3):
        counts = run_ranks(ranks, load, str(tmp_path / "model"), tensors)
        read, wanted = (sum(column) for column in zip(*counts, strict=True))
        assert read <= 1.05 * wanted


def test_a_slice_reads_its_bytes_only(tmp_path: Path) -> None:
    tensors = sharded_folder(tmp_path / "model")
    calls = CountingReads()
    with checkpoint.open(LocalStorage(tmp_path / "model", calls)) as opened:
        calls.read = 0
        assert torch.equal(opened["layers.0.up"][500:510], tensors["layers.0.up"][500:510])
        assert calls.read == 10 * 257 * 2


def test_what_transformers_saves_is_loaded(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=50
    )
    torch.manual_seed(1)
    saved, loaded = (transformers.LlamaForCausalLM(config) for _ in range(2))
    saved.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    checkpoint.load(loaded, tmp_path)
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in saved.state_dict().items())


def test_a_folder_whose_files_are_links_is_read(tmp_path: Path) -> None:
    tensors = sharded_folder(tmp_path / "blobs")
    (tmp_path / "snapshot").mkdir()
    for file in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(file)
    assert checkpoint.read(tmp_path / "snapshot").keys() == tensors.keys()


def test_a_name_or_a_shape_that_differs_is_reported_before_anything_changes(tmp_path: Path) -> None:
    tensors = sharded_folder(tmp_path / "model")
    state = {name: torch.zeros_like(value) for name, value in tensors.items()} | {"more": torch.zeros(1)}
    state["layers.0.up"] = torch.zeros(3)
    with pytest.raises(LoadMismatchError, match="more"):
        checkpoint.load(state, tmp_path / "model")
    assert not any(value.any() for value in state.values())


ONE = {"x": entry("F32", [1], 0, 4)}
MALFORMED: dict[str, tuple[Callable[[Path], None], str]] = {
    "odd F4": (lambda p: write(p, {"x": entry("F4", [3], 0, 1)}, b"a"), "odd"),
    "F4 without dimensions": (lambda p: write(p, {"x": entry("F4", [], 0, 1)}, b"a"), "odd"),
    "an unknown dtype": (
        lambda p: write(p, {"x": entry("F7", [8], 0, 7)}, b"1234567"),
        "dtype 'F7', which is not known",
    ),
    "a gap": (lambda p: write(p, {"x": entry("U8", [1], 1, 2)}, b"ab"), "gap"),
    "an overlap": (
        lambda p: write(p, {"x": entry("U8", [2], 0, 2), "y": entry("U8", [2], 1, 3)}, b"abc"),
        "overlaps",
    ),
    "more bytes than tensors": (lambda p: write(p, ONE, b"12345"), "longer"),
    "fewer bytes than tensors": (lambda p: write(p, ONE, b"123"), "truncated"),
    "a range of another size": (lambda p: write(p, {"x": entry("F32", [2], 0, 4)}, b"1234"), "needs 8 bytes"),
    "a negative size": (lambda p: write(p, {"x": entry("U8", [-1], 0, 0)}), "invalid shape"),
    "a size past 2^62": (lambda p: write(p, {"x": entry("U8", [1 << 63, 0], 0, 0)}), "invalid shape"),
    "a hundred dimensions": (lambda p: write(p, {"x": entry("U8", [1] * 100, 0, 1)}, b"a"), "invalid shape"),
    "a name twice": (lambda p: write(p, b'{"x":{},"x":{}}'), "'x' occurs twice"),
    "no object": (lambda p: write(p, b"[1, 2]"), "not a JSON object"),
    "no JSON": (lambda p: write(p, b"{{{{{{"), "cannot be read"),
    "nesting": (lambda p: write(p, b'{"x":' + b"[" * 100_000), "cannot be read"),
    "a header longer than the file": (lambda p: p.write_bytes(struct.pack("<Q", 1 << 40) + b"{}      "), "truncated"),
    "a file of four bytes": (lambda p: p.write_bytes(b"1234"), "4 bytes"),
    "metadata that is not text": (lambda p: write(p, {"__metadata__": {"a": 1}}), "__metadata__"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_file_is_refused_with_the_reason(case: str, tmp_path: Path) -> None:
    make, reason = MALFORMED[case]
    make(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=reason):
        checkpoint.read(tmp_path)
    assert not checkpoint.verify(tmp_path)


def edit_index(path: Path, **changes: Any) -> None:
    file = path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"].update(changes)
    file.write_text(json.dumps(index))


INDICES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a path": (lambda p: edit_index(p, x="../model.safetensors"), "not the name of a file"),
    "a file that is missing": (
        lambda p: edit_index(p, x="model-3.safetensors"),
        "'model-3.safetensors', which is missing",
    ),
    "a tensor that is missing": (lambda p: edit_index(p, x="model-00001-of-00002.safetensors"), "tensor 'x', which it"),
    "a tensor of another file": (
        lambda p: edit_index(p, **{"layers.0.up": "model-00002-of-00002.safetensors"}),
        "layers.0.up",
    ),
    "no map": (lambda p: (p / "model.safetensors.index.json").write_text("{}"), "no weight_map"),
    "no JSON": (lambda p: (p / "model.safetensors.index.json").write_text("{"), "cannot be read"),
    "a tensor twice": (
        lambda p: (p / "model.safetensors.index.json").write_text('{"weight_map": {"x": "a", "x": "b"}}'),
        "listed twice",
    ),
    "a file twice in the folder": (
        lambda p: (p / "other.safetensors.index.json").write_text('{"weight_map": {"x": "a"}}'),
        "two formats or of two models",
    ),
}


@pytest.mark.parametrize("case", INDICES)
def test_an_index_that_contradicts_its_files_is_refused(case: str, tmp_path: Path) -> None:
    sharded_folder(tmp_path / "model")
    change, reason = INDICES[case]
    change(tmp_path / "model")
    with pytest.raises(CheckpointError, match=reason):
        checkpoint.read(tmp_path / "model")


def test_several_files_without_an_index_are_not_guessed_at(tmp_path: Path) -> None:
    for name in ("a", "b"):
        safetensors.torch.save_file({"x": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(FormatError, match="no index"):
        checkpoint.read(tmp_path)
    assert checkpoint.read(tmp_path / "a.safetensors")["x"] == 1
