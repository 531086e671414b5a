"""The contents of a checkpoint of any format: those of our manifest, or another format's in the same terms."""

from __future__ import annotations

from typing import TypeAlias

from shardwright.checkpoint.format.manifest import Manifest
from shardwright.checkpoint.reading.data_reader import FileReader
from shardwright.checkpoint.reading.foreign_reader import ForeignFileReader
from shardwright.errors import CorruptionError
from shardwright.interop.formats import ForeignContents
from shardwright.storage import Reader, Storage

__all__ = ["Contents", "check_sizes", "file_reader", "format_of", "open_file"]

Contents: TypeAlias = Manifest | ForeignContents


def format_of(contents: Contents) -> str:
    """Return the name of the format: "shardwright", "dcp", "huggingface" or "torch"."""
    return contents.format if isinstance(contents, ForeignContents) else "shardwright"


def open_file(storage: Storage, contents: Contents, rank: int) -> Reader:
    """Open a file of a checkpoint, by the rank that wrote it; files of other formats are numbered instead."""
    if isinstance(contents, ForeignContents):
        return contents.storage.open_file(contents.file_name(rank))
    return storage.open(contents.file_name(rank))


def file_reader(reader: Reader, contents: Contents, rank: int) -> FileReader:
    """Return what reads tensors from an open file."""
    if isinstance(contents, ForeignContents):
        return ForeignFileReader(reader, contents.files[rank])
    return FileReader(reader, contents.file(rank), contents.files[rank])


def check_sizes(storage: Storage, contents: Contents) -> None:
    """Check that every file exists and has its size, without reading it."""
    for rank in contents.files:
        name = contents.file_name(rank)
        with open_file(storage, contents, rank) as reader:
            if isinstance(contents, ForeignContents):
                ForeignFileReader(reader, contents.files[rank])  # checks the size
            elif reader.size != contents.files[rank].size:
                raise CorruptionError(
                    f"{name} has {reader.size} bytes, but the manifest says {contents.files[rank].size}"
                )
