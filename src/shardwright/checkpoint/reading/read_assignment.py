"""Assign to each rank of a host the blocks that it reads for all of them, file by file, lazily. Pure.

The wanted blocks of all files are concatenated; each rank takes a range of them, made of whole files where possible,
and reads it in segments. The wanted blocks of a chunk are computed once for all tensors with equal stored and requested
shardings. If there are few files, all are planned in advance. If there are thousands, they are divided by their sizes
in the manifest, and each is planned when its turn comes, and not kept.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, final

import numpy as np

from shardwright.checkpoint.format.data_file import BLOCK
from shardwright.checkpoint.format.locate import ChunkLocator
from shardwright.checkpoint.format.tensor_table import Integers, TensorTable
from shardwright.checkpoint.format.write_layout import FilePlan
from shardwright.checkpoint.reading.host_sharing import ReadRequest, Run, blocks_of, boxes_intersecting, regions_of
from shardwright.layout import Region

__all__ = ["ReadAssignment", "Segment"]

_MAX_PLANNED = 64  # up to this many files are planned in advance
_ROUNDING = 16  # a rank's range grows or shrinks by up to this fraction to end with a file


class Segment(NamedTuple):
    """What is read at once: runs of blocks of one file."""

    file: FilePlan
    runs: list[Run]


class _FileRange(NamedTuple):
    """A rank reads `low` to `high`, out of `weight`, of the file of `rank`."""

    rank: int
    low: int
    high: int
    weight: int


class _Blocks(NamedTuple):
    """Blocks of a file in order: their chunks, their indices in the chunk, and their range among all of these."""

    chunks: Integers
    numbers: Integers
    starts: Integers
    ends: Integers

    @property
    def nbytes(self) -> int:
        """The total number of bytes."""
        return int(self.ends[-1]) if len(self.ends) else 0


@final
class ReadAssignment:
    """Which rank of a host reads which blocks for these requests, in segments of at most `slot` bytes.

    >>> from shardwright.layout import Layout, Mesh, Replicate
    >>> whole = Layout(Mesh((1,)), [Replicate()], (3 << 18,))
    >>> locator = ChunkLocator(TensorTable.of(["w"], ["float32"], [4], [whole]))
    >>> assignment = ReadAssignment([ReadRequest(0, whole)], locator, [0, 1], slot=2 << 20)
    >>> [[(run.first, run.blocks) for one in assignment.segments(place) for run in one.runs] for place in (0, 1)]
    [[(0, 2)], [(2, 1)]]
    """

    def __init__(self, requests: Iterable[ReadRequest], locator: ChunkLocator, ranks: Sequence[int], slot: int) -> None:
        self._locator, self._slot, self.size = locator, slot, len(ranks)
        self._group_of, self._groups = _group(requests, locator.table, ranks)
        files, self._largest = self._files_to_read()
        self._plans_all = len(files) <= _MAX_PLANNED
        weigh = self._weigh if self._plans_all else locator.data_size
        weights = {rank: weight for rank in files if (weight := weigh(rank))}
        self._file_ranges = _file_ranges(weights, len(ranks), slot)
        self.files = frozenset(weights)
        self._known = [list(self._segments(index)) for index in range(len(ranks))] if self._plans_all else None
        self.rounds = max(map(self._count, range(len(ranks))))

    def files_of(self, index: int) -> list[int]:
        """Return the files that the rank with this index reads."""
        return [part.rank for part in self._file_ranges[index]]

    def segments(self, index: int) -> Iterator[Segment]:
        """Yield what the rank with this index reads: as many segments as there are rounds, or fewer."""
        return self._segments(index) if self._known is None else iter(self._known[index])

    def _segments(self, index: int) -> Iterator[Segment]:
        for rank, low, high, weight in self._file_ranges[index]:
            plan = self._locator.file(rank) if self._plans_all else self._locator.plan_once(rank)
            blocks = self._blocks(plan)
            # Assign by block start, so each block belongs to exactly one rank.
            bounds = [low * blocks.nbytes // weight, high * blocks.nbytes // weight]
            first, last = np.searchsorted(blocks.starts, bounds).tolist()
            while first < last:
                end = min(last, int(np.searchsorted(blocks.ends, blocks.starts[first] + self._slot, side="right")))
                yield Segment(plan, _runs(rank, _Blocks(*(column[first:end] for column in blocks))))
                first = end

    def _weigh(self, rank: int) -> int:
        """Return the wanted bytes of a file; a rank that wrote nothing may not have one."""
        return self._blocks(self._locator.file(rank)).nbytes if self._locator.data_size(rank) else 0

    def _count(self, index: int) -> int:
        """Return the number of segments of the rank with this index, or an upper bound before files are planned."""
        if self._known is not None:
            return len(self._known[index])
        count = 0
        for _, low, high, _ in self._file_ranges[index]:
            nbytes = high - low + BLOCK  # a block that starts here may end after it
            # A segment is at least (slot - largest block), and two together exceed a slot.
            count += min(nbytes // (self._slot - self._largest + 1), 2 * nbytes // self._slot) + 1
        return count

    def _files_to_read(self) -> tuple[list[int], int]:
        """Return the files that may hold wanted blocks, and the size of the largest block in them."""
        files: set[int] = set()
        largest = 0
        for kind, itemsize, regions in self._groups:
            ranks, _, sizes = boxes_intersecting(self._locator.table.shardings[kind], regions)
            files.update(ranks.tolist())
            largest = max(largest, itemsize * int(sizes.prod(axis=1).max(initial=0)))
        return sorted(files), min(largest, BLOCK)

    def _blocks(self, plan: FilePlan) -> _Blocks:
        """Return the blocks of a file that any of the ranks wants."""
        groups_of = self._group_of[plan.tensors]
        is_split = np.zeros(len(groups_of), bool)
        is_split[list(plan.boxes)] = True  # split chunks have their own regions
        order = np.flatnonzero((groups_of >= 0) & ~is_split)
        order = order[np.argsort(groups_of[order], kind="stable")]
        chunk_groups = np.split(order, np.flatnonzero(np.diff(groups_of[order])) + 1)
        chunk_groups += [np.array([chunk]) for chunk in np.flatnonzero((groups_of >= 0) & is_split)]
        chunks, numbers = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for members in chunk_groups:
            if len(members):
                _, itemsize, regions = self._groups[groups_of[members[0]]]
                blocks = _wanted_blocks(plan.region(int(members[0])), itemsize, regions)
                chunks.append(np.repeat(members, len(blocks)))
                numbers.append(np.tile(blocks, len(members)))
        all_chunks, all_numbers = np.concatenate(chunks), np.concatenate(numbers)
        order = np.lexsort((all_numbers, all_chunks))
        all_chunks, all_numbers = all_chunks[order], all_numbers[order]
        sizes = np.minimum(BLOCK, plan.nbytes[all_chunks] - all_numbers * BLOCK)
        ends = np.cumsum(sizes)
        return _Blocks(all_chunks, all_numbers, ends - sizes, ends)


class _Group(NamedTuple):
    """Tensors of one kind with equal requests: the regions that the ranks want, each once."""

    kind: int
    itemsize: int
    wanted: list[Region]


def _group(requests: Iterable[ReadRequest], table: TensorTable, ranks: Sequence[int]) -> tuple[Integers, list[_Group]]:
    """Return the group of each tensor of the table (-1 if it is not requested), and the groups."""
    regions: dict[int, list[Region]] = {}
    requested: dict[int, dict[int, None]] = {}
    for number, sharding in requests:
        if id(sharding) not in regions:
            regions[id(sharding)] = [region for rank in ranks for region in regions_of(sharding, rank)]
        requested.setdefault(number, {})[id(sharding)] = None
    groups_of = np.full(len(table), -1, np.int64)
    group_index: dict[tuple[int, int, tuple[int, ...]], int] = {}
    groups: list[_Group] = []
    kinds, itemsizes = table.kinds.tolist(), table.itemsizes.tolist()
    for number, shardings in requested.items():
        key = (kinds[number], itemsizes[number], tuple(shardings))
        if key not in group_index:
            group_index[key] = len(groups)
            wanted = dict.fromkeys(
                region for sharding_id in shardings for region in regions[sharding_id] if not region.is_empty
            )
            groups.append(_Group(*key[:2], list(wanted)))
        groups_of[number] = group_index[key]
    return groups_of, groups


def _wanted_blocks(chunk: Region, itemsize: int, regions: Iterable[Region]) -> Integers:
    """Return the blocks of a chunk that intersect any of the regions."""
    count = -(-chunk.volume * itemsize // BLOCK)
    blocks = [np.empty(0, np.int64)]
    for region in regions:
        common = chunk.intersect(region)
        if common is not None:
            if count == 1 or common == chunk:
                return np.arange(count)
            blocks.append(blocks_of(common, chunk, itemsize))
    return np.unique(np.concatenate(blocks))


def _file_ranges(weights: dict[int, int], parts: int, slot: int) -> list[list[_FileRange]]:
    """Concatenate the files and divide them evenly; a boundary near the end of a file is moved there."""
    ranks = list(weights)
    ends = [0, *accumulate(weights.values())]
    total = ends[-1]
    near = max(slot // 2, total // parts // _ROUNDING)
    boundaries = []
    for part in range(parts + 1):
        ideal = part * total // parts
        index = bisect(ends, ideal)
        nearest = min(ends[index - 1 : index + 1], key=lambda end: abs(end - ideal))
        boundaries.append(nearest if abs(nearest - ideal) <= near else ideal)
    assigned: list[list[_FileRange]] = []
    for low, high in pairwise(boundaries):
        assigned.append([])
        for index in range(bisect(ends, low) - 1, len(ranks)):
            start, end = ends[index], ends[index + 1]
            if start >= high:
                break
            assigned[-1].append(_FileRange(ranks[index], max(low, start) - start, min(high, end) - start, end - start))
    return assigned


def _runs(rank: int, blocks: _Blocks) -> list[Run]:
    """Merge adjacent blocks of a chunk into runs, with their offsets in the segment."""
    begin = int(blocks.starts[0])
    runs: list[Run] = []
    previous, count = (-1, -1), 0
    for chunk, number, start in zip(*(column.tolist() for column in blocks[:3]), strict=True):
        if (chunk, number) == previous:
            count += 1
            runs[-1] = runs[-1]._replace(blocks=count)
        else:
            runs.append(Run(rank, chunk, number, 1, start - begin))
            count = 1
        previous = (chunk, number + 1)
    return runs
