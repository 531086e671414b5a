"""Which rank of a host reads which blocks for all of them, and when: file by file, each worked out as it comes. Pure.

The wanted blocks of all files are laid end to end; each rank takes a stretch of them, of whole files where it can, and
reads it in segments. Which blocks of a chunk are wanted is worked out once for all tensors that are stored and asked
for alike. A few files are all looked into beforehand. Of thousands the manifest says how much they hold, which is
enough to deal them out: each is looked into when its turn comes, and not kept.
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
from shardwright.checkpoint.reading.host_sharing import ReadRequest, Run, blocks_of, boxes_meeting, regions_of
from shardwright.layout import Region

__all__ = ["ReadAssignment", "Segment"]

_FEW = 64  # files that are all planned beforehand
_SNAP = 16  # the part of a rank's stretch that it gives up, or takes on, to end with a file


class Segment(NamedTuple):
    """What is read at once: some runs of blocks of one file."""

    file: FilePlan
    runs: list[Run]


class _FileRange(NamedTuple):
    """A file of which a rank reads from `low` to `high`, out of `weight`."""

    rank: int
    low: int
    high: int
    weight: int


class _Blocks(NamedTuple):
    """Blocks of a file in order: of which chunk, which of it, and where it begins and ends among all of these."""

    chunks: Integers
    numbers: Integers
    starts: Integers
    ends: Integers

    @property
    def nbytes(self) -> int:
        """Bytes of all."""
        return int(self.ends[-1]) if len(self.ends) else 0


@final
class ReadAssignment:
    """Who reads what that these ranks of a host ask for, in segments of at most `slot` bytes.

    >>> from shardwright.layout import Layout, Mesh, Replicate
    >>> whole = Layout(Mesh((1,)), [Replicate()], (3 << 18,))
    >>> locator = ChunkLocator(TensorTable.of(["w"], ["float32"], [4], [whole]))
    >>> assignment = ReadAssignment([ReadRequest(0, whole)], locator, [0, 1], slot=2 << 20)
    >>> [[(run.first, run.blocks) for one in assignment.segments(place) for run in one.runs] for place in (0, 1)]
    [[(0, 2)], [(2, 1)]]
    """

    def __init__(self, requests: Iterable[ReadRequest], locator: ChunkLocator, ranks: Sequence[int], slot: int) -> None:
        self._locator, self._slot, self.places = locator, slot, len(ranks)
        self._alike, self._groups = _group(requests, locator.table, ranks)
        files, self._largest = self._touched()
        self._few = len(files) <= _FEW
        weigh = self._weigh if self._few else locator.data_size
        weights = {rank: weight for rank in files if (weight := weigh(rank))}
        self._file_ranges = _file_ranges(weights, len(ranks), slot)
        self.files = frozenset(weights)
        self._known = [list(self._cut(place)) for place in range(len(ranks))] if self._few else None
        self.rounds = max(map(self._count, range(len(ranks))))

    def files_of(self, place: int) -> list[int]:
        """The files that the rank at this place reads from."""
        return [part.rank for part in self._file_ranges[place]]

    def segments(self, place: int) -> Iterator[Segment]:
        """What the rank at this place reads: as many segments as there are rounds, or fewer."""
        return self._cut(place) if self._known is None else iter(self._known[place])

    def _cut(self, place: int) -> Iterator[Segment]:
        for rank, low, high, weight in self._file_ranges[place]:
            plan = self._locator.file(rank) if self._few else self._locator.passing(rank)
            blocks = self._blocks(plan)
            # By where blocks begin, so that of two neighbours each block is one's.
            bounds = [low * blocks.nbytes // weight, high * blocks.nbytes // weight]
            first, last = np.searchsorted(blocks.starts, bounds).tolist()
            while first < last:
                end = min(last, int(np.searchsorted(blocks.ends, blocks.starts[first] + self._slot, side="right")))
                yield Segment(plan, _runs(rank, _Blocks(*(column[first:end] for column in blocks))))
                first = end

    def _weigh(self, rank: int) -> int:
        """The wanted bytes of a file; a rank that wrote nothing need not have one."""
        return self._blocks(self._locator.file(rank)).nbytes if self._locator.data_size(rank) else 0

    def _count(self, place: int) -> int:
        """How many segments the rank at this place reads; where files are not looked into yet, the most it can be."""
        if self._known is not None:
            return len(self._known[place])
        count = 0
        for _, low, high, _ in self._file_ranges[place]:
            nbytes = high - low + BLOCK  # what begins here may reach over its end
            # A segment ends where the next block has no room: so near the end of the slot, or two make more than one.
            count += min(nbytes // (self._slot - self._largest + 1), 2 * nbytes // self._slot) + 1
        return count

    def _touched(self) -> tuple[list[int], int]:
        """The files that may hold something wanted, and the bytes of the largest block in them."""
        found: set[int] = set()
        largest = 0
        for kind, itemsize, wanted in self._groups:
            ranks, _, sizes = boxes_meeting(self._locator.table.shardings[kind], wanted)
            found.update(ranks.tolist())
            largest = max(largest, itemsize * int(sizes.prod(axis=1).max(initial=0)))
        return sorted(found), min(largest, BLOCK)

    def _blocks(self, plan: FilePlan) -> _Blocks:
        """The blocks of a file that any of the ranks wants."""
        alike = self._alike[plan.tensors]
        cut = np.zeros(len(alike), bool)
        cut[list(plan.boxes)] = True  # their regions are their own
        order = np.flatnonzero((alike >= 0) & ~cut)
        order = order[np.argsort(alike[order], kind="stable")]
        together = np.split(order, np.flatnonzero(np.diff(alike[order])) + 1)
        together += [np.array([chunk]) for chunk in np.flatnonzero((alike >= 0) & cut)]
        chunks, numbers = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for some in together:
            if len(some):
                _, itemsize, wanted = self._groups[alike[some[0]]]
                blocks = _wanted_blocks(plan.region(int(some[0])), itemsize, wanted)
                chunks.append(np.repeat(some, len(blocks)))
                numbers.append(np.tile(blocks, len(some)))
        all_chunks, all_numbers = np.concatenate(chunks), np.concatenate(numbers)
        order = np.lexsort((all_numbers, all_chunks))
        all_chunks, all_numbers = all_chunks[order], all_numbers[order]
        sizes = np.minimum(BLOCK, plan.nbytes[all_chunks] - all_numbers * BLOCK)
        ends = np.cumsum(sizes)
        return _Blocks(all_chunks, all_numbers, ends - sizes, ends)


class _Group(NamedTuple):
    """Tensors of one kind that are asked for alike: what the ranks want of each, every region once."""

    kind: int
    itemsize: int
    wanted: list[Region]


def _group(requests: Iterable[ReadRequest], table: TensorTable, ranks: Sequence[int]) -> tuple[Integers, list[_Group]]:
    """The group of each tensor of the table, -1 for what nobody asks for, and the groups."""
    regions: dict[int, list[Region]] = {}
    asked: dict[int, dict[int, None]] = {}
    for number, sharding in requests:
        if id(sharding) not in regions:
            regions[id(sharding)] = [region for rank in ranks for region in regions_of(sharding, rank)]
        asked.setdefault(number, {})[id(sharding)] = None
    alike = np.full(len(table), -1, np.int64)
    known: dict[tuple[int, int, tuple[int, ...]], int] = {}
    groups: list[_Group] = []
    kinds, itemsizes = table.kinds.tolist(), table.itemsizes.tolist()
    for number, ways in asked.items():
        key = (kinds[number], itemsizes[number], tuple(ways))
        if key not in known:
            known[key] = len(groups)
            wanted = dict.fromkeys(region for way in ways for region in regions[way] if not region.is_empty)
            groups.append(_Group(*key[:2], list(wanted)))
        alike[number] = known[key]
    return alike, groups


def _wanted_blocks(chunk: Region, itemsize: int, wanted: Iterable[Region]) -> Integers:
    """The blocks of a chunk that hold any of the wanted regions."""
    count = -(-chunk.volume * itemsize // BLOCK)
    found = [np.empty(0, np.int64)]
    for region in wanted:
        common = chunk.intersect(region)
        if common is not None:
            if count == 1 or common == chunk:
                return np.arange(count)
            found.append(blocks_of(common, chunk, itemsize))
    return np.unique(np.concatenate(found))


def _file_ranges(weights: dict[int, int], parts: int, slot: int) -> list[list[_FileRange]]:
    """The files laid end to end and cut in even parts; a cut near the end of a file is made there."""
    ranks = list(weights)
    ends = [0, *accumulate(weights.values())]
    total = ends[-1]
    near = max(slot // 2, total // parts // _SNAP)
    cuts = []
    for part in range(parts + 1):
        cut = part * total // parts
        place = bisect(ends, cut)
        nearest = min(ends[place - 1 : place + 1], key=lambda end: abs(end - cut))
        cuts.append(nearest if abs(nearest - cut) <= near else cut)
    found: list[list[_FileRange]] = []
    for low, high in pairwise(cuts):
        found.append([])
        for place in range(bisect(ends, low) - 1, len(ranks)):
            start, end = ends[place], ends[place + 1]
            if start >= high:
                break
            found[-1].append(_FileRange(ranks[place], max(low, start) - start, min(high, end) - start, end - start))
    return found


def _runs(rank: int, blocks: _Blocks) -> list[Run]:
    """Neighbouring blocks of a chunk as one, each where it lies in the segment."""
    begin = int(blocks.starts[0])
    found: list[Run] = []
    before, count = (-1, -1), 0
    for chunk, number, start in zip(*(column.tolist() for column in blocks[:3]), strict=True):
        if (chunk, number) == before:
            count += 1
            found[-1] = found[-1]._replace(blocks=count)
        else:
            found.append(Run(rank, chunk, number, 1, start - begin))
            count = 1
        before = (chunk, number + 1)
    return found
