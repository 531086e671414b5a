"""Files that `torch.save` wrote: one archive, read as a tree with tensors over its records."""

from __future__ import annotations

from shardwright.checkpoint.format.data_file import digest
from shardwright.errors import FormatError
from shardwright.interop.formats.contents import ForeignContents, StoredChunk, TableBuilder
from shardwright.interop.formats.inert_tree import TreeBuilder
from shardwright.interop.formats.pickled.values import DTensorRef, TensorRef
from shardwright.interop.formats.stored import ArchiveRange
from shardwright.interop.formats.torch_archive import Archive
from shardwright.layout import Region
from shardwright.storage import LocalStorage

__all__ = ["LEGACY", "ZIP", "read_torch_file", "tree_of"]

ZIP = b"PK\x03\x04"
"""The first bytes of what `torch.save` has written since 1.6."""
LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""The first bytes of what it wrote before."""


def read_torch_file(storage: LocalStorage, name: str) -> ForeignContents:
    """Return the contents of a file that `torch.save` wrote."""
    with storage.open_file(name) as reader:
        start = bytearray(min(len(LEGACY), reader.size))
        reader.read([memoryview(start)], 0)
        if bytes(start) == LEGACY:
            raise FormatError(
                f"{name} has the form that torch.save wrote before PyTorch 1.6, without checksums or byte ranges; "
                "rewrite it with torch.save(torch.load(path, weights_only=True), path)"
            )
        archive = Archive(reader, 0, reader.size, name)
        table = TableBuilder(name)
        tree = tree_of(archive, name, table)
        identity = digest(f"{reader.size} {sorted(archive.checksums().items())}".encode())
        size = reader.size
    return table.build("torch", identity[:16], storage, tree, {name: [ArchiveRange(0, size, "")]}, {name: size})


def tree_of(archive: Archive, file: str, table: TableBuilder, prefix: str = "") -> object:
    """Return the tree of an archive, with its tensors added to the table under names that begin with `prefix`."""
    numbers: dict[TensorRef, int] = {}

    def add(name: str, value: TensorRef | DTensorRef) -> int:
        if isinstance(value, DTensorRef):
            raise FormatError(
                f"{file}: {name!r} is one rank's part of a DTensor: open the folder that has the files of all ranks"
            )
        number = numbers.get(value)
        if number is None:
            location = archive.locate(value)
            chunk = StoredChunk(Region.whole(value.size), file, location.start, location)
            number = numbers[value] = table.add(table.free_name(name), value.dtype, value.size, [chunk])
        return number

    return TreeBuilder(file, add).build(archive.value, prefix)
