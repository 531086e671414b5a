"""Distributed checkpoints that PyTorch wrote on ranks are opened, loaded under any layout, and verified."""

from __future__ import annotations

import argparse
import io
import os
import pickle
import shutil
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import tensor as theirs
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec as TheirChunks
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardwright as sw
from shardwright import checkpoint, comm, sharded
from shardwright.errors import CheckpointError, CorruptionError, FormatError, PickleError, RankFailedError
from shardwright.storage import LocalStorage
from shardwright.testing import run_ranks
from tests.checkpoint.calls import CountingReads

FULL = os.environ.get("SHARDWRIGHT_BUDGET") == "full"
TENSORS = {
    "rows": (torch.float32, (1037, 300)),
    "columns": (torch.bfloat16, (311, 2050)),
    "grid": (torch.bfloat16, (513, 1026)),
    "replica": (torch.float64, (301, 77)),
    "plain": (torch.int16, (70001,)),
    "last": (torch.float16, (640, 3, 8, 8)),  # channels last: not in row-major order
    "pieces": (torch.int32, (1001, 130)),
    "truths": (torch.bool, (50021,)),
    "scalar": (torch.float32, ()),
    "empty": (torch.float32, (0, 4)),
}


def values() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {
        name: torch.randint(-1000, 1000, shape, generator=generator).to(dtype)
        for name, (dtype, shape) in TENSORS.items()
    }


def model_and_optimizer(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 5))
    return model, torch.optim.AdamW(model.parameters(), lr=0.125, betas=(0.5, 0.75))


def write(path: str) -> Any:
    """Save with PyTorch on four ranks: a mesh of two dimensions, uneven shards, a trained model with its optimizer."""
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = values()
    placements: dict[str, Any] = {
        "rows": [theirs.Shard(0), theirs.Replicate()],
        "columns": [theirs.Replicate(), theirs.Shard(1)],
        "grid": [theirs.Shard(0), theirs.Shard(1)],
        "replica": [theirs.Replicate(), theirs.Replicate()],
        "last": [theirs.Shard(0), theirs.Replicate()],
        "truths": [theirs.Shard(0), theirs.Shard(0)],
    }
    state: dict[str, Any] = dict(whole)
    for name, how in placements.items():
        value = whole[name].to(memory_format=torch.channels_last) if name == "last" else whole[name]
        state[name] = theirs.distribute_tensor(value, mesh, how)
        if name == "last":
            local = state[name].to_local().contiguous(memory_format=torch.channels_last)
            state[name] = theirs.DTensor.from_local(
                local, mesh, how, run_check=False, shape=whole[name].shape, stride=value.stride()
            )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        spec = TheirChunks(0, [f"rank:{rank}/cpu" for rank in range(4)])
        pieces = sharded_tensor.empty(spec, *whole["pieces"].shape, dtype=torch.int32)
        for shard in pieces.local_shards():
            first, count = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
            shard.tensor.copy_(whole["pieces"][first : first + count])
        state["pieces"] = pieces
        model, _ = model_and_optimizer(1)
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        for layer in (model[0], model[2], model):  # type: ignore[index]  # a Sequential
            fully_shard(layer, mesh=mesh["dp"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.125, betas=(0.5, 0.75))
        for step in range(2):
            model(torch.ones(3, 6) * (step + 1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        trained, optimized = get_state_dict(model, optimizer)
        dcp.save(
            {
                "data": state,
                "model": trained,
                "optim": optimized,
                "epoch": 3,
                "notes": {"tags": ["a", 1.5], "none": None},
            },
            checkpoint_id=path,
        )

    def full(value: Any) -> Any:
        if isinstance(value, theirs.DTensor):
            return value.full_tensor()
        if isinstance(value, dict):
            return {key: full(item) for key, item in value.items()}
        return [full(item) for item in value] if isinstance(value, list) else value

    return {"data": whole, "model": full(trained), "optim": full(optimized), "epoch": 3}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("dcp") / "step"
    return path, run_ranks(4, write, str(path))[0]


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def test_a_checkpoint_is_read_as_it_was_saved_without_a_process_group(written: tuple[Path, Any]) -> None:
    path, expected = written
    state = checkpoint.read(path)
    assert state.pop("notes") == {"tags": ["a", 1.5], "none": None}
    assert same(state, expected)
    with checkpoint.open(path) as opened:
        assert opened.format == "dcp"
        assert set(opened["data.grid"].shape) == {513, 1026}
        assert torch.equal(opened["data.grid"][100:300, 7:9], expected["data"]["grid"][100:300, 7:9])
        assert torch.equal(opened["data.last"][3:9, 1], expected["data"]["last"][3:9, 1])
        assert opened.value("epoch") == 3
        assert len(opened.metadata.state_dict_metadata["data.grid"].chunks) == 4  # type: ignore[union-attr]  # a tensor


OURS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "rows": lambda mesh, empty: sw.distribute_tensor(empty, mesh, [sw.Shard(1)]),
    "columns": lambda mesh, empty: sw.distribute_tensor(empty, mesh, [sw.Shard(0)]),
    "grid": lambda mesh, empty: sw.distribute_tensor(empty, mesh, [sw.Shard(0)]),
    "replica": lambda mesh, empty: sw.distribute_tensor(empty, mesh, [sw.Shard(0)]),
    "plain": lambda mesh, empty: sw.distribute_tensor(empty, mesh, [sw.Shard(0)]),
    "pieces": lambda mesh, empty: sharded.zeros(
        sharded.ChunkShardingSpec(1, [f"rank:{rank}/cpu" for rank in range(comm.world().size)]),
        *empty.shape,
        dtype=empty.dtype,
    ),
    "truths": lambda mesh, empty: theirs.distribute_tensor(
        empty, torch.distributed.device_mesh.init_device_mesh("cpu", (comm.world().size,)), [theirs.Shard(0)]
    ),
    "scalar": lambda mesh, empty: empty,
    "empty": lambda mesh, empty: empty,
}


def load_other_layouts(path: str, whole: dict[str, torch.Tensor]) -> tuple[int, int]:
    """Load under other layouts, compare, and return how many bytes this rank read and holds."""
    mesh = sw.init_device_mesh("cpu", (comm.world().size,))
    state = {name: make(mesh, torch.zeros_like(whole[name])) for name, make in OURS.items()}
    calls = CountingReads()
    checkpoint.load({"data": state}, LocalStorage(path, calls), strict=False)
    wanted = 0
    for name, value in state.items():
        if isinstance(value, sharded.ShardedTensor):
            full = value.gather()
            wanted += sum(shard.tensor.nbytes for shard in value.local_shards())
            if comm.rank() == 0:
                assert torch.equal(full, whole[name]), name
            continue
        full = value.full_tensor() if hasattr(value, "full_tensor") else value
        wanted += value.to_local().nbytes if hasattr(value, "to_local") else value.nbytes
        assert torch.equal(full, whole[name]), name
    return calls.read, wanted


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_other_layouts_on_other_ranks_get_every_bit_and_read_their_own_bytes(
    ranks: int, written: tuple[Path, Any]
) -> None:
    path, expected = written
    counts = run_ranks(ranks, load_other_layouts, str(path), expected["data"])
    metadata = ranks * (path / ".metadata").stat().st_size
    values_and_directories = ranks * 60 * 2048  # of the entries that are not loaded: names, options, the optimizer
    read, wanted = (sum(column) for column in zip(*counts, strict=True))
    assert read - metadata - values_and_directories <= 1.05 * wanted, (read, wanted, metadata)


def test_a_model_and_its_optimizer_are_loaded_into_state_dicts_of_pytorch(written: tuple[Path, Any]) -> None:
    path, expected = written
    model, optimizer = model_and_optimizer(2)
    model(torch.ones(3, 6)).sum().backward()
    optimizer.step()
    state, optimized = get_state_dict(model, optimizer)
    loaded = checkpoint.load({"model": state, "optim": optimized}, path, strict=False)
    assert same(loaded["model"], expected["model"])
    assert same(loaded["optim"]["state"], expected["optim"]["state"])
    assert loaded["optim"]["param_groups"][0]["lr"] == 0.125


@pytest.mark.parametrize("is_flat", [False, True])
def test_an_optimizer_is_loaded_by_the_names_of_its_parameters(is_flat: bool, tmp_path: Path) -> None:
    source, optimizer = model_and_optimizer(1)
    source(torch.ones(3, 6)).square().mean().backward()
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained, optimized = get_state_dict(source, optimizer, options=options)
        dcp.save({"model": trained, "optim": optimized}, checkpoint_id=str(tmp_path / "step"))
    model, _ = model_and_optimizer(2)
    fresh = torch.optim.AdamW(reversed(list(model.parameters())), lr=9.0)  # without state, in another order
    checkpoint.load({"model": model, "optim": checkpoint.optimizer_state(model, fresh)}, tmp_path / "step")
    assert fresh.param_groups[0]["lr"] == 0.125
    assert fresh.param_groups[0]["betas"] == (0.5, 0.75)
    for (name, parameter), other in zip(model.named_parameters(), source.parameters(), strict=True):
        assert torch.equal(parameter, other), name
        assert torch.equal(fresh.state[parameter]["exp_avg_sq"], optimizer.state[other]["exp_avg_sq"]), name
        assert fresh.state[parameter]["step"] == 1


def test_a_model_is_loaded_as_an_object(written: tuple[Path, Any]) -> None:
    path, expected = written
    model, _ = model_and_optimizer(2)
    checkpoint.load({"model": model}, path, strict=False)
    assert same(dict(model.state_dict()), expected["model"])


def test_an_intact_checkpoint_verifies(written: tuple[Path, Any]) -> None:
    report = checkpoint.verify(written[0])
    assert report, report
    assert report.unchecked == 0
    assert report.nbytes > sum(tensor.nbytes for tensor in written[1]["data"].values())


def test_every_rank_may_have_written_its_own_metadata(tmp_path: Path) -> None:
    def save(path: str) -> None:
        rank = comm.rank()
        state = {"mine": {str(rank): torch.full((3,), rank)}, "all": torch.ones(2)}
        dcp.save(state, checkpoint_id=path, use_collectives=False)

    run_ranks(2, save, str(tmp_path / "step"))
    assert sorted(path.name for path in (tmp_path / "step").glob("*.metadata")) == ["__0.metadata", "__1.metadata"]
    state = checkpoint.read(tmp_path / "step")
    assert same(state["mine"], {"0": torch.zeros(3, dtype=torch.int64), "1": torch.ones(3, dtype=torch.int64)})


def test_the_safetensors_mode_is_read_where_pytorch_cannot(tmp_path: Path) -> None:
    state = {"model": {"w": torch.arange(12.0).reshape(3, 4), "b": torch.ones(3, dtype=torch.bfloat16)}, "step": 3}
    writer = FileSystemWriter(str(tmp_path / "step"), serialization_format=SerializationFormat.SAFETENSORS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=writer)
        empty = {"model": {"w": torch.zeros(3, 4), "b": torch.zeros(3, dtype=torch.bfloat16)}}
        with pytest.raises(CheckpointException):
            dcp.load(empty, checkpoint_id=str(tmp_path / "step"))
    assert same(checkpoint.read(tmp_path / "step"), state)
    assert checkpoint.verify(tmp_path / "step").unchecked == 12 * 4 + 3 * 2


def entry(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def old_properties() -> type:
    """The TensorProperties of before January 2024, with its state of six."""
    module = types.ModuleType("torch.distributed._shard.sharded_tensor.metadata")

    class TensorProperties:
        def __init__(self, dtype: torch.dtype) -> None:
            self.dtype = dtype

        def __getstate__(self) -> tuple[Any, ...]:
            return self.dtype, torch.strided, False, 0, False, None

    TensorProperties.__module__ = module.__name__
    TensorProperties.__qualname__ = "TensorProperties"
    module.TensorProperties = TensorProperties  # type: ignore[attr-defined]  # a module made here
    return TensorProperties


class StorageInfo:
    """Stands for torch's _StorageInfo, of which old versions have three fields."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


def by_hand(path: Path, edit: Callable[[Any, dict[str, bytes]], None] = lambda metadata, files: None) -> torch.Tensor:
    """Write a folder of the old kind: two chunks and a value, properties of another class, no version."""
    whole = torch.arange(20.0).reshape(4, 5)
    path.mkdir()
    pieces = [("w", (0, 0), whole[:3].clone()), ("w", (3, 0), whole[3:].clone()), ("n", None, {"a": 1})]
    data, stored = b"", {}
    for name, offset, value in pieces:
        raw = entry(value)
        info = StorageInfo(relative_path="__0_0.distcp", offset=len(data), length=len(raw))
        stored[MetadataIndex(name, offset)] = info
        data += raw
    chunks = [
        ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([3, 5])),
        ChunkStorageMetadata(torch.Size([3, 0]), torch.Size([1, 5])),
    ]
    metadata = Metadata(
        state_dict_metadata={
            "w": TensorStorageMetadata(old_properties()(torch.float32), torch.Size([4, 5]), chunks),
            "n": BytesStorageMetadata(),
        },
        storage_data=stored,
    )
    del metadata.__dict__["storage_meta"], metadata.__dict__["version"]
    files = {"__0_0.distcp": data}
    edit(metadata, files)
    from torch.distributed._shard.sharded_tensor import metadata as real

    saved = real.TensorProperties
    real.TensorProperties = type(metadata.state_dict_metadata["w"].properties)  # type: ignore[misc]  # for pickle
    try:
        raw = pickle.dumps(metadata, 4)
    finally:
        real.TensorProperties = saved  # type: ignore[misc]  # put back
    raw = raw.replace(
        b"\x8c" + bytes([len(__name__)]) + __name__.encode() + b"\x94\x8c\x0bStorageInfo",
        b"\x8c\x27torch.distributed.checkpoint.filesystem\x94\x8c\x0c_StorageInfo",
    )
    raw = raw[:2] + raw[11:] if raw[2] == 0x95 else raw  # the frame has another length now
    (path / ".metadata").write_bytes(raw)
    for name, contents in files.items():
        (path / name).write_bytes(contents)
    return whole


def test_a_folder_of_the_old_kind_is_read(tmp_path: Path) -> None:
    whole = by_hand(tmp_path / "old")
    assert same(checkpoint.read(tmp_path / "old"), {"w": whole, "n": {"a": 1}})
    loaded = checkpoint.load({"w": torch.zeros(4, 5), "n": {"a": 0}}, tmp_path / "old")
    assert same(loaded, {"w": whole, "n": {"a": 1}})


def test_a_folder_of_megatron_has_its_common_values(tmp_path: Path) -> None:
    whole = by_hand(tmp_path / "torch_dist")
    common = {"args": argparse.Namespace(num_layers=2), "iteration": 7, "n": "is stored apart", "rng": torch.ones(3)}
    torch.save(common, tmp_path / "torch_dist" / "common.pt")
    state = checkpoint.read(tmp_path / "torch_dist")
    assert same(state["w"], whole)
    assert state["args"] == {"num_layers": 2}
    assert (state["iteration"], state["n"]) == (7, {"a": 1})
    assert torch.equal(state["rng"], torch.ones(3))
    assert checkpoint.verify(tmp_path / "torch_dist")


def set_info(metadata: Any, **fields: Any) -> None:
    first = next(iter(metadata.storage_data.values()))
    first.__dict__.update(fields)


def immense(metadata: Any, files: Any) -> None:
    metadata.state_dict_metadata["w"].size = torch.Size([1 << 40, 5])
    metadata.state_dict_metadata["w"].chunks[0].sizes = torch.Size([(1 << 40) - 1, 5])
    metadata.state_dict_metadata["w"].chunks[1].offsets = torch.Size([(1 << 40) - 1, 0])
    _, second, *_ = metadata.storage_data.items()
    del metadata.storage_data[second[0]]
    metadata.storage_data[MetadataIndex("w", ((1 << 40) - 1, 0))] = second[1]


def drop_entry(metadata: Any, files: Any) -> None:
    del metadata.storage_data[MetadataIndex("w", (3, 0))]


def overlapping(metadata: Any, files: Any) -> None:
    metadata.state_dict_metadata["w"].chunks[0].sizes = torch.Size([4, 5])


def missing(metadata: Any, files: Any) -> None:
    metadata.state_dict_metadata["w"].chunks.pop()


def other_dtype(metadata: Any, files: Any) -> None:
    metadata.state_dict_metadata["w"].properties.dtype = torch.int32


def outside(metadata: Any, files: Any) -> None:
    metadata.state_dict_metadata["w"].chunks[1].offsets = torch.Size([4, 0])


def truncated(metadata: Any, files: Any) -> None:
    files["__0_0.distcp"] = files["__0_0.distcp"][:-700]


def no_file(metadata: Any, files: Any) -> None:
    files.clear()


BAD: dict[str, tuple[Callable[[Any, Any], None], str]] = {
    "a path": (lambda m, f: set_info(m, relative_path="../__0_0.distcp"), "is not the name of a file"),
    "an absolute path": (lambda m, f: set_info(m, relative_path="/etc/passwd"), "is not the name of a file"),
    "no name": (lambda m, f: set_info(m, relative_path=""), "is not the name of a file"),
    "a negative offset": (lambda m, f: set_info(m, offset=-1), "offset and length"),
    "an offset elsewhere": (lambda m, f: set_info(m, offset=17), "archive|damaged"),
    "an extension": (lambda m, f: set_info(m, transform_descriptors=["zstd"]), "zstd"),
    "an entry that is not stored": (drop_entry, "not stored in any file"),
    "chunks that overlap": (overlapping, "do not tile it: overlap"),
    "a chunk that is missing": (missing, "do not tile it: gap"),
    "a chunk outside": (outside, "do not tile it|not stored"),
    "a tensor larger than its entry": (immense, "needs 21990232555500 bytes, but its entry"),
    "another dtype": (other_dtype, "int32"),
    "a file that is truncated": (truncated, "truncated"),
    "a file that is missing": (no_file, "missing|does not exist"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_malformed_folder_is_refused_with_the_reason(case: str, tmp_path: Path) -> None:
    edit, reason = BAD[case]
    by_hand(tmp_path / "bad", edit)
    with pytest.raises((CheckpointError, OSError), match=reason):
        checkpoint.read(tmp_path / "bad")
    if case not in ("a file that is missing",):
        assert not checkpoint.verify(tmp_path / "bad")


def test_metadata_of_200_megabytes_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "huge"
    path.mkdir()
    with open(path / ".metadata", "wb") as file:
        file.write(b"\x80\x04")
        file.truncate(200_000_000)
    with pytest.raises(FormatError, match="200000000 bytes, and at most"):
        checkpoint.read(path)


def test_two_formats_in_one_folder_are_refused(tmp_path: Path) -> None:
    by_hand(tmp_path / "both")
    (tmp_path / "ours").mkdir()
    checkpoint.save({"w": torch.ones(2)}, tmp_path / "ours")
    for file in (tmp_path / "ours").iterdir():
        shutil.copy(file, tmp_path / "both" / file.name)
    with pytest.raises(FormatError, match=r"two formats: manifest.json and .metadata"):
        checkpoint.read(tmp_path / "both")


def test_nothing_is_saved_into_a_folder_of_another_format(tmp_path: Path) -> None:
    by_hand(tmp_path / "theirs")
    before = sorted(path.name for path in (tmp_path / "theirs").iterdir())
    with pytest.raises(CheckpointError, match=r"another format \(.metadata\)"):
        checkpoint.save({"w": torch.ones(1)}, tmp_path / "theirs")
    assert sorted(path.name for path in (tmp_path / "theirs").iterdir()) == before


def test_metadata_that_would_execute_code_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number, raw in enumerate(
        (
            b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x0etouch executed\x85R.",
            b"\x80\x02cposix\nsystem\nX\x0e\0\0\0touch executed\x85R.",
        )
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / ".metadata").write_bytes(raw)
        before = set(sys.modules)
        for use in (checkpoint.open, checkpoint.read, lambda path: checkpoint.load({}, path)):
            with pytest.raises(PickleError, match=r"'posix.system'"):
                use(folder)
        assert not checkpoint.verify(folder)
        assert set(sys.modules) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def test_every_flipped_bit_of_a_tensor_is_found_by_verify(tmp_path: Path) -> None:
    """Beside PyTorch, which loads each of them in silence."""
    generator = torch.Generator().manual_seed(1)
    state = {f"w{n}": torch.randn(50, 40, generator=generator) for n in range(5)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=str(tmp_path / "step"))
    with checkpoint.open(tmp_path / "step") as opened:
        ranges = {name: opened[name].stored_ranges()[0] for name in state}
    path = tmp_path / "step" / "__0_0.distcp"
    original = path.read_bytes()
    flips = 200 if FULL else 15
    found = silent = 0
    for flip in range(flips):
        name = f"w{flip % 5}"
        data = bytearray(original)
        data[ranges[name].first + int(torch.randint(8000, (1,), generator=generator))] ^= 1 << flip % 8
        path.write_bytes(data)
        report = checkpoint.verify(tmp_path / "step")
        found += [corruption.tensor for corruption in report.corruptions] == [name]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = {name: torch.zeros(50, 40) for name in state}
            dcp.load(loaded, checkpoint_id=str(tmp_path / "step"))
        silent += not all(torch.equal(loaded[each], state[each]) for each in state)
    assert (found, silent) == (flips, flips)


def test_a_value_that_would_execute_code_is_opaque(tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return eval, ("__import__('os').mkdir('executed')",)

    buffer = io.BytesIO()
    torch.save({"evil": Hostile()}, buffer)

    def edit(metadata: Any, files: dict[str, bytes]) -> None:
        info = metadata.storage_data[MetadataIndex("n")]
        files["__0_0.distcp"] = files["__0_0.distcp"][: info.offset] + buffer.getvalue()
        info.length = len(buffer.getvalue())

    whole = by_hand(tmp_path / "evil", edit)
    before = set(sys.modules)
    state = checkpoint.read(tmp_path / "evil")
    assert torch.equal(state["w"], whole)
    assert isinstance(state["n"], checkpoint.Opaque)
    assert "builtins.eval" in state["n"].reason or "__builtin__.eval" in state["n"].reason
    assert set(sys.modules) == before
    with pytest.raises(CheckpointError, match="was not read"):
        checkpoint.load({"w": torch.zeros(4, 5), "n": 0}, tmp_path / "evil")


def test_damage_that_several_ranks_read_in_parts_is_found_by_load(written: tuple[Path, Any], tmp_path: Path) -> None:
    shutil.copytree(written[0], tmp_path / "damaged")
    with checkpoint.open(tmp_path / "damaged") as opened:
        ((file, first, end), *_) = opened["data.grid"].stored_ranges()
    with open(tmp_path / "damaged" / file, "r+b") as stream:
        stream.seek((first + end) // 2)
        byte = stream.read(1)
        stream.seek(-1, 1)
        stream.write(bytes([byte[0] ^ 1]))
    report = checkpoint.verify(tmp_path / "damaged")
    assert [corruption.tensor for corruption in report.corruptions] == ["data.grid"]

    def load(path: str) -> str:
        mesh = sw.init_device_mesh("cpu", (3,))
        grid = sw.distribute_tensor(torch.zeros(513, 1026, dtype=torch.bfloat16), mesh, [sw.Shard(1)])
        try:
            checkpoint.load({"data": {"grid": grid}}, path, strict=False)
        except (CorruptionError, RankFailedError) as error:
            return str(error)
        return "nothing was found"

    for message in run_ranks(3, load, str(tmp_path / "damaged")):
        assert "does not match its CRC-32" in message
