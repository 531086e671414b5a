"""Where the stored bytes of a wanted region lie: which chunks of which files. Pure.

It computes the plans of those files only that hold something wanted, each once.
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
    """What a chunk of the file of `rank` holds of a wanted region: `region`, out of `chunk_region`."""

    rank: int
    chunk: int
    region: Region
    chunk_region: Region


class _Spot(NamedTuple):
    """A part of a wanted region, for all tensors of a kind: who holds it, out of what, and the chunks of its file."""

    region: Region
    ranks: tuple[int, ...]
    held: Region
    chunks: list[int] | None  # None where replicas share the writing


@final
class ChunkLocator:
    """The stored table, and what has been worked out of it.

    >>> from shardwright.layout import Layout, Mesh, Shard
    >>> table = TensorTable.of(["w"], ["float32"], [4], [Layout(Mesh((2,)), [Shard(0)], (4, 2))])
    >>> [(part.rank, part.region) for part in ChunkLocator(table).parts(0, Region((1, 0), (2, 2)))]
    [(0, Region[1:2, 0:2]), (1, Region[2:3, 0:2])]
    """

    def __init__(self, table: TensorTable, writers: Mapping[int, FileEntry] | None = None) -> None:
        self.table = table
        self._writers = writers  # the ranks that wrote a file, and its size, where that is known
        self._files: dict[int, FilePlan] = {}
        self._shares: dict[tuple[int, ...], ReplicaSplit] = {}
        self._kinds: list[int] = table.kinds.tolist()
        self._spots: dict[tuple[int, Region], list[_Spot]] = {}
        self._last: dict[int, tuple[Region, list[_Spot]]] = {}  # of each kind: most are asked for the same region

    def file(self, rank: int) -> FilePlan:
        """The plan of a rank's file."""
        plan = self._files.get(rank)
        if plan is None:
            if self._writers is not None and rank not in self._writers:
                raise FormatError(f"the manifest lists no file of rank {rank}, and tensors lie in it")
            plan = self._files[rank] = file_plan(self.table, rank)
        return plan

    def passing(self, rank: int) -> FilePlan:
        """The plan of a rank's file, for one who goes through thousands of them: it is not kept."""
        plan = self._files.get(rank)
        if plan is None:
            plan = file_plan(self.table, rank)
        if plan.size != self.data_size(rank):
            raise FormatError(
                f"the file of rank {rank} has {plan.size} bytes of data, and the manifest says {self.data_size(rank)}"
            )
        return plan

    def data_size(self, rank: int) -> int:
        """The bytes of data in a rank's file, as the manifest says, if there is one: then no file is planned."""
        if self._writers is None:
            return self.file(rank).size
        known = self._writers.get(rank)
        said = 0 if known is None else known.size - known.header_size
        if said > 0:
            return said
        if file_plan(self.table, rank).size:  # what is said to hold nothing is not opened, so nobody else would see it
            what = "no file" if known is None else "no data in the file"
            raise FormatError(f"the manifest lists {what} of rank {rank}, and tensors lie in it")
        return 0

    def parts(self, tensor: int, wanted: Region) -> list[Part]:
        """The chunks that hold a wanted region of a tensor, each with what it holds of it."""
        if wanted.is_empty:
            return []
        kind = self._kinds[tensor]
        last = self._last.get(kind)
        if last is not None and last[0] is wanted:
            spots = last[1]
        else:
            sharding = self.table.shardings[kind]
            if isinstance(sharding, Pieces):
                return self._listed(tensor, sharding, wanted)
            spots = self._spots_of(kind, sharding, wanted)
            self._last[kind] = wanted, spots
        found: list[Part] = []
        for region, ranks, held, chunks in spots:
            if chunks is not None:
                found.append(Part(ranks[0], chunks[tensor], region, held))
            else:
                found += self._shared(tensor, held, ranks, region)
        return found

    def _spots_of(self, kind: int, sharding: Layout, wanted: Region) -> list[_Spot]:
        found = self._spots.get((kind, wanted))
        if found is None:
            found = self._spots[kind, wanted] = [
                self._spot(sharding, holding, wanted) for holding in sharding.holders(wanted)
            ]
        return found

    def _spot(self, sharding: Layout, holding: Holding, wanted: Region) -> _Spot:
        region, ranks = holding
        held = sharding.region(ranks[0])
        chunks = self.file(ranks[0]).first_chunks if len(ranks) == 1 else None
        # One object for what is equal: it is compared for every tensor.
        return _Spot(wanted if region == wanted else region, ranks, wanted if held == wanted else held, chunks)

    def _shared(self, tensor: int, held: Region, ranks: tuple[int, ...], wanted: Region) -> list[Part]:
        share = self._shares.get(ranks)
        if share is None:
            share = self._shares[ranks] = replica_split(self.table, ranks)
        found = []
        for rank, first, last in share.writers(int(np.searchsorted(share.tensors, tensor))):
            boxes = boxes_of_range(held, first, last)
            for chunk, box in zip(self.file(rank).chunks_of(tensor), boxes, strict=True):
                common = box.intersect(wanted)
                if common is not None:
                    found.append(Part(rank, chunk, common, box))
        return found

    def _listed(self, tensor: int, sharding: Pieces, wanted: Region) -> list[Part]:
        found = []
        for number, (region, rank) in enumerate(zip(sharding.regions, sharding.ranks, strict=True)):
            common = region.intersect(wanted)
            if common is not None:
                plan = self.file(rank)
                place = sharding.of_rank(rank).index(number)
                found.append(Part(rank, plan.chunks_of(tensor)[place], common, region))
        return found
