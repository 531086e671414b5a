"""What a rank writes, and the offset of each chunk in its file: a function of the tensor table alone. Pure.

Chunks are ordered by itemsize, the largest first, then in the order of the state: the file has no gaps, and every chunk
is aligned to its elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np

from shardwright.checkpoint.format.replica_split import ReplicaSplit, replica_splits
from shardwright.checkpoint.format.split import boxes_of_range
from shardwright.checkpoint.format.tensor_table import Integers, Pieces, TensorTable
from shardwright.layout import Layout, Region

__all__ = ["FilePlan", "file_plan"]


@final
@dataclass(frozen=True, eq=False)
class FilePlan:
    """The chunks of one rank's file, in order: their tensor, size in bytes, and offset in the data.

    `boxes` has the regions of chunks that are not all that the rank holds of their tensor.
    """

    rank: int
    tensors: Integers
    nbytes: Integers
    starts: Integers
    boxes: dict[int, Region]
    table: TensorTable

    @property
    def size(self) -> int:
        """The total number of bytes of data."""
        return int(self.starts[-1] + self.nbytes[-1]) if self.starts.size else 0

    def region(self, chunk: int) -> Region:
        """Return the region of its tensor that a chunk holds."""
        box = self.boxes.get(chunk)
        if box is not None:
            return box
        kind = self._kinds[chunk]
        region = self._regions.get(kind)
        if region is None:
            sharding = self.table.shardings[kind]
            assert isinstance(sharding, Layout)  # the chunks of Pieces are boxes
            region = self._regions[kind] = sharding.region(self.rank)
        return region

    def chunks_of(self, tensor: int) -> list[int]:
        """Return the chunks of a tensor, in order."""
        chunks: list[int] = self._by_tensor[
            np.searchsorted(self._sorted, tensor) : np.searchsorted(self._sorted, tensor, side="right")
        ].tolist()
        return chunks

    @cached_property
    def first_chunks(self) -> list[int]:
        """The first chunk of every tensor of the table: -1 if the tensor is not in the file."""
        first = np.full(len(self.table), -1, np.int64)
        first[self.tensors[::-1]] = np.arange(len(self.tensors))[::-1]
        chunks: list[int] = first.tolist()
        return chunks

    @cached_property
    def _by_tensor(self) -> Integers:
        return np.argsort(self.tensors, kind="stable")

    @cached_property
    def _sorted(self) -> Integers:
        return self.tensors[self._by_tensor]

    @cached_property
    def _kinds(self) -> list[int]:
        kinds: list[int] = self.table.kinds[self.tensors].tolist()
        return kinds

    @cached_property
    def _regions(self) -> dict[int, Region]:
        """The regions that the rank holds, by kind of sharding; filled on demand."""
        return {}


def file_plan(table: TensorTable, rank: int) -> FilePlan:
    """Plan the file of a rank.

    >>> from shardwright.layout import Mesh, Replicate
    >>> whole = Layout(Mesh((2,)), [Replicate()], (4, 1024))
    >>> plan = file_plan(TensorTable.of(["w"], ["float32"], [4], [whole]), 1)
    >>> plan.region(0), plan.nbytes.tolist()
    (Region[2:4, 0:1024], [8192])
    """
    tensors: list[Integers] = []
    nbytes: list[Integers] = []
    split_chunks: list[tuple[int, Region]] = []
    for share in replica_splits(table, rank):
        unsplit, pieces = _part(share, rank, table)
        tensors.append(share.tensors[unsplit])
        nbytes.append(share.volumes[unsplit] * share.itemsizes[unsplit])
        split_chunks += pieces
    for kind, sharding in enumerate(table.shardings):
        if isinstance(sharding, Pieces):
            regions = [sharding.regions[number] for number in sharding.of_rank(rank)]
            split_chunks += [
                (int(tensor), region) for tensor in np.flatnonzero(table.kinds == kind) for region in regions
            ]
    split_chunks += _empty(table, rank)
    split_tensors = np.array([tensor for tensor, _ in split_chunks], np.int64)
    volumes = np.array([region.volume for _, region in split_chunks], np.int64)
    tensor_of = np.concatenate([*tensors, split_tensors])
    sizes = np.concatenate([*nbytes, volumes * table.itemsizes[split_tensors]])
    order = np.lexsort((tensor_of, -table.itemsizes[tensor_of]))  # stable: boxes of one tensor stay in order
    before = len(tensor_of) - len(split_chunks)
    boxes = {}
    if split_chunks:
        position_of = np.empty(len(order), np.int64)
        position_of[order] = np.arange(len(order))
        boxes = {int(position_of[before + number]): region for number, (_, region) in enumerate(split_chunks)}
    sizes = sizes[order]
    return FilePlan(rank, tensor_of[order], sizes, np.cumsum(sizes) - sizes, boxes, table)


def _part(share: ReplicaSplit, rank: int, table: TensorTable) -> tuple[Integers, list[tuple[int, Region]]]:
    """Return this rank's part of a split: the tensors it writes in full, and the boxes of those that are split."""
    count = len(share.ranks)
    full = share.volumes > 0
    if count == 1:
        return np.flatnonzero(full), []
    index = share.ranks.index(rank)
    low, high = share.bound(index), share.bound(index + 1)
    starts = share.ends - share.volumes * share.itemsizes
    touched = np.flatnonzero(full & (share.ends > low) & (starts < high))
    inside = (starts[touched] >= low) & (share.ends[touched] <= high)
    pieces = []
    unsplit = [touched[inside]]
    for number in touched[~inside].tolist():
        first, last = share.point(number, low), share.point(number, high)
        tensor = int(share.tensors[number])
        if (first, last) == (0, int(share.volumes[number])):
            unsplit.append(np.array([number]))
        elif first < last:
            sharding = table.sharding(tensor)
            assert isinstance(sharding, Layout)  # only layouts have replicas
            pieces += [(tensor, box) for box in boxes_of_range(sharding.region(rank), first, last)]
    return np.concatenate(unsplit), pieces


def _empty(table: TensorTable, rank: int) -> list[tuple[int, Region]]:
    """Return tensors without elements: the first rank that has one writes an empty chunk, so that a file lists it."""
    chunks = []
    for kind, sharding in enumerate(table.shardings):
        if 0 not in sharding.shape:
            continue
        first = sharding.mesh.ranks[0] if isinstance(sharding, Layout) else min(sharding.ranks, default=0)
        if first == rank and not (isinstance(sharding, Pieces) and sharding.of_rank(rank)):
            chunks += [(int(tensor), Region.whole(sharding.shape)) for tensor in np.flatnonzero(table.kinds == kind)]
    return chunks
