"""The metadata of a distributed checkpoint of PyTorch: what its pickle says, as plain records, checked.

Written since PyTorch 1.13 by `torch.distributed.checkpoint`, by FSDP's sharded state dicts, by Megatron (torch_dist).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from shardwright.errors import FormatError, PickleError
from shardwright.interop.formats.inert_tree import check_name
from shardwright.interop.formats.pickled import METADATA, Instance, Kind, read_pickle
from shardwright.interop.formats.pickled.values import size
from shardwright.layout import Region

__all__ = ["DcpEntry", "DcpMetadata", "DcpTensor", "read_metadata"]


class DcpTensor(NamedTuple):
    """A stored tensor: its dtype, its shape, and the regions in which it is stored."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    regions: tuple[Region, ...]


class DcpEntry(NamedTuple):
    """Bytes of a file that hold one region of a tensor, or one value."""

    file: str
    offset: int
    length: int


class DcpMetadata(NamedTuple):
    """What a checkpoint holds, by name: tensors, and None for values that are not tensors.

    `entries` has the bytes of each region, by name and offset, and of each value, by name and None. `paths` has the
    keys that lead to each name.
    """

    tensors: dict[str, DcpTensor | None]
    entries: dict[tuple[str, tuple[int, ...] | None], DcpEntry]
    paths: dict[str, tuple[Any, ...]]


def read_metadata(data: bytes, where: str) -> DcpMetadata:
    """Return what a `.metadata` file says."""
    fields = _fields(read_pickle(data, METADATA, where), where, "Metadata", "MCoreMetadata")
    described, stored = fields.get("state_dict_metadata"), fields.get("storage_data")
    if not isinstance(described, dict) or not isinstance(stored, dict):
        raise FormatError(f"{where}: it has no state_dict_metadata or no storage_data")
    tensors: dict[str, DcpTensor | None] = {}
    for name, described_as in described.items():
        if type(name) is not str:
            raise FormatError(f"{where}: a name is not a text")
        check_name(where, name)
        is_value = isinstance(described_as, Instance) and described_as.kind.name.endswith(".BytesStorageMetadata")
        tensors[name] = None if is_value else _tensor(described_as, f"{where}: tensor {name!r}")
    entries: dict[tuple[str, tuple[int, ...] | None], DcpEntry] = {}
    for index, info in stored.items():
        key = _index(index, where)
        if key in entries:
            raise FormatError(f"{where}: {key[0]!r} at {key[1]} is stored twice")
        entries[key] = _entry(info, f"{where}: {key[0]!r}")
    return DcpMetadata(tensors, entries, _paths(fields.get("planner_data")))


def _fields(value: Any, where: str, *kinds: str) -> dict[str, Any]:
    """Return the fields of an instance of one of these types."""
    if not isinstance(value, Instance) or value.kind.name.rpartition(".")[2] not in kinds:
        raise FormatError(f"{where}: expected a {kinds[0]}, got {_shown(value)}")
    if value.state is None:
        return {}
    if not isinstance(value.state, dict):
        raise FormatError(f"{where}: the fields of a {kinds[0]} are not a dict")
    return value.state


def _tensor(value: Any, where: str) -> DcpTensor:
    fields = _fields(value, where, "TensorStorageMetadata")
    dtype = _dtype(fields.get("properties"), where)
    try:
        shape = size(fields.get("size"))
        chunks = fields.get("chunks")
        if not isinstance(chunks, list):
            raise FormatError(f"{where} has no list of chunks")
        regions = {}
        for chunk in chunks:
            bounds = _fields(chunk, where, "ChunkStorageMetadata")
            offsets, sizes = size(bounds.get("offsets")), size(bounds.get("sizes"))
            if len(offsets) != len(shape) or len(sizes) != len(shape):
                raise FormatError(f"{where} of {len(shape)} dimensions has a chunk of {len(sizes)}")
            regions[offsets, sizes] = Region(offsets, sizes)  # replicas may list the same chunk
    except PickleError as error:
        raise FormatError(f"{where}: {error}") from None
    return DcpTensor(dtype, shape, tuple(regions.values()))


def _dtype(properties: Any, where: str) -> torch.dtype:
    """Return the dtype: the first of a tuple, of 5 or 6 by the version of PyTorch."""
    state = properties.state if isinstance(properties, Instance) else None
    if isinstance(state, dict):
        first, layout = state.get("dtype"), state.get("layout")
    elif isinstance(state, tuple) and len(state) in (5, 6):
        first, layout = state[:2]
    else:
        raise FormatError(f"{where}: its properties are not known: {_shown(properties)}")
    if layout not in (None, "torch.strided"):
        raise FormatError(f"{where} has the layout {str(layout)[:40]!r}, and only strided tensors are read")
    if not isinstance(first, Kind) or not isinstance(first.value, torch.dtype):
        raise FormatError(f"{where} has no dtype")
    return first.value


def _index(value: Any, where: str) -> tuple[str, tuple[int, ...] | None]:
    fields = _fields(value, where, "MetadataIndex")
    name, offset = fields.get("fqn"), fields.get("offset")
    if type(name) is not str:
        raise FormatError(f"{where}: an entry of storage_data has no name")
    return name, None if offset is None else size(offset)


def _entry(value: Any, where: str) -> DcpEntry:
    fields = _fields(value, where, "_StorageInfo")
    file, offset, length = fields.get("relative_path"), fields.get("offset"), fields.get("length")
    if type(file) is not str or not file or set(file) & {"/", "\\", "\0"} or file in (".", ".."):
        raise FormatError(f"{where} is in the file {str(file)[:200]!r}, which is not the name of a file")
    if type(offset) is not int or type(length) is not int or not (0 <= offset < 1 << 62 and 0 <= length < 1 << 62):
        raise FormatError(f"{where} has no offset and length: {offset!r}, {length!r}")
    if fields.get("transform_descriptors"):
        raise FormatError(
            f"{where} was transformed by {str(fields['transform_descriptors'])[:80]} when it was saved, which is not "
            "read; save it without extensions"
        )
    return DcpEntry(file, offset, length)


def _paths(planner_data: Any) -> dict[str, tuple[Any, ...]]:
    """Return the keys that lead to each name, if the planner stored them as PyTorch's default one does."""
    if isinstance(planner_data, Instance) and isinstance(planner_data.state, dict):  # a ChainMap
        maps = planner_data.state.get("maps")
        planner_data = {key: value for each in reversed(maps) for key, value in each.items()} if maps else None
    if not isinstance(planner_data, dict):
        return {}
    return {
        name: path
        for name, path in planner_data.items()
        if type(name) is str and type(path) is tuple and path and all(type(key) in (str, int) for key in path)
    }


def _shown(value: Any) -> str:
    return value.kind.name if isinstance(value, Instance) else type(value).__name__
