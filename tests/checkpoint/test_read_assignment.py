"""Read assignment on a host: every requested block is read once, by file, without listing thousands of files."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.checkpoint.format import locate as find
from shardwright.checkpoint.format.data_file import BLOCK, FileEntry
from shardwright.checkpoint.format.locate import ChunkLocator, Part
from shardwright.checkpoint.format.tensor_table import Integers, Pieces, Sharding, TensorTable
from shardwright.checkpoint.format.write_layout import FilePlan, file_plan
from shardwright.checkpoint.reading import read_assignment as dealing
from shardwright.checkpoint.reading.data_reader import Destination, copy_window
from shardwright.checkpoint.reading.host_sharing import ReadRequest, blocks_of_part, regions_of, shared
from shardwright.checkpoint.reading.read_assignment import ReadAssignment
from shardwright.errors import FormatError
from shardwright.layout import Layout, Mesh, Region, Replicate, Shard
from shardwright.testing.strategies import layouts

Blocks = set[tuple[int, int, int]]


@st.composite
def stored_and_wanted(draw: st.DrawFn) -> tuple[TensorTable, list[ReadRequest]]:
    """Tensors of several placings, some alike, cut small or into many blocks; and what is asked for of some of them."""
    few = draw(st.lists(layouts(partial=False), min_size=1, max_size=4))
    shardings: list[Sharding] = []
    for layout in [draw(st.sampled_from(few)) for _ in range(draw(st.integers(1, 6)))]:
        if draw(st.booleans()):
            shape = (layout.shape[0] * draw(st.sampled_from([1, 1 << 15])), *layout.shape[1:]) if layout.shape else ()
            shardings.append(Layout(layout.mesh, [Shard(0) if shape else Replicate()] * layout.mesh.ndim, shape))
        elif draw(st.booleans()):
            shardings.append(layout)
        else:
            held = layout.regions()
            shardings.append(Pieces(layout.shape, tuple(r for r, _ in held), tuple(ranks[-1] for _, ranks in held)))
    sizes = [draw(st.sampled_from([1, 4, 16])) for _ in shardings]
    table = TensorTable.of([f"t{n}" for n in range(len(shardings))], [f"x{n}" for n in sizes], sizes, shardings)
    requests = []
    for number, sharding in enumerate(shardings):
        dim = draw(st.integers(-1, len(sharding.shape) - 1))
        way = Replicate() if dim < 0 else Shard(dim)
        requests += [ReadRequest(number, Layout(Mesh((6,)), [way], sharding.shape))] * draw(st.integers(0, 2))
    return table, requests


def with_sizes(table: TensorTable) -> ChunkLocator:
    """As a manifest makes it: it knows of every file how much it holds; a rank that has nothing has none."""
    ranks = {0}
    for sharding in table.shardings:
        ranks.update(sharding.ranks if isinstance(sharding, Pieces) else sharding.mesh.ranks)
    sizes = {rank: file_plan(table, rank).size for rank in ranks}
    return ChunkLocator(table, {rank: FileEntry(size + 4096, 4096, "") for rank, size in sizes.items() if size})


def blocks_of(assignment: ReadAssignment, locator: ChunkLocator, slot: int) -> Blocks:
    """All blocks that are read; each segment fits its slot, its runs lie end to end, and no block comes twice."""
    found: Blocks = set()
    for place in range(assignment.size):
        segments = list(assignment.segments(place))
        assert len(segments) <= assignment.rounds
        assert {segment.file.rank for segment in segments} <= set(assignment.files_of(place)) <= assignment.files
        for plan, runs in segments:
            end = 0
            for run in runs:
                assert (run.rank, run.at) == (plan.rank, end)
                end += min(run.blocks * BLOCK, int(locator.file(run.rank).nbytes[run.chunk]) - run.first * BLOCK)
                blocks = {(run.rank, run.chunk, run.first + n) for n in range(run.blocks)}
                assert not blocks & found
                found |= blocks
            assert 0 < end <= slot
    return found


@pytest.mark.parametrize("few", [0, 64])
@given(stored=stored_and_wanted(), data=st.data())
def test_every_requested_block_is_read_once(
    few: int, stored: tuple[TensorTable, list[ReadRequest]], data: st.DataObject
) -> None:
    """The same blocks as one finds part by part, whether files are looked into beforehand or not."""
    table, requests = stored
    ranks = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True))
    slot = data.draw(st.sampled_from([1, 2, 4])) * BLOCK
    locator = with_sizes(table)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dealing, "_MAX_PLANNED", few)
        assignment = ReadAssignment(requests, locator, ranks, slot)
        found = blocks_of(assignment, locator, slot)
    assert found == {
        (part.rank, part.chunk, block)
        for ask in requests
        for rank in ranks
        for region in regions_of(ask.sharding, rank)
        for part in locator.parts(ask.number, region)
        for block in blocks_of_part(part, int(table.itemsizes[ask.number])).tolist()
    }


def many_files(ranks: int, tensors: int) -> tuple[TensorTable, list[ReadRequest]]:
    """Tensors of three shapes, cut by rows over many ranks, and asked for by columns."""
    shapes = [(ranks * (1 + number % 3), 16) for number in range(tensors)]
    stored = [Layout(Mesh((ranks,)), [Shard(0)], shape) for shape in shapes]
    table = TensorTable.of([f"t{n}" for n in range(tensors)], ["float32"] * tensors, [4] * tensors, stored)
    return table, [ReadRequest(n, Layout(Mesh((4,)), [Shard(1)], shape)) for n, shape in enumerate(shapes)]


def data_of(plan: FilePlan, values: list[torch.Tensor]) -> torch.Tensor:
    """What a rank's file holds behind its header."""
    chunks = [values[n][plan.region(chunk).slices()].reshape(-1) for chunk, n in enumerate(plan.tensors.tolist())]
    return torch.cat(chunks).view(torch.uint8)


def test_columns_read_from_rows_of_100_ranks_equal_numpy() -> None:
    table, requests = many_files(ranks=100, tensors=7)
    locator = with_sizes(table)
    values = [torch.arange(100 * (1 + n % 3) * 16, dtype=torch.float32).view(-1, 16) + 1e5 * n for n in range(7)]
    assignment = ReadAssignment(requests, locator, range(4), slot=BLOCK)
    wanted = [[ask.sharding.region(rank) for ask in requests] for rank in range(4)]  # type: ignore[union-attr]  # layouts
    filled = [[torch.full(region.size, torch.nan) for region in regions] for regions in wanted]
    for place in range(4):
        for plan, runs in assignment.segments(place):
            data = data_of(plan, values)
            for run in runs:
                nbytes, number = int(plan.nbytes[run.chunk]), int(plan.tensors[run.chunk])
                start = int(plan.starts[run.chunk])
                for rank in range(4):
                    frame, chunk = wanted[rank][number], plan.region(run.chunk)
                    common = frame.intersect(chunk)
                    assert common is not None
                    part = Part(run.rank, run.chunk, common, chunk)
                    where = Destination(part, filled[rank][number], frame, torch.float32)
                    copy_window(where, data[start : start + nbytes].clone(), 0, nbytes)
    for rank in range(4):
        for number in range(7):
            columns = values[number].numpy()[:, 4 * rank : 4 * rank + 4]
            np.testing.assert_array_equal(filled[rank][number].numpy(), columns)


def test_a_plan_over_thousands_of_files_opens_none_and_assigns_complete_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table, requests = many_files(ranks=4096, tensors=30)
    size = file_plan(table, 0).size
    locator = ChunkLocator(table, {rank: FileEntry(size + 4096, 4096, "") for rank in range(4096)})
    planned: list[int] = []
    monkeypatch.setattr(find, "file_plan", lambda table, rank: planned.append(rank) or file_plan(table, rank))
    judged: list[Region] = []
    numbers = dealing._wanted_blocks

    def counting(chunk: Region, itemsize: int, wanted: list[Region]) -> Integers:
        judged.append(chunk)
        return numbers(chunk, itemsize, wanted)

    monkeypatch.setattr(dealing, "_wanted_blocks", counting)
    assert all(shared(requests, locator, range(4)))
    assignment = ReadAssignment(requests, locator, range(4), slot=4 * BLOCK)
    assert (planned, judged) == ([], [])
    assert [assignment.files_of(place) for place in range(4)] == [
        list(range(place * 1024, (place + 1) * 1024)) for place in range(4)
    ]
    first = next(assignment.segments(2))
    assert (first.file.rank, len(first.runs)) == (2048, 30)
    assert planned == [2048]
    assert len(judged) == 3  # one for each shape, not for each tensor


def test_planning_raises_for_files_that_are_unlisted_or_listed_as_empty() -> None:
    table, requests = many_files(ranks=100, tensors=2)
    sizes = {rank: FileEntry(file_plan(table, rank).size + 4096, 4096, "") for rank in range(100)}
    missing = {rank: size for rank, size in sizes.items() if rank != 55}
    with pytest.raises(FormatError, match="lists no file of rank 55, but tensors are stored in it"):
        ReadAssignment(requests, ChunkLocator(table, missing), range(4), BLOCK)
    with pytest.raises(FormatError, match="lists no data in the file of rank 55, but tensors are stored in it"):
        ReadAssignment(requests, ChunkLocator(table, {**sizes, 55: FileEntry(4096, 4096, "")}), range(4), BLOCK)
    lying = ReadAssignment(requests, ChunkLocator(table, {**sizes, 3: FileEntry(5000, 4096, "")}), range(4), BLOCK)
    with pytest.raises(FormatError, match="the file of rank 3 has 192 bytes of data, but the manifest says 904"):
        list(lying.segments(0))
