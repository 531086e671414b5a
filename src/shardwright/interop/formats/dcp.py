"""Distributed checkpoints of PyTorch: a folder with `.metadata` and files of entries, each an archive of its own.

Names and regions are known from the metadata. Where in its entry a tensor is, and with which strides, is read from the
entry when it is needed. In the SAFETENSORS mode of `FileSystemWriter`, the tensors of a file are one safetensors file
behind the values, and the offset of each entry is that of its header.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import prod
from typing import Any

from shardwright.checkpoint.format.data_file import digest
from shardwright.errors import CheckpointError, CorruptionError, FormatError
from shardwright.interop.formats.contents import ForeignContents, StoredChunk, TableBuilder
from shardwright.interop.formats.dcp_metadata import DcpEntry, DcpMetadata, DcpTensor, read_metadata
from shardwright.interop.formats.nested_tree import nest
from shardwright.interop.formats.pickled.values import TensorRef
from shardwright.interop.formats.safetensors_header import SafetensorsHeader, read_header
from shardwright.interop.formats.stored import ArchiveRange, Find, Location, read_bytes
from shardwright.interop.formats.torch_archive import Archive
from shardwright.interop.formats.torch_file import tree_of
from shardwright.layout import Region
from shardwright.storage import LocalStorage, Reader

__all__ = ["COMMON", "read_dcp"]

COMMON = "common.pt"
"""The file in which Megatron stores the values that all ranks share."""

_MAX_METADATA = 1 << 27
_MAX_VALUE = 1 << 24
_SHARDING = "DCP_SHARDING_INFO"


def read_dcp(storage: LocalStorage, names: Sequence[str], has_common: bool) -> ForeignContents:
    """Return the contents of a folder, given the names of its metadata files: one, or one of each rank.

    With `has_common`, Megatron wrote it: the values that all ranks share are in a file of their own.
    """
    pieces = [_metadata(storage, name) for name in names]
    metadata = pieces[0] if len(pieces) == 1 else _joined(pieces, names)
    return _Folder(storage, metadata, names[0]).contents(has_common)


def _metadata(storage: LocalStorage, name: str) -> DcpMetadata:
    with storage.open_file(name) as reader:
        if reader.size > _MAX_METADATA:
            raise FormatError(f"{name} has {reader.size} bytes, and at most {_MAX_METADATA} are read")
        return read_metadata(read_bytes(reader, 0, reader.size), name)


def _joined(pieces: Sequence[DcpMetadata], names: Sequence[str]) -> DcpMetadata:
    """Return the metadata of all ranks, each of which wrote its own: chunks are added up."""
    joined = DcpMetadata({}, {}, {})
    for piece, where in zip(pieces, names, strict=True):
        for name, tensor in piece.tensors.items():
            before = joined.tensors.setdefault(name, tensor)
            if (before is None) is not (tensor is None) or (
                before and tensor and (before.dtype, before.shape) != (tensor.dtype, tensor.shape)
            ):
                raise FormatError(f"{where}: {name!r} has another dtype or shape than in {names[0]}")
            if before is not None and tensor is not None:
                joined.tensors[name] = before._replace(regions=tuple(dict.fromkeys(before.regions + tensor.regions)))
        for key, entry in piece.entries.items():
            joined.entries.setdefault(key, entry)  # replicas are stored by every rank
        joined.paths.update(piece.paths)
    return joined


class _Folder:
    def __init__(self, storage: LocalStorage, metadata: DcpMetadata, where: str) -> None:
        self._storage, self._metadata, self._where = storage, metadata, where
        self._table = TableBuilder(where)
        self._archives: dict[str, list[ArchiveRange]] = {}
        self._sizes: dict[str, int] = {}
        self._headers: dict[tuple[str, int], SafetensorsHeader] = {}

    def contents(self, has_common: bool) -> ForeignContents:
        """Return the contents of the folder."""
        metadata = self._metadata
        nodes: dict[str, Any] = {}
        for name, tensor in metadata.tensors.items():
            if tensor is not None:
                nodes[name] = self._add_tensor(name, tensor)
            else:
                nodes[name] = None  # in its place; values are read once all names of tensors are known
        readers: dict[str, Reader] = {}
        try:
            for name, tensor in metadata.tensors.items():
                if tensor is None:
                    nodes[name] = self._value(name, readers)
        finally:
            for reader in readers.values():
                reader.close()
        tree = nest(nodes, metadata.paths)
        if has_common:
            tree = self._with_common(tree)
        identity = digest(repr((sorted(metadata.entries.items(), key=repr), list(metadata.tensors.items()))).encode())
        return self._table.build("dcp", identity[:16], self._storage, tree, self._archives, self._sizes)

    def _add_tensor(self, name: str, tensor: DcpTensor) -> int:
        chunks = []
        for region in tensor.regions:
            entry = self._metadata.entries.get((name, region.offset))
            if entry is None:
                if region.is_empty:
                    continue
                raise FormatError(f"{self._where}: {region} of tensor {name!r} is not stored in any file")
            chunks.append(StoredChunk(region, entry.file, entry.offset, self._find(name, tensor, region, entry)))
        return self._table.add(name, tensor.dtype, tensor.shape, chunks)

    def _find(self, name: str, tensor: DcpTensor, region: Region, entry: DcpEntry) -> Find:
        """Return a function that finds a chunk in its file."""
        nbytes = prod(region.size) * tensor.dtype.itemsize
        if entry.length == nbytes and nbytes:  # an archive is longer than its tensor

            def in_safetensors(reader: Reader) -> Location:
                return self._in_safetensors(reader, name, tensor, region, entry)

            return in_safetensors
        if entry.length < nbytes:  # before memory is allocated for what the metadata claims
            raise CorruptionError(
                f"{self._where}: {region} of tensor {name!r} needs {nbytes} bytes, but its entry in {entry.file!r} has "
                f"{entry.length}"
            )
        self._add_archive(name, entry)

        def in_archive(reader: Reader) -> Location:
            where = f"{entry.file}: {region} of tensor {name!r}"
            archive = Archive(reader, entry.offset, entry.length, where)
            value = archive.value
            if not isinstance(value, TensorRef) or value.size != region.size or value.dtype is not tensor.dtype:
                stored = f"{value.dtype} {list(value.size)}" if isinstance(value, TensorRef) else type(value).__name__
                raise CorruptionError(
                    f"{where} should be {tensor.dtype} {list(region.size)}, but the entry at byte {entry.offset} holds "
                    f"{stored}"
                )
            return archive.locate(value)

        return in_archive

    def _in_safetensors(
        self, reader: Reader, name: str, tensor: DcpTensor, region: Region, entry: DcpEntry
    ) -> Location:
        key = entry.file, entry.offset
        header = self._headers.get(key)
        if header is None:
            header = self._headers[key] = read_header(reader, entry.offset, entry.file)
        found = header.tensors.get(name)
        where = f"{entry.file}: {region} of tensor {name!r}"
        if found is None or found.dtype is not tensor.dtype or found.shape != region.size:
            raise CorruptionError(f"{where} is not in the header at byte {entry.offset}")
        try:
            offsets = json.loads(header.metadata.get(_SHARDING, "{}")).get(name, {}).get("saved_offsets")
        except (ValueError, AttributeError, RecursionError):
            raise FormatError(f"{entry.file}: the sharding in its header cannot be read") from None
        if offsets is not None and offsets != list(region.offset):
            raise CorruptionError(
                f"{where} is not in the file: it holds the chunk at {offsets}. PyTorch stores one chunk of a tensor in "
                "each file of this mode, and loses the others"
            )
        return Location(found.start, found.end - found.start)

    def _with_common(self, tree: list[Any]) -> list[Any]:
        """Return the tree with what Megatron stores in a file of its own, but for keys that the tree has."""
        with self._storage.open_file(COMMON) as reader:
            size = reader.size
            self._add_archive(COMMON, DcpEntry(COMMON, 0, size))
            try:
                common = tree_of(Archive(reader, 0, size, COMMON), COMMON, self._table)
            except CorruptionError:
                raise
            except CheckpointError as error:
                return [*tree, COMMON, ["opaque", "pickle", str(error)]]
        if not isinstance(common, list) or common[0] != "d":
            return [*tree, COMMON, common]
        known = set(tree[1::2])
        further = [(key, node) for key, node in zip(common[1::2], common[2::2], strict=True) if key not in known]
        return [*tree, *(part for pair in further for part in pair)]

    def _add_archive(self, name: str, entry: DcpEntry) -> None:
        self._archives.setdefault(entry.file, []).append(ArchiveRange(entry.offset, entry.length, repr(name)))
        self._sizes[entry.file] = max(self._sizes.get(entry.file, 0), entry.offset + entry.length)

    def _value(self, name: str, readers: dict[str, Reader]) -> Any:
        """Return the node of a value that is not a tensor: an archive of its own."""
        entry = self._metadata.entries.get((name, None))
        if entry is None:
            raise FormatError(f"{self._where}: the value {name!r} is not stored in any file")
        self._add_archive(name, entry)
        if entry.length > _MAX_VALUE:
            return ["opaque", "bytes", f"it has {entry.length} bytes, and at most {_MAX_VALUE} are read"]
        where = f"{entry.file}: {name!r}"
        reader = readers.get(entry.file)
        if reader is None:
            reader = readers[entry.file] = self._storage.open_file(entry.file)
        try:
            return tree_of(Archive(reader, entry.offset, entry.length, where), entry.file, self._table, name)
        except CorruptionError:
            raise
        except CheckpointError as error:  # refused, or not supported
            return ["opaque", "pickle", str(error)]
