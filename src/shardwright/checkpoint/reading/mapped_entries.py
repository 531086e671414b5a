"""The stored entries as a mapping gives them: under other names, and tensors made of pieces of others. Pure."""

from __future__ import annotations

from collections.abc import Mapping as MappingABC
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import numpy as np

from shardwright.checkpoint.format.tensor_table import TensorTable
from shardwright.checkpoint.format.tree import StoredEntry, StoredTensor, StoredValue
from shardwright.errors import MappingError
from shardwright.interop.mapping import BoundMapping, MappedPiece, Mapping, Padding
from shardwright.layout import Layout, Mesh, Region, Replicate

__all__ = ["MappedEntries", "map_entries", "map_values"]


@final
@dataclass(frozen=True)
class MappedEntries:
    """The entries, and the table of their tensors: the stored ones, and after them those that are made of others.

    `numbers` has the index of every stored tensor by name; `bound` says which pieces the others are made of.
    """

    entries: list[StoredEntry]
    table: TensorTable
    bound: BoundMapping
    numbers: dict[str, int]
    stored: int  # the number of stored tensors

    def is_made(self, number: int) -> bool:
        """Return True if a tensor of the table is made of others."""
        return number >= self.stored

    def pieces(self, number: int, region: Region) -> list[MappedPiece | Padding]:
        """Return the pieces of a region of a tensor that is made of others."""
        return self.bound.pieces(self.table.names[number], region)


def map_entries(
    stored: Sequence[StoredEntry],
    table: TensorTable,
    mapping: Mapping,
    targets: MappingABC[str, tuple[int, ...]],
) -> MappedEntries:
    """Return the entries as the mapping gives them; `targets` has the shapes of tensors of the state.

    Values and tensors of one rank (`PerRank`) only get other names.
    """
    numbers: dict[str, int] = {}
    entries: list[StoredEntry] = []
    of_tensors: dict[str, StoredEntry] = {}
    for entry in stored:
        if isinstance(entry.content, StoredTensor) and not entry.of_rank:
            if entry.name in numbers:
                raise MappingError(
                    f"the checkpoint has two tensors named {entry.name!r}, under different keys: a mapping needs one"
                )
            numbers[entry.name], of_tensors[entry.name] = entry.content.number, entry
        elif (name := mapping.renamed(entry.name)) is not None:
            entries.append(_renamed(entry, name))
    bound = mapping.bind({name: table.shape(number) for name, number in numbers.items()}, targets)
    keys = _Keys(bound, numbers)
    names: list[str] = []
    dtypes: list[str] = []
    sizes: list[int] = []
    shardings: list[Layout] = []
    for name, shape in bound.targets.items():
        if (source := bound.renamed(name)) is not None:
            entries.append(_renamed(of_tensors[source], name))
            continue
        first = _check_dtypes(bound, name, numbers, table)
        number = keys.number(name, len(table) + len(names))
        entries.append(StoredEntry(name, None, StoredTensor(number, False), path=(name,), within="d"))
        if number < len(table) + len(names):
            continue  # tied to one before it
        names.append(name)
        dtypes.append(table.dtypes[first])
        sizes.append(int(table.itemsizes[first]))
        shardings.append(Layout(Mesh((1,)), [Replicate()], shape))
    made = TensorTable.of(names, dtypes, sizes, shardings)
    joined = replace(
        table,
        names=(*table.names, *made.names),
        dtypes=(*table.dtypes, *made.dtypes),
        itemsizes=np.concatenate([table.itemsizes, made.itemsizes]),
        kinds=np.concatenate([table.kinds, made.kinds + len(table.shardings)]),
        shardings=(*table.shardings, *made.shardings),
    )
    # Those common to all ranks come first, as in what is stored.
    entries.sort(key=lambda entry: entry.of_rank)
    return MappedEntries(entries, joined, bound, numbers, len(table))


@final
class _Keys:
    """Finds tied tensors: those made of the same pieces of stored tensors that have several names."""

    def __init__(self, bound: BoundMapping, numbers: MappingABC[str, int]) -> None:
        self._bound, self._numbers = bound, numbers
        self._has_ties = len(set(numbers.values())) < len(numbers)
        self._known: dict[object, int] = {}

    def number(self, name: str, new: int) -> int:
        """Return the index of an earlier tensor that is tied to this one, or `new`."""
        if not self._has_ties:
            return new
        key = tuple(
            (self._numbers[piece.name], piece.source, piece.target) if isinstance(piece, MappedPiece) else piece
            for piece in self._bound.pieces(name)
        )
        return self._known.setdefault((self._bound.targets[name], key), new)


def map_values(stored: Sequence[StoredEntry], mapping: Mapping) -> list[StoredEntry]:
    """Return the plain values and empty containers under the names that the mapping gives them."""
    return [
        _renamed(entry, name)
        for entry in stored
        if isinstance(entry.content, StoredValue) and (name := mapping.renamed(entry.name)) is not None
    ]


def _renamed(entry: StoredEntry, name: str) -> StoredEntry:
    return entry if name == entry.name else entry._replace(name=name, keys=None)


def _check_dtypes(bound: BoundMapping, name: str, numbers: MappingABC[str, int], table: TensorTable) -> int:
    """Check that the sources of a target have one dtype; return the index of the first."""
    sources = [(source, numbers[source]) for source in bound.sources(name)]
    for source, number in sources[1:]:
        if table.dtypes[number] != table.dtypes[sources[0][1]]:
            raise bound.rule(name).error(
                f"it joins {sources[0][0]!r} of {table.dtypes[sources[0][1]]} and {source!r} of {table.dtypes[number]}"
            )
    return sources[0][1]
