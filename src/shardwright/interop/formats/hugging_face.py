"""Hugging Face folders: one safetensors file, or an index that says which file holds which tensor.

The index is the truth: files that it does not list are not read, and a tensor that it lists must be in its file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from shardwright.checkpoint.format.data_file import digest
from shardwright.errors import CorruptionError, FormatError, MissingKeyError
from shardwright.interop.formats.contents import ForeignContents, StoredChunk, TableBuilder
from shardwright.interop.formats.inert_tree import check_name
from shardwright.interop.formats.safetensors_header import SafetensorsHeader, read_header, unique_names
from shardwright.interop.formats.stored import Location, read_bytes
from shardwright.layout import Region
from shardwright.storage import LocalStorage

__all__ = ["read_safetensors_file", "read_safetensors_index"]

_MAX_INDEX = 1 << 25


def read_safetensors_file(storage: LocalStorage, name: str) -> ForeignContents:
    """Return the contents of one safetensors file."""
    header = _header(storage, name)
    return _contents(storage, {name: header}, dict.fromkeys(header.tensors, name), name)


def read_safetensors_index(storage: LocalStorage, name: str) -> ForeignContents:
    """Return the contents of the files that an index lists."""
    weight_map = _weight_map(storage, name)
    headers: dict[str, SafetensorsHeader] = {}
    for file in dict.fromkeys(weight_map.values()):
        try:
            headers[file] = _header(storage, file)
        except MissingKeyError as error:
            raise CorruptionError(f"{name} lists {file!r}, which is missing") from error
    for tensor, file in weight_map.items():
        if tensor not in headers[file].tensors:
            raise CorruptionError(f"{name} says that {file!r} holds tensor {tensor!r}, which it does not")
    for file, header in headers.items():
        unlisted = [tensor for tensor in header.tensors if weight_map.get(tensor) != file]
        if unlisted:
            elsewhere = weight_map.get(unlisted[0])
            detail = f"lists in {elsewhere!r}" if elsewhere else "does not list"
            raise CorruptionError(
                f"{file!r} holds {len(unlisted)} tensors that {name} {detail}; the first is {unlisted[0]!r}"
            )
    return _contents(storage, headers, weight_map, name)


def _weight_map(storage: LocalStorage, name: str) -> dict[str, str]:
    with storage.open_file(name) as reader:
        if reader.size > _MAX_INDEX:
            raise FormatError(f"{name} has {reader.size} bytes, and at most {_MAX_INDEX} are read")
        data = read_bytes(reader, 0, reader.size)
    try:
        index = json.loads(data, object_pairs_hook=unique_names)
    except (ValueError, RecursionError) as error:
        raise CorruptionError(f"{name} cannot be read: {error}") from None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError(f"{name} has no weight_map")
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or not file or set(file) & {"/", "\\", "\0"} or file in (".", ".."):
            raise FormatError(f"{name} lists {str(file)[:200]!r} for {tensor!r}, which is not the name of a file")
    return weight_map


def _header(storage: LocalStorage, name: str) -> SafetensorsHeader:
    with storage.open_file(name) as reader:
        return read_header(reader, 0, name)


def _contents(
    storage: LocalStorage, headers: dict[str, SafetensorsHeader], files: dict[str, str], where: str
) -> ForeignContents:
    table = TableBuilder(where)
    tree: list[Any] = ["d"]
    for name, file in _in_file_order(headers, files):
        dtype, shape, start, end = headers[file].tensors[name]
        check_name(where, name)
        chunk = StoredChunk(Region.whole(shape), file, start, Location(start, end - start))
        tree += [name, table.add(name, dtype, shape, [chunk])]
    identity = digest(repr([(file, sorted(header.tensors.items())) for file, header in headers.items()]).encode())
    sizes = {file: header.end for file, header in headers.items()}
    return table.build("huggingface", identity[:16], storage, tree, least_sizes=sizes)


def _in_file_order(headers: dict[str, SafetensorsHeader], files: dict[str, str]) -> Iterable[tuple[str, str]]:
    """Return the tensors with their files, as they are stored."""
    number = {file: index for index, file in enumerate(headers)}
    return sorted(files.items(), key=lambda item: (number[item[1]], headers[item[1]].tensors[item[0]].start))
