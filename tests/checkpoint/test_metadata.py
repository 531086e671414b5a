"""PyTorch's metadata classes as a lazy view of the manifest; DTensors work with torch.distributed.checkpoint."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as torchs
from torch.distributed.checkpoint.planner import WriteItemType as TorchsWriteItemType

import shardwright as sw
from shardwright import checkpoint, sharded
from shardwright.checkpoint.format.manifest import Manifest
from shardwright.checkpoint.format.tensor_table import TensorTable
from shardwright.errors import LayoutError, MissingNameError
from shardwright.layout import Layout, Mesh, Region, Shard
from shardwright.testing import run_ranks
from tests.peak_memory import peak_memory


def test_metadata_describes_the_stored_tensors(saved: Path, whole: dict[str, torch.Tensor]) -> None:
    with checkpoint.open(saved) as ckpt:
        metadata, save_id = ckpt.metadata, ckpt.save_id
    entries = metadata.state_dict_metadata
    for name, tensor in whole.items():
        entry = entries[name]
        assert isinstance(entry, checkpoint.TensorStorageMetadata)
        assert (entry.size, entry.properties.dtype) == (tensor.shape, tensor.dtype)
        regions = [Region(chunk.offsets, chunk.sizes) for chunk in entry.chunks]
        assert Region.whole(tensor.shape).covers(regions), name
    assert [chunk.offsets[0] for chunk in entries["rows"].chunks] == [0, 10, 20, 30]
    assert len(entries["big"].chunks) >= 4
    assert entries["epoch"] == checkpoint.BytesStorageMetadata()
    assert metadata.planner_data["nested.a.1.0"] == ("nested", "a", 1, 0)
    assert metadata.storage_meta == checkpoint.StorageMeta(str(saved), save_id)
    assert metadata.version == "1"
    with pytest.raises(MissingNameError):
        entries["nothing"]


def test_storage_data_locates_the_bytes_of_every_chunk(saved: Path, whole: dict[str, torch.Tensor]) -> None:
    """Every chunk's bytes are found there by hand."""
    with checkpoint.open(saved) as ckpt:
        metadata = ckpt.metadata
    for name in ("rows", "big", "pieces", "replica"):
        chunks = metadata.state_dict_metadata[name].chunks
        assert sum(chunk.region.volume for chunk in chunks) == whole[name].numel()
        for chunk in chunks:
            info = metadata.storage_data[checkpoint.MetadataIndex(name, chunk.offsets)]
            data = (saved / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
            assert data == whole[name][chunk.region.slices()].contiguous().numpy().tobytes()


def test_metadata_classes_have_pytorchs_names_and_fields() -> None:
    fields = {
        "MetadataIndex": ("fqn", "offset", "index"),
        "ChunkStorageMetadata": ("offsets", "sizes"),
        "TensorStorageMetadata": ("properties", "size", "chunks"),
        "StorageMeta": ("checkpoint_id", "save_id", "load_id", "modules"),
        "BytesStorageMetadata": (),
    }
    for name, expected in fields.items():
        assert tuple(getattr(checkpoint, name).__dataclass_fields__) == expected
        assert tuple(getattr(torchs, name).__dataclass_fields__) == expected
    for name in torchs.Metadata.__dataclass_fields__:
        assert hasattr(checkpoint.Metadata, name)
    assert checkpoint.TensorProperties is sharded.TensorProperties
    assert checkpoint.flatten_sharded_tensors is sharded.flatten_sharded_tensors


def test_metadata_index_equals_and_hashes_like_pytorchs() -> None:
    ours, theirs = checkpoint.MetadataIndex("w", (4, 0), 3), torchs.MetadataIndex("w", (4, 0))
    assert ours == theirs
    assert theirs == ours
    assert {ours: 1}[theirs] == 1
    assert {theirs: 1}[ours] == 1
    assert ours != checkpoint.MetadataIndex("w", (4, 1))
    assert ours != checkpoint.MetadataIndex("v", (4, 0))
    assert ours != ("w", (4, 0))
    assert pickle.loads(pickle.dumps(ours)) == ours
    assert checkpoint.WriteItemType.SHARD == TorchsWriteItemType.SHARD
    assert checkpoint.WriteItemType.SHARD != TorchsWriteItemType.TENSOR


def test_chunks_are_expanded_only_on_access() -> None:
    """10,000 tensors on 4,096 ranks have 40,960,000 chunks, which would take gigabytes; one of them has 4,096."""
    layout = Layout(Mesh((4096,)), [Shard(0)], (8192, 16))
    count = 10_000
    table = TensorTable.of([f"w{i}" for i in range(count)], ["float32"] * count, [4] * count, [layout] * count)
    manifest = Manifest("abcdef", ["d", *(item for i in range(count) for item in (f"w{i}", i))], table, {})
    metadata = checkpoint.Metadata(manifest)
    with peak_memory() as peak:
        entries = dict(metadata.state_dict_metadata)
        assert len(entries) == count
        assert all(entry.size == (8192, 16) for entry in entries.values())
        assert len(entries["w77"].chunks) == 4096
        assert entries["w77"].chunks[1] == checkpoint.ChunkStorageMetadata((2, 0), (2, 16))
        assert peak() < 64 << 20


def _chunks_on_ranks() -> Any:
    rank = torch.distributed.get_rank()
    mesh = sw.init_device_mesh("cpu", (2, 2))
    whole = torch.arange(30.0).reshape(5, 6)
    x = sw.distribute_tensor(whole, mesh, [sw.Shard(0), sw.Shard(1)])
    (chunk,) = checkpoint.chunk_list(x)
    held = checkpoint.local_tensor_for(x, checkpoint.MetadataIndex("x", chunk.offsets))
    assert torch.equal(held, whole[chunk.region.slices()])
    held.fill_(rank)
    assert x.to_local().eq(rank).all()
    (item,) = checkpoint.write_items(x, "x")
    assert item.tensor_data is not None
    assert item.tensor_data.size == (5, 6)
    with pytest.raises(MissingNameError, match=rf"no chunk at \(9, 9\) is on rank {rank}, which holds"):
        checkpoint.local_tensor_for(x, checkpoint.MetadataIndex("x", (9, 9)))
    few = sw.distribute_tensor(torch.ones(2), sw.init_device_mesh("cpu", (4,)), [sw.Shard(0)])
    assert len(checkpoint.chunk_list(few)) == len(checkpoint.write_items(few, "few")) == (rank < 2)
    addends = sw.DTensor.from_local(torch.ones(2), sw.init_device_mesh("cpu", (4,)), [sw.Partial()])
    with pytest.raises(LayoutError, match="partial"):
        checkpoint.chunk_list(addends)
    return chunk.offsets, chunk.sizes


def test_a_dtensor_lists_the_chunks_of_its_rank_for_pytorch() -> None:
    found = run_ranks(4, _chunks_on_ranks)
    assert [tuple(offsets) for offsets, _ in found] == [(0, 0), (0, 3), (3, 0), (3, 3)]
    assert [tuple(sizes) for _, sizes in found] == [(3, 3), (3, 3), (2, 3), (2, 3)]


def _state(placements: list[Any], fill: float | None) -> dict[str, Any]:
    mesh = sw.init_device_mesh("cpu", (2, 2))
    whole = torch.arange(77.0).reshape(7, 11)
    return {"w": sw.distribute_tensor(whole if fill is None else torch.full_like(whole, fill), mesh, placements)}


def _dcp_round_trip(path: str) -> Any:
    warnings.simplefilter("ignore")  # torch's own
    dcp.save(_state([sw.Shard(0), sw.Shard(1)], None), checkpoint_id=path)
    results = []
    for placements in ([sw.Shard(1), sw.Replicate()], [sw.Replicate(), sw.Shard(0)], [sw.Shard(0), sw.Shard(0)]):
        target = _state(placements, -1.0)
        dcp.load(target, checkpoint_id=path)
        results.append(target["w"].full_tensor())
    return results


def test_torch_distributed_checkpoint_saves_and_reshards_dtensors(tmp_path: Path) -> None:
    for results in run_ranks(4, _dcp_round_trip, str(tmp_path / "dcp")):
        for tensor in results:
            assert torch.equal(tensor, torch.arange(77.0).reshape(7, 11))
