"""The contents of a checkpoint in PyTorch's vocabulary: views over the manifest, computed on demand.

Also for a DTensor: its chunks, the tensor that holds a chunk, and the items to write. PyTorch's own checkpointing calls
these on a tensor through dunder methods, and accepts our types: it uses their fields, not their types.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias, final

import numpy as np
import torch
from torch import Tensor

from shardwright import comm
from shardwright.checkpoint.format.manifest import VERSION
from shardwright.checkpoint.format.replica_split import replica_split
from shardwright.checkpoint.format.split import boxes_of_range
from shardwright.checkpoint.format.tensor_table import Pieces, TensorTable
from shardwright.checkpoint.format.tree import StoredTensor, stored_entries
from shardwright.checkpoint.format.values import DTYPES
from shardwright.checkpoint.reading.contents import Contents, format_of
from shardwright.checkpoint.state.marks import Stateful
from shardwright.errors import LayoutError, MissingNameError, UnsupportedError
from shardwright.interop.formats import ForeignContents
from shardwright.layout import Region
from shardwright.sharded import TensorProperties
from shardwright.tensor import DTensor
from shardwright.tensor.base.checkpoint_protocol import CheckpointProtocol, provide

__all__ = [
    "STATE_DICT_TYPE",
    "STORAGE_TYPES",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageInfo",
    "StorageMeta",
    "TensorStorageMetadata",
    "TensorWriteData",
    "WriteItem",
    "WriteItemType",
    "chunk_list",
    "local_tensor_for",
    "write_items",
]

STATE_DICT_TYPE: TypeAlias = dict[str, Stateful | Any]
"""A state dict as PyTorch's checkpointing takes it."""


@final
@dataclass(frozen=True)
class ChunkStorageMetadata:
    """A region of a stored or held tensor: its offsets and sizes.

    >>> ChunkStorageMetadata((4, 0), (4, 8)).region
    Region[4:8, 0:8]
    """

    offsets: torch.Size
    sizes: torch.Size

    def __init__(self, offsets: Sequence[int], sizes: Sequence[int]) -> None:
        object.__setattr__(self, "offsets", torch.Size(offsets))
        object.__setattr__(self, "sizes", torch.Size(sizes))

    @property
    def region(self) -> Region:
        """The chunk as a Region."""
        return Region(self.offsets, self.sizes)

    @classmethod
    def of(cls, region: Region) -> ChunkStorageMetadata:
        """Return the chunk of a Region."""
        return cls(region.offset, region.size)


@final
@dataclass(frozen=True, eq=False)
class MetadataIndex:
    """Identifies a chunk of an object; `index` is a lookup hint, ignored in comparisons.

    Equal to PyTorch's of the same name and offset.

    >>> MetadataIndex("w", (4, 0), index=1) == MetadataIndex("w", (4, 0))
    True
    """

    fqn: str
    offset: torch.Size | None = None
    index: int | None = None

    def __init__(self, fqn: str, offset: Sequence[int] | None = None, index: int | None = None) -> None:
        object.__setattr__(self, "fqn", fqn)
        object.__setattr__(self, "offset", None if offset is None else torch.Size(offset))
        object.__setattr__(self, "index", index)

    def __eq__(self, other: object) -> bool:
        if type(other).__name__ != "MetadataIndex":
            return NotImplemented
        return (self.fqn, self.offset) == (getattr(other, "fqn", None), getattr(other, "offset", None))

    def __hash__(self) -> int:
        return hash((self.fqn, self.offset))  # as PyTorch's


@final
@dataclass
class TensorStorageMetadata:
    """A stored tensor: its properties, its size and its chunks, which are listed on demand.

    >>> TensorStorageMetadata(TensorProperties(), torch.Size([2]), [ChunkStorageMetadata((0,), (2,))]).size
    torch.Size([2])
    """

    properties: TensorProperties
    size: torch.Size
    chunks: Sequence[ChunkStorageMetadata]


@final
@dataclass
class BytesStorageMetadata:
    """A stored value that is not a tensor: here, a value in the manifest.

    >>> BytesStorageMetadata()
    BytesStorageMetadata()
    """


STORAGE_TYPES: TypeAlias = TensorStorageMetadata | BytesStorageMetadata
"""The metadata of an entry of a state."""


@final
@dataclass
class StorageMeta:
    """The location of a checkpoint, and the save that wrote it.

    >>> StorageMeta(save_id="5f3a9c").save_id
    '5f3a9c'
    """

    checkpoint_id: str | os.PathLike[str] | None = None
    save_id: str | None = None
    load_id: str | None = None
    modules: list[str] = field(default_factory=list)


@final
class Metadata:
    """The metadata of a checkpoint, as a view over the manifest: nothing is listed before it is used.

    `state_dict_metadata` has an entry for every tensor and every plain value, by name; `storage_data` gives the file
    and offset of a chunk, by `MetadataIndex`; `planner_data` has the key path of each name.

    >>> import tempfile
    >>> from shardwright import checkpoint
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     checkpoint.save({"model": {"w": torch.ones(2, 3)}, "epoch": 3}, folder)
    ...     with checkpoint.open(folder) as saved:
    ...         metadata = saved.metadata
    >>> metadata.state_dict_metadata["model.w"].chunks
    [ChunkStorageMetadata(offsets=torch.Size([0, 0]), sizes=torch.Size([2, 3]))]
    >>> metadata.state_dict_metadata["epoch"], metadata.planner_data["model.w"], metadata.version
    (BytesStorageMetadata(), ('model', 'w'), '1')
    """

    def __init__(self, manifest: Contents, checkpoint_id: str | None = None) -> None:
        self._manifest, self._checkpoint_id = manifest, checkpoint_id

    @cached_property
    def state_dict_metadata(self) -> Mapping[str, STORAGE_TYPES]:
        """The metadata of every name."""
        numbers: dict[str, int | None] = dict(self._manifest.tensors.index)
        for name, _, content, *_ in stored_entries(self._manifest.tree, None):
            numbers.setdefault(name, content.number if isinstance(content, StoredTensor) else None)
        return _View(numbers, self._entry)

    @cached_property
    def planner_data(self) -> Mapping[str, tuple[Any, ...]]:
        """The key path of every name of the tree."""
        return {name: keys for name, keys, *_ in stored_entries(self._manifest.tree, None) if keys is not None}

    @cached_property
    def storage_data(self) -> Mapping[MetadataIndex, StorageInfo]:
        """The file, offset and length of every chunk. The cost grows with the number of chunks."""
        infos: dict[MetadataIndex, StorageInfo] = {}
        if isinstance(self._manifest, ForeignContents):
            raise UnsupportedError(
                f"the offsets of chunks are not listed for a checkpoint of the format {format_of(self._manifest)!r}"
            )
        for rank in self._manifest.files:
            file = self._manifest.file(rank)
            plan = file.plan
            for chunk, (tensor, start, nbytes) in enumerate(
                zip(plan.tensors.tolist(), plan.starts.tolist(), plan.nbytes.tolist(), strict=True)
            ):
                index = MetadataIndex(plan.table.names[tensor], plan.region(chunk).offset)
                infos[index] = StorageInfo(file.name, file.header_size + start, nbytes)
        return infos

    @property
    def storage_meta(self) -> StorageMeta:
        """The location of the checkpoint, and the save that wrote it."""
        return StorageMeta(self._checkpoint_id, self._manifest.save_id)

    @property
    def version(self) -> str:
        """The version of the format."""
        return str(VERSION)

    def __repr__(self) -> str:
        return f"Metadata(save {self._manifest.save_id}, {len(self.state_dict_metadata)} names, version {self.version})"

    def _entry(self, number: int | None) -> STORAGE_TYPES:
        if number is None:
            return BytesStorageMetadata()
        table = self._manifest.tensors
        return TensorStorageMetadata(
            TensorProperties(dtype=DTYPES[table.dtypes[number]]),
            torch.Size(table.shape(number)),
            _Chunks(lambda: [ChunkStorageMetadata.of(region) for region in _stored_regions(table, number)]),
        )


@final
@dataclass(frozen=True)
class StorageInfo:
    """The file, offset and length of a chunk.

    >>> StorageInfo("5f3a9c-00000-0.safetensors", 4096, 24).offset
    4096
    """

    relative_path: str
    offset: int
    length: int


@final
class _View(Mapping[str, STORAGE_TYPES]):
    """A mapping of names to metadata that is computed on demand."""

    def __init__(self, numbers: Mapping[str, int | None], entry: Callable[[int | None], STORAGE_TYPES]) -> None:
        self._numbers, self._entry = numbers, entry

    def __getitem__(self, name: str) -> STORAGE_TYPES:
        if name not in self._numbers:
            raise MissingNameError(f"nothing is stored under {name!r}")
        return self._entry(self._numbers[name])

    def __contains__(self, name: object) -> bool:
        return name in self._numbers

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)


@final
class _Chunks(Sequence[ChunkStorageMetadata]):
    """A list that is computed on first use."""

    def __init__(self, make: Callable[[], list[ChunkStorageMetadata]]) -> None:
        self._make = make

    @cached_property
    def _list(self) -> list[ChunkStorageMetadata]:
        return self._make()

    def __getitem__(self, index: Any) -> Any:
        return self._list[index]

    def __len__(self) -> int:
        return len(self._list)

    def __eq__(self, other: object) -> bool:
        return list(other) == self._list if isinstance(other, Sequence) else NotImplemented

    def __repr__(self) -> str:
        return repr(self._list)


def _stored_regions(table: TensorTable, number: int) -> list[Region]:
    """Return the chunks of a tensor as stored, by offset, without planning the files."""
    sharding = table.sharding(number)
    if 0 in sharding.shape:
        return [Region.whole(sharding.shape)]
    if isinstance(sharding, Pieces):
        return sorted((region for region in sharding.regions if not region.is_empty), key=lambda region: region.offset)
    regions: list[Region] = []
    for box, ranks in sharding.regions():
        if len(ranks) == 1:
            regions.append(box)
            continue
        share = replica_split(table, ranks)
        for _, first, last in share.writers(int(np.searchsorted(share.tensors, number))):
            regions += boxes_of_range(box, first, last)
    return sorted(regions, key=lambda region: region.offset)


class WriteItemType(enum.Enum):
    """What to write: a whole tensor, a shard, or bytes. Equal to PyTorch's of the same name.

    >>> WriteItemType.SHARD.name
    'SHARD'
    """

    TENSOR = enum.auto()
    SHARD = enum.auto()
    BYTE_IO = enum.auto()

    def __eq__(self, other: object) -> bool:
        return type(other).__name__ == "WriteItemType" and getattr(other, "name", None) == self.name

    def __hash__(self) -> int:
        return hash(self.name)


@final
@dataclass(frozen=True)
class TensorWriteData:
    """A chunk to write, with the properties and the size of its tensor.

    >>> TensorWriteData(ChunkStorageMetadata((0,), (2,)), TensorProperties(), torch.Size([4])).size
    torch.Size([4])
    """

    chunk: ChunkStorageMetadata
    properties: TensorProperties
    size: torch.Size


@final
@dataclass(frozen=True)
class WriteItem:
    """An item to write: its index, its type, and its tensor data.

    >>> WriteItem(MetadataIndex("epoch"), WriteItemType.BYTE_IO).tensor_data is None
    True
    """

    index: MetadataIndex
    type: WriteItemType
    bytes_io_data: None = None  # PyTorch's, for values that are not tensors
    tensor_data: TensorWriteData | None = None

    def tensor_storage_size(self) -> int | None:
        """Return the size of the tensor's chunk in bytes, for PyTorch's planners."""
        if self.tensor_data is None:
            return None
        return self.tensor_data.size.numel() * self.tensor_data.properties.dtype.itemsize


def chunk_list(tensor: DTensor) -> list[ChunkStorageMetadata]:
    """Return the chunks that this rank holds of a DTensor: one, or none if its part is empty.

    >>> import shardwright as sw
    >>> chunk_list(sw.zeros(4, 2, mesh=sw.init_device_mesh("cpu", (1,)), placements=[sw.Shard(0)]))
    [ChunkStorageMetadata(offsets=torch.Size([0, 0]), sizes=torch.Size([4, 2]))]
    """
    region = _own_region(tensor)
    return [] if region is None else [ChunkStorageMetadata.of(region)]


def local_tensor_for(tensor: DTensor, index: Any) -> Tensor:
    """Return the local memory that holds a chunk; writing to it changes the DTensor.

    >>> import shardwright as sw
    >>> w = sw.zeros(4, 2, mesh=sw.init_device_mesh("cpu", (1,)), placements=[sw.Shard(0)])
    >>> local_tensor_for(w, MetadataIndex("w", (0, 0))).shape
    torch.Size([4, 2])
    """
    region = _own_region(tensor)
    offset = None if index.offset is None else tuple(index.offset)
    if region is None or offset not in (None, region.offset):
        local = "nothing of it" if region is None else str(region)
        raise MissingNameError(
            f"{index.fqn!r}: no chunk at {offset} is on rank {comm.rank()}, which holds {local} of {tensor.sharding}"
        )
    return tensor.to_local().detach()


def write_items(tensor: DTensor, fqn: str) -> list[WriteItem]:
    """Return the items that this rank has to write of a DTensor, for PyTorch's planners.

    >>> import shardwright as sw
    >>> w = sw.zeros(4, 2, mesh=sw.init_device_mesh("cpu", (1,)), placements=[sw.Shard(0)])
    >>> write_items(w, "w")[0].index.offset
    torch.Size([0, 0])
    """
    local = tensor.to_local().detach()
    return [
        WriteItem(
            MetadataIndex(fqn, chunk.offsets),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk, TensorProperties.create_from_tensor(local), torch.Size(tensor.shape)),
        )
        for chunk in chunk_list(tensor)
    ]


def _own_region(tensor: DTensor) -> Region | None:
    """Return the region that this rank holds; None if it is empty."""
    layout = tensor.sharding
    if layout.is_partial:
        raise LayoutError(f"{layout} is partial, and partial values have no chunks; redistribute it first")
    rank = comm.rank()
    region = layout.region(rank) if rank in layout.mesh else None
    return None if region is None or region.is_empty else region


provide(CheckpointProtocol(chunk_list, local_tensor_for, write_items))
