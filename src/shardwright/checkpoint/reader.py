"""`open`: read names, values and slices of a checkpoint in one process, without a process group.

A slice reads and verifies the blocks it needs. The files are opened together with the manifest, and open files remain
readable after they are removed: an open checkpoint does not change when another save replaces it.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Generic, NamedTuple, TypeVar, cast, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardwright.checkpoint.arguments import check_mapping
from shardwright.checkpoint.background import wait_for_saves_to
from shardwright.checkpoint.format.data_file import BLOCK
from shardwright.checkpoint.format.locate import Part
from shardwright.checkpoint.format.tree import StoredEntry, StoredTensor, StoredValue, stored_entries
from shardwright.checkpoint.format.values import DTYPES, Codec, EnumValue
from shardwright.checkpoint.location import as_storage, location_id
from shardwright.checkpoint.metadata import Metadata
from shardwright.checkpoint.reading.build_state import build
from shardwright.checkpoint.reading.contents import Contents, file_reader, format_of, open_file
from shardwright.checkpoint.reading.current import read_current
from shardwright.checkpoint.reading.data_reader import Destination, FileReader
from shardwright.checkpoint.reading.foreign_reader import ForeignFileReader
from shardwright.checkpoint.reading.host_sharing import blocks_of_part
from shardwright.checkpoint.reading.indexing import slicing_of
from shardwright.checkpoint.reading.mapped_entries import MappedEntries, map_entries, map_values
from shardwright.checkpoint.reading.mapped_reads import assemble
from shardwright.checkpoint.reading.targets import Target, check_bools
from shardwright.errors import ArgumentTypeError, CheckpointError, CorruptionError, MissingKeyError, MissingNameError
from shardwright.interop.formats import ForeignContents
from shardwright.interop.mapping import MappedPiece
from shardwright.interop.mapping import Mapping as Rules
from shardwright.layout import Holding, Layout, Region
from shardwright.storage import Reader, Storage

__all__ = ["Checkpoint", "LazyTensor", "StoredRange", "open"]

_MAX_OPEN = 256  # files held open; a checkpoint with more files opens each on demand

Out = TypeVar("Out", Tensor, npt.NDArray[Any])


class StoredRange(NamedTuple):
    """Bytes `first` to `end` (exclusive) of a file of a checkpoint.

    >>> StoredRange("5f3a9c-00000-0.safetensors", 4096, 8192).nbytes
    4096
    """

    file: str
    first: int
    end: int

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return self.end - self.first


@final
class LazyTensor(Generic[Out]):
    """A stored tensor of which nothing has been read yet: indexing it reads just what is needed.

    It takes integers, slices (with any step), `...` and `None`, and returns a plain tensor, or an array if it came from
    `Checkpoint.numpy`. If the step of a slice skips a megabyte or more, only the wanted layers are read; with a shorter
    step, everything between the first and the last is read.

    >>> import tempfile
    >>> from shardwright import checkpoint
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     checkpoint.save({"w": torch.arange(12).reshape(3, 4)}, folder)
    ...     with checkpoint.open(folder) as saved:
    ...         print(saved["w"])
    ...         print(saved["w"][1:, ::-2])
    LazyTensor('w', [3, 4], int64)
    tensor([[ 7,  5], [11,  9]])
    """

    __slots__ = ("_checkpoint", "_gives_arrays", "_number", "name")

    def __init__(self, checkpoint: Checkpoint, name: str, number: int, gives_arrays: bool) -> None:
        self._checkpoint, self.name, self._number, self._gives_arrays = checkpoint, name, number, gives_arrays

    @property
    def shape(self) -> torch.Size:
        """The shape of the tensor."""
        return torch.Size(self._checkpoint._table.shape(self._number))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensor."""
        return DTYPES[self._checkpoint._table.dtypes[self._number]]

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """The size of the tensor in bytes."""
        return self.shape.numel() * self.dtype.itemsize

    def numel(self) -> int:
        """Return the number of elements."""
        return self.shape.numel()

    @property
    def stored_name(self) -> str:
        """The name under which the tensor is stored; it differs from `name` if several names lead to one tensor."""
        return self._checkpoint._table.names[self._number]

    @property
    def layout(self) -> Layout | None:
        """The layout that the tensor had when it was saved; None for explicit boxes, or if a mapping made it."""
        sharding = self._checkpoint._table.sharding(self._number)
        return sharding if isinstance(sharding, Layout) and not self._checkpoint._is_made(self._number) else None

    def holdings(self) -> tuple[Holding, ...]:
        """Return which ranks held which region when the tensor was saved. Regions without elements are left out.

        A tensor that a mapping makes of others was held by none.

        >>> import tempfile
        >>> from shardwright import checkpoint
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     checkpoint.save({"w": torch.ones(2, 3)}, folder)
        ...     checkpoint.open(folder)["w"].holdings()
        (Holding(region=Region[0:2, 0:3], ranks=(0,)),)
        """
        if self._checkpoint._is_made(self._number):
            return ()
        sharding = self._checkpoint._table.sharding(self._number)
        if isinstance(sharding, Layout):
            return sharding.regions()
        pairs = zip(sharding.regions, sharding.ranks, strict=True)
        return tuple(Holding(region, (rank,)) for region, rank in pairs if not region.is_empty)

    def stored_ranges(self, region: Region | None = None) -> list[StoredRange]:
        """Return the bytes of the files that reading a region reads: every block that it touches, in full.

        Without a region, those of the whole tensor. Nothing is read.

        >>> import tempfile
        >>> from shardwright import checkpoint
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     checkpoint.save({"w": torch.ones(1 << 20)}, folder)
        ...     with checkpoint.open(folder) as saved:
        ...         [part.nbytes for part in saved["w"].stored_ranges(Region((5,), (1,)))]
        [1048576]
        """
        return self._checkpoint._stored_ranges(self._number, Region.whole(self.shape) if region is None else region)

    def __len__(self) -> int:
        if not self.shape:
            raise ArgumentTypeError(f"len() of {self!r}, which has no dimensions")
        return self.shape[0]

    def __getitem__(self, index: Any) -> Out:
        slicing, dim, layers = slicing_of(index, self.shape).by_layers(self.shape, self.dtype.itemsize, BLOCK)
        return self._convert(slicing.take(self._checkpoint._read(self._number, layers, dim)))

    def tensor(self) -> Tensor:
        """Read all of it as a plain tensor."""
        return self._checkpoint._read(self._number, [Region.whole(self.shape)])

    def numpy(self) -> npt.NDArray[Any]:
        """Read all of it as an array."""
        return _as_array(self.tensor())

    def _convert(self, tensor: Tensor) -> Out:
        return cast(Out, _as_array(tensor) if self._gives_arrays else tensor)

    def __repr__(self) -> str:
        return f"LazyTensor({self.name!r}, {list(self.shape)}, {str(self.dtype).removeprefix('torch.')})"


@final
class Checkpoint(Mapping[str, LazyTensor[Tensor]]):
    """An open checkpoint: its tensors by name, read when they are indexed; its values, its tree, its metadata.

    It shows one save, even if another one replaces it later. Close it, or use it in a `with` block.

    >>> import tempfile
    >>> from shardwright import checkpoint
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     checkpoint.save({"model": {"w": torch.ones(2, 2)}, "epoch": 3}, folder)
    ...     with checkpoint.open(folder) as saved:
    ...         list(saved), saved.value("epoch"), saved.tree()
    (['model.w'], 3, {'model': {'w': LazyTensor('model.w', [2, 2], float32)}, 'epoch': 3})
    """

    def __init__(
        self, storage: Storage, manifest: Contents, readers: dict[int, Reader], mapping: Rules | None = None
    ) -> None:
        self._storage, self._manifest = storage, manifest
        self._mapping, self._table = mapping, manifest.tensors
        self._mapped: MappedEntries | None = None
        self._readers = readers
        self._files: dict[int, FileReader] = {}
        self._closed = False
        # A tensor's own name comes first; other paths that lead to it are also names of it.
        self._numbers = dict(manifest.tensors.index)
        entries = stored_entries(manifest.tree, None)
        if mapping is not None:
            mapped = self._mapped = map_entries(entries, manifest.tensors, mapping, {})
            entries, self._table, self._numbers = mapped.entries, mapped.table, {}
        for entry in entries:
            if isinstance(entry.content, StoredTensor):
                self._numbers.setdefault(entry.name, entry.content.number)

    @property
    def save_id(self) -> str:
        """The id of the save, unique to it."""
        return self._manifest.save_id

    @property
    def files(self) -> dict[str, int]:
        """The data files, each with its size in bytes."""
        manifest = self._manifest
        if isinstance(manifest, ForeignContents):
            sizes = {manifest.file_name(rank): self._reader(rank).size for rank in manifest.files}
            self._close_excess()
            return sizes
        return {manifest.file_name(rank): entry.size for rank, entry in manifest.files.items()}

    @property
    def format(self) -> str:
        """The format: "shardwright", "dcp" (PyTorch's distributed checkpoints), "huggingface" or "torch"."""
        return format_of(self._manifest)

    @property
    def metadata(self) -> Metadata:
        """The metadata in PyTorch's vocabulary: a view over the manifest."""
        return Metadata(self._manifest, getattr(self._storage, "path", None))

    def __getitem__(self, name: str) -> LazyTensor[Tensor]:
        return LazyTensor(self, name, self._number(name), gives_arrays=False)

    def numpy(self, name: str) -> LazyTensor[npt.NDArray[Any]]:
        """Return the same tensor, but reading numpy arrays: `ckpt.numpy("w")[2:4]`."""
        return LazyTensor(self, name, self._number(name), gives_arrays=True)

    def __contains__(self, name: object) -> bool:
        return name in self._numbers

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def value(self, path: str, *, rank: int = 0) -> Any:
        """Return the plain value under a path; of a `PerRank` value, that of `rank`."""
        leaves = {entry.name: entry.content for entry in self._entries(rank)}
        leaf = leaves.get(path)
        if isinstance(leaf, StoredValue):
            return leaf.value.value if isinstance(leaf.value, EnumValue) else leaf.value
        if leaf is not None:
            raise MissingNameError(f"{path!r} is a tensor, not a plain value; use ckpt[{path!r}]")
        plain = [name for name, content in leaves.items() if isinstance(content, StoredValue)]
        raise MissingNameError(f"no plain value is stored under {path!r}{_did_you_mean(path, plain)}")

    def plain_values(self, *, rank: int = 0) -> dict[str, Any]:
        """Return all plain values by path, empty containers included; of `PerRank` values, those of `rank`.

        >>> import tempfile
        >>> from shardwright import checkpoint
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     checkpoint.save({"w": torch.ones(2), "run": {"epoch": 3, "tags": []}}, folder)
        ...     checkpoint.open(folder).plain_values()
        {'run.epoch': 3, 'run.tags': []}
        """
        return {
            entry.name: entry.content.value.value if isinstance(entry.content.value, EnumValue) else entry.content.value
            for entry in self._entries(rank)
            if isinstance(entry.content, StoredValue)
        }

    def tree(self, *, rank: int = 0, codecs: Mapping[type, Codec] | None = None) -> Any:
        """Return the state as it was saved, with lazy tensors in place of tensors and arrays.

        Of `PerRank` values, it has that of `rank`; if that rank has none, a `PerRank` of the others'. Of a checkpoint
        that was opened with a mapping, it is one dict of tensors and values by name.
        """
        if self._mapped is not None:
            arrays = {entry.name for entry in self._mapped.entries if _is_array(entry)}
            lazy = {name: self.numpy(name) if name in arrays else self[name] for name in self}
            return {**lazy, **self.plain_values(rank=rank)}
        names = self._manifest.tensors.names
        return build(
            self._manifest.tree,
            lambda number, is_array: LazyTensor(self, names[number], number, gives_arrays=is_array),
            {codec.name: codec for codec in (codecs or {}).values()},
            rank,
        )

    def close(self) -> None:
        """Close its files; nothing can be read afterwards."""
        self._closed = True
        readers, self._readers, self._files = self._readers, {}, {}
        for reader in readers.values():
            reader.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Checkpoint({self._storage!r}, save {self.save_id}, {len(self)} tensors)"

    def _number(self, name: str) -> int:
        number = self._numbers.get(name)
        if number is None:
            raise MissingNameError(f"no tensor is stored under {name!r}{_did_you_mean(name, list(self._numbers))}")
        return number

    def _read(self, number: int, regions: Sequence[Region], dim: int = 0) -> Tensor:
        """Read regions of a tensor that differ along one dimension, and concatenate them along it.

        Their files are opened and their sizes checked before memory is allocated for them.
        """
        if self._closed:
            raise CheckpointError(f"{self!r} is closed")
        if self._mapped is not None and self._mapped.is_made(number):
            made = [assemble(self._mapped, number, region, self._read_one) for region in regions]
            return made[0] if len(made) == 1 else torch.cat(made, dim)
        parts = [(part, index) for index, region in enumerate(regions) for part in self._parts(number, region)]
        try:
            files = {rank: self._file(rank) for rank in sorted({part.rank for part, _ in parts})}
            table = self._manifest.tensors
            size = list(regions[0].size)
            if len(regions) > 1:
                size[dim] = len(regions)
            result = torch.empty(size, dtype=DTYPES[table.dtypes[number]])
            layers = [result] if len(regions) == 1 else [result.narrow(dim, index, 1) for index in range(len(regions))]
            for rank, file in files.items():
                file.read(
                    [
                        Destination(p, layers[index], regions[index], result.dtype)
                        for p, index in parts
                        if p.rank == rank
                    ]
                )
        finally:
            self._close_excess()
        check_bools([Target(table.names[number], number, result, Region.whole(size), result.dtype)])
        return result

    def _is_made(self, number: int) -> bool:
        """Return True if a mapping makes a tensor of others."""
        return self._mapped is not None and self._mapped.is_made(number)

    def _read_one(self, number: int, region: Region) -> Tensor:
        return self._read(number, [region])

    def _entries(self, rank: int | None) -> list[StoredEntry]:
        """Return the stored entries for a rank; with a mapping, the values alone."""
        stored = stored_entries(self._manifest.tree, rank)
        return stored if self._mapping is None else map_values(stored, self._mapping)

    def _parts(self, number: int, region: Region) -> list[Part]:
        return self._manifest.locator.parts(number, region)

    def _stored_ranges(self, number: int, region: Region) -> list[StoredRange]:
        if self._mapped is not None and self._mapped.is_made(number):
            pieces = [piece for piece in self._mapped.pieces(number, region) if isinstance(piece, MappedPiece)]
            found = [self._stored_ranges(self._mapped.numbers[each.name], each.source.region) for each in pieces]
            return list(dict.fromkeys(each for ranges in found for each in ranges))
        itemsize = int(self._manifest.tensors.itemsizes[number])
        ranges = []
        for part in self._parts(number, region):
            if isinstance(self._manifest, ForeignContents):
                reader = self._file(part.rank)
                assert isinstance(reader, ForeignFileReader)  # that of this format
                ranges += [StoredRange(reader.file.name, *bounds) for bounds in reader.stored_ranges(part, itemsize)]
                continue
            file = self._manifest.file(part.rank)
            begin = file.header_size + int(file.plan.starts[part.chunk])
            blocks = blocks_of_part(part, itemsize)
            for run in np.split(blocks, np.flatnonzero(np.diff(blocks) > 1) + 1):  # adjacent blocks are one range
                end = min((int(run[-1]) + 1) * BLOCK, int(file.plan.nbytes[part.chunk]))
                ranges.append(StoredRange(file.name, begin + int(run[0]) * BLOCK, begin + end))
        return ranges

    def _file(self, rank: int) -> FileReader:
        """Return the file of a rank, with its header verified."""
        file = self._files.get(rank)
        if file is None:
            file = self._files[rank] = file_reader(self._reader(rank), self._manifest, rank)
        return file

    def _reader(self, rank: int) -> Reader:
        reader = self._readers.get(rank)
        if reader is None:
            try:
                reader = self._readers[rank] = open_file(self._storage, self._manifest, rank)
            except MissingKeyError as error:
                raise CorruptionError(
                    f"a file is missing: {error}; if another checkpoint was saved here meanwhile, open it again"
                ) from error
        return reader

    def _close_excess(self) -> None:
        """Close files beyond the limit."""
        while len(self._readers) > _MAX_OPEN:
            rank, reader = next(iter(self._readers.items()))
            del self._readers[rank]
            self._files.pop(rank, None)
            reader.close()


def _is_array(entry: StoredEntry) -> bool:
    return isinstance(entry.content, StoredTensor) and entry.content.is_array


def open(path: str | os.PathLike[str] | Storage, *, mapping: Rules | None = None) -> Checkpoint:
    """Open a checkpoint: its contents are known at once, and tensors are read by slices, in this process alone.

    >>> import tempfile
    >>> from shardwright import checkpoint
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     checkpoint.save({"layers": [torch.arange(6).reshape(2, 3)]}, folder)
    ...     with checkpoint.open(folder) as saved:
    ...         saved["layers.0"][1, :2]
    tensor([3, 4])

    With a `mapping`, a `shardwright.Mapping` from what is stored, it has the names and shapes of the mapping; a slice
    reads what it is made of. If a background save of this process to the same location is running, it is waited for
    first, as in `load`.
    """
    storage = as_storage(path)
    check_mapping(mapping, None)
    wait_for_saves_to(location_id(storage))

    def open_contents(manifest: Contents) -> Checkpoint:
        return Checkpoint(storage, manifest, _open_files(storage, manifest), mapping)

    return read_current(storage, open_contents)


def _open_files(storage: Storage, manifest: Contents) -> dict[int, Reader]:
    """Open all data files, unless there are too many: then each is opened on demand."""
    readers: dict[int, Reader] = {}
    if len(manifest.files) > _MAX_OPEN:
        return readers
    try:
        for rank in manifest.files:
            readers[rank] = open_file(storage, manifest, rank)
    except BaseException:
        for reader in readers.values():
            reader.close()
        raise
    return readers


def _as_array(tensor: Tensor) -> npt.NDArray[Any]:
    try:
        return np.asarray(tensor.numpy())
    except TypeError:
        raise ArgumentTypeError(
            f"numpy has no {str(tensor.dtype).removeprefix('torch.')}; read a torch tensor, and convert it"
        ) from None


def _did_you_mean(name: str, names: list[str]) -> str:
    close = difflib.get_close_matches(name, names[:20000], n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""
