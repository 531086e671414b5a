"""Locate the stored bytes of a region: which chunks of which files. Pure.

Only files that hold part of the region are planned, each once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, final

import numpy as np

from shardwright.checkpoint.format.data_file import FileEntry
from shardwright.checkpoint.format.replica_split import ReplicaSplit, replica_split
from shardwright.checkpoint.format.split import boxes_of_range
from shardwright.checkpoint.format.tensor_table import Pieces, TensorTable
from shardwright.checkpoint.format.write_layout import FilePlan, file_plan
from shardwright.errors import FormatError
from shardwright.layout import Holding, Layout, Region

__all__ = ["ChunkLocator", "Part"]


class Part(NamedTuple):
    """The part of a requested region that a chunk in the file of `rank` holds: `region`, out of `chunk_region`."""

    rank: int
    chunk: int
    region: Region
    chunk_region: Region


class _Location(NamedTuple):
    """Where a part of a requested region is stored, for all tensors of a kind (those with the same sharding)."""

    region: Region  # the part
    ranks: tuple[int, ...]  # the ranks that held it when it was saved
    chunk_region: Region  # what those ranks held
    chunks: list[int] | None  # by tensor, the chunk in the file of the only rank; None if replicas split the writing


@final
class ChunkLocator:
    """Locate regions of stored tensors in the data files.

    >>> from shardwright.layout import Layout, Mesh, Shard
    >>> table = TensorTable.of(["w"], ["float32"], [4], [Layout(Mesh((2,)), [Shard(0)], (4, 2))])
    >>> [(part.rank, part.region) for part in ChunkLocator(table).parts(0, Region((1, 0), (2, 2)))]
    [(0, Region[1:2, 0:2]), (1, Region[2:3, 0:2])]
    """

    def __init__(
        self,
        table: TensorTable,
        writers: Mapping[int, FileEntry] | None = None,
        plans: Mapping[int, FilePlan] | None = None,
    ) -> None:
        self.table = table
        self._entries = writers  # the files that were written, if known, by rank
        self._files: dict[int, FilePlan] = dict(plans or {})
        self._is_planned = plans is not None  # all files are, because another program wrote them
        self._splits: dict[tuple[int, ...], ReplicaSplit] = {}
        self._kinds: list[int] = table.kinds.tolist()
        self._locations: dict[tuple[int, Region], list[_Location]] = {}
        # The last region that was located, by kind: most tensors are requested with the same one.
        self._last: dict[int, tuple[Region, list[_Location]]] = {}

    def file(self, rank: int) -> FilePlan:
        """Return the plan of a rank's file."""
        plan = self._files.get(rank)
        if plan is None:
            if self._entries is not None and rank not in self._entries:
                raise FormatError(f"the manifest lists no file of rank {rank}, but tensors are stored in it")
            plan = self._files[rank] = file_plan(self.table, rank)
        return plan

    def plan_once(self, rank: int) -> FilePlan:
        """Return the plan of a rank's file without keeping it, for callers that iterate over thousands of files."""
        plan = self._files.get(rank)
        if self._is_planned and plan is not None:
            return plan
        if plan is None:
            plan = file_plan(self.table, rank)
        if plan.size != self.data_size(rank):
            raise FormatError(
                f"the file of rank {rank} has {plan.size} bytes of data, but the manifest says {self.data_size(rank)}"
            )
        return plan

    def data_size(self, rank: int) -> int:
        """Return the bytes of data in a rank's file, without planning the file if the manifest lists it."""
        if self._is_planned:
            return int(self._files[rank].nbytes.sum())
        if self._entries is None:
            return self.file(rank).size
        entry = self._entries.get(rank)
        listed = 0 if entry is None else entry.size - entry.header_size
        if listed > 0:
            return listed
        if file_plan(self.table, rank).size:  # a file listed as empty is not opened, so only this check finds the error
            missing = "no file" if entry is None else "no data in the file"
            raise FormatError(f"the manifest lists {missing} of rank {rank}, but tensors are stored in it")
        return 0

    def parts(self, tensor: int, requested: Region) -> list[Part]:
        """Return the chunks that hold a region of a tensor, each with the part it holds."""
        if requested.is_empty:
            return []
        kind = self._kinds[tensor]
        last = self._last.get(kind)
        if last is not None and last[0] is requested:
            locations = last[1]
        else:
            sharding = self.table.shardings[kind]
            if isinstance(sharding, Pieces):
                return self._pieces_parts(tensor, sharding, requested)
            locations = self._locate_kind(kind, sharding, requested)
            self._last[kind] = requested, locations
        parts: list[Part] = []
        for region, ranks, chunk_region, chunks in locations:
            if chunks is not None:
                parts.append(Part(ranks[0], chunks[tensor], region, chunk_region))
            else:
                parts += self._split_parts(tensor, chunk_region, ranks, region)
        return parts

    def _locate_kind(self, kind: int, sharding: Layout, requested: Region) -> list[_Location]:
        locations = self._locations.get((kind, requested))
        if locations is None:
            locations = self._locations[kind, requested] = [
                self._location(sharding, holding, requested) for holding in sharding.holders(requested)
            ]
        return locations

    def _location(self, sharding: Layout, holding: Holding, requested: Region) -> _Location:
        region, ranks = holding
        chunk_region = sharding.region(ranks[0])
        chunks = self.file(ranks[0]).first_chunks if len(ranks) == 1 else None
        # Use one object for equal regions: they are compared by identity for every tensor.
        region, chunk_region = (requested if box == requested else box for box in (region, chunk_region))
        return _Location(region, ranks, chunk_region, chunks)

    def _split_parts(self, tensor: int, chunk_region: Region, ranks: tuple[int, ...], requested: Region) -> list[Part]:
        split = self._splits.get(ranks)
        if split is None:
            split = self._splits[ranks] = replica_split(self.table, ranks)
        parts = []
        for rank, first, last in split.writers(int(np.searchsorted(split.tensors, tensor))):
            boxes = boxes_of_range(chunk_region, first, last)
            for chunk, box in zip(self.file(rank).chunks_of(tensor), boxes, strict=True):
                common = box.intersect(requested)
                if common is not None:
                    parts.append(Part(rank, chunk, common, box))
        return parts

    def _pieces_parts(self, tensor: int, sharding: Pieces, requested: Region) -> list[Part]:
        parts = []
        for number, (region, rank) in enumerate(zip(sharding.regions, sharding.ranks, strict=True)):
            common = region.intersect(requested)
            if common is not None:
                plan = self.file(rank)
                index = sharding.of_rank(rank).index(number)
                parts.append(Part(rank, plan.chunks_of(tensor)[index], common, region))
        return parts
