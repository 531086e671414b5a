"""The contents of another format's checkpoint, in the terms of our manifest: a tree, a table of tensors, files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, final

import numpy as np
import torch

from shardwright.checkpoint.format.locate import ChunkLocator
from shardwright.checkpoint.format.tensor_table import Pieces, TensorTable
from shardwright.checkpoint.format.tiling import tiles
from shardwright.checkpoint.format.values import DTYPES
from shardwright.checkpoint.format.write_layout import FilePlan
from shardwright.errors import FormatError, LayoutError
from shardwright.interop.formats.stored import ArchiveRange, Find, ForeignFile, Location
from shardwright.layout import Region
from shardwright.storage import LocalStorage

__all__ = ["ForeignContents", "StoredChunk", "TableBuilder", "dtype_name"]

_MAX_CORNERS = 1 << 12  # limit up to which an error says where chunks do not tile
_NAMES = {dtype: name for name, dtype in DTYPES.items() if str(dtype) == f"torch.{name}"}


class StoredChunk(NamedTuple):
    """A part of a tensor: its region, its file, its order in the file, and where it is there."""

    region: Region
    file: str
    order: int
    location: Location | Find


@final
@dataclass(frozen=True, eq=False)
class ForeignContents:
    """A checkpoint of another format: `format` says which; `save_id` identifies what was read of it.

    The other fields are those of our manifest; `files` are numbered as ours are by rank.

    >>> import tempfile, torch
    >>> from shardwright.interop.formats import read_foreign
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     torch.save({"w": torch.ones(2)}, f"{folder}/state.pt")
    ...     list(read_foreign(LocalStorage(folder)).tensors.names)
    ['w']
    """

    format: str
    save_id: str
    storage: LocalStorage
    tree: Any
    tensors: TensorTable
    files: Mapping[int, ForeignFile]

    @cached_property
    def locator(self) -> ChunkLocator:
        """Locates regions of tensors in the files."""
        return ChunkLocator(self.tensors, plans={rank: file.plan for rank, file in self.files.items()})

    @property
    def names(self) -> frozenset[str]:
        """The names of all files that hold tensors."""
        return frozenset(file.name for file in self.files.values())

    def file_name(self, rank: int) -> str:
        """Return the name of a file."""
        return self.files[rank].name


class TableBuilder:
    """Collects tensors and their chunks, and checks that the chunks of each tensor tile it."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._names: dict[str, int] = {}
        self._dtypes: list[str] = []
        self._itemsizes: list[int] = []
        self._pieces: list[Pieces] = []
        self._chunks: list[list[StoredChunk]] = []
        self._files: dict[str, int] = {}

    def add(self, name: str, dtype: torch.dtype, shape: Sequence[int], chunks: Sequence[StoredChunk]) -> int:
        """Add a tensor, and return its index."""
        if name in self._names:
            raise FormatError(f"{self._where}: two tensors have the name {name!r}")
        ordered = sorted((chunk for chunk in chunks if not chunk.region.is_empty), key=lambda each: each.order)
        for chunk in ordered:
            self._files.setdefault(chunk.file, len(self._files))
        self._check_tiling(name, tuple(shape), [chunk.region for chunk in ordered])
        self._names[name] = len(self._dtypes)
        self._dtypes.append(dtype_name(dtype, f"{self._where}: tensor {name!r}"))
        self._itemsizes.append(dtype.itemsize)
        ranks = tuple(self._files[chunk.file] for chunk in ordered)
        self._pieces.append(Pieces(tuple(shape), tuple(chunk.region for chunk in ordered), ranks))
        self._chunks.append(ordered)
        return len(self._dtypes) - 1

    def free_name(self, name: str) -> str:
        """Return this name for a tensor, with a number if another tensor has it, as in a save of ours."""
        name = name or "state"
        number = 2
        free = name
        while free in self._names:
            free = f"{name}~{number}"
            number += 1
        return free

    def _check_tiling(self, name: str, shape: tuple[int, ...], regions: Sequence[Region]) -> None:
        if not shape:
            fits = len(regions) == 1 and regions[0].size == ()
        elif 0 in shape:
            fits = not regions
        elif any(len(region.size) != len(shape) for region in regions):
            fits = False
        else:
            grid = len(regions), len(shape)
            offsets = np.array([region.offset for region in regions], np.int64).reshape(grid)
            sizes = np.array([region.size for region in regions], np.int64).reshape(grid)
            fits = tiles(shape, offsets, sizes)
        if not fits:
            detail = ""
            if shape and len(regions) << len(shape) <= _MAX_CORNERS:
                try:
                    detail = f": {Region.whole(shape).covers(regions)}"
                except LayoutError as error:
                    detail = f": {error}"
            raise FormatError(
                f"{self._where}: the {len(regions)} chunks of tensor {name!r} of shape {list(shape)} do not tile it"
                f"{detail}"
            )

    def build(
        self,
        kind: str,
        save_id: str,
        storage: LocalStorage,
        tree: Any,
        archives: Mapping[str, Sequence[ArchiveRange]] | None = None,
        least_sizes: Mapping[str, int] | None = None,
    ) -> ForeignContents:
        """Return the contents of a checkpoint of this format."""
        table = TensorTable(
            tuple(self._names),
            tuple(self._dtypes),
            np.array(self._itemsizes, np.int64),
            np.arange(len(self._names), dtype=np.int64),
            tuple(self._pieces),
        )
        files = {}
        chunks_of_files: list[list[tuple[int, int, StoredChunk]]] = [[] for _ in self._files]
        for tensor, chunks in enumerate(self._chunks):
            for chunk in chunks:
                chunks_of_files[self._files[chunk.file]].append((chunk.order, tensor, chunk))
        for name in archives or {}:  # also those that hold values only
            self._files.setdefault(name, len(self._files))
            chunks_of_files += [[] for _ in range(len(self._files) - len(chunks_of_files))]
        for name, number in self._files.items():
            listed = sorted(chunks_of_files[number], key=lambda each: each[:2])
            tensors = np.array([tensor for _, tensor, _ in listed], np.int64)
            volumes = np.array([chunk.region.volume for *_, chunk in listed], np.int64)
            plan = FilePlan(
                number,
                tensors,
                volumes * table.itemsizes[tensors],
                np.array([order for order, *_ in listed], np.int64),
                {index: chunk.region for index, (*_, chunk) in enumerate(listed)},
                table,
            )
            least = (least_sizes or {}).get(name, 0)
            files[number] = ForeignFile(
                name, plan, [chunk.location for *_, chunk in listed], (archives or {}).get(name, ()), least
            )
        return ForeignContents(kind, save_id, storage, tree, table, files)


def dtype_name(dtype: torch.dtype, where: str) -> str:
    """Return the name under which tables list a dtype.

    >>> dtype_name(torch.bfloat16, "here")
    'bfloat16'
    """
    name = _NAMES.get(dtype)
    if name is None:
        raise FormatError(f"{where} has the dtype {dtype}, which cannot be read")
    return name
