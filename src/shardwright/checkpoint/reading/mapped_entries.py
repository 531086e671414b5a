"""The stored entries as a mapping gives them: under other names, and tensors made of pieces of others. Pure."""

from __future__ import annotations

from collections.abc import Mapping as MappingABC
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import numpy as np

from shardwright.checkpoint.format.tensor_table import TensorTable
from shardwright.checkpoint.format.tree import StoredEntry, StoredTensor
from shardwright.errors import MappingError
from shardwright.interop.mapping import BoundMapping, Mapping
from shardwright.layout import Layout, Mesh, Replicate

__all__ = ["MappedEntries", "map_entries"]


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
    names: list[str] = []
    dtypes: list[str] = []
    sizes: list[int] = []
    shardings: list[Layout] = []
    for name, shape in bound.targets.items():
        if (source := bound.renamed(name)) is not None:
            entries.append(_renamed(of_tensors[source], name))
            continue
        first = _check_dtypes(bound, name, numbers, table)
        entries.append(StoredEntry(name, None, StoredTensor(len(table) + len(names), False), path=(name,), within="d"))
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
