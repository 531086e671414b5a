"""Write and read plans: every rank computes its part alone, and the parts agree."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.checkpoint.format import locate as find
from shardwright.checkpoint.format.data_file import FileEntry
from shardwright.checkpoint.format.locate import ChunkLocator
from shardwright.checkpoint.format.manifest import Manifest
from shardwright.checkpoint.format.replica_split import replica_splits
from shardwright.checkpoint.format.split import boxes_of_range, granularity
from shardwright.checkpoint.format.tensor_table import Pieces, Sharding, TensorTable
from shardwright.checkpoint.format.write_layout import file_plan
from shardwright.checkpoint.reading import host_sharing as sharing
from shardwright.checkpoint.reading.host_sharing import ReadRequest, shared
from shardwright.layout import Layout, Mesh, Region, Replicate, Shard
from shardwright.testing.strategies import layouts, regions


@st.composite
def shardings(draw: st.DrawFn) -> Sharding:
    """A layout without addends, or the same regions as explicit pieces."""
    layout = draw(layouts(partial=False))
    if draw(st.booleans()):
        return layout
    held = layout.regions()
    return Pieces(layout.shape, tuple(region for region, _ in held), tuple(ranks[-1] for _, ranks in held))


@st.composite
def tables(draw: st.DrawFn) -> TensorTable:
    chosen = draw(st.lists(shardings(), min_size=1, max_size=6))
    sizes = draw(st.lists(st.sampled_from([1, 2, 4, 8, 16]), min_size=len(chosen), max_size=len(chosen)))
    return TensorTable.of([f"t{n}" for n in range(len(chosen))], [f"x{n}" for n in sizes], sizes, chosen)


def held_by(sharding: Sharding, rank: int) -> list[Region]:
    if isinstance(sharding, Pieces):
        return [sharding.regions[number] for number in sharding.of_rank(rank)]
    return [sharding.region(rank)] if rank in sharding.mesh else []


def written_by(table: TensorTable) -> list[int]:
    ranks = {0}  # who tells of a tensor that nobody has a piece of
    for sharding in table.shardings:
        ranks.update(sharding.ranks if isinstance(sharding, Pieces) else sharding.mesh.ranks)
    return sorted(ranks)


@given(tables())
def test_every_element_is_written_once_by_a_rank_that_holds_it(table: TensorTable) -> None:
    chunks: dict[int, list[Region]] = {tensor: [] for tensor in range(len(table))}
    for rank in written_by(table):
        plan = file_plan(table, rank)
        for chunk, tensor in enumerate(plan.tensors.tolist()):
            region = plan.region(chunk)
            chunks[tensor].append(region)
            assert plan.nbytes[chunk] == region.volume * table.itemsizes[tensor]
            assert region.is_empty or any(box.contains(region) for box in held_by(table.sharding(tensor), rank))
    for tensor, found in chunks.items():
        assert Region.whole(table.shape(tensor)).covers(found)
        assert found, "a tensor without elements is told of, too"


@given(tables())
def test_a_data_file_has_no_gaps_and_aligned_chunks(table: TensorTable) -> None:
    for rank in written_by(table):
        plan = file_plan(table, rank)
        assert (plan.starts == np.cumsum(plan.nbytes) - plan.nbytes).all()
        assert not (plan.starts % table.itemsizes[plan.tensors]).any()


@given(tables(), st.data())
def test_the_chunks_located_for_a_region_tile_it(table: TensorTable, data: st.DataObject) -> None:
    locator = ChunkLocator(table)
    tensor = data.draw(st.integers(0, len(table) - 1))
    wanted = data.draw(regions(Region.whole(table.shape(tensor))))
    parts = locator.parts(tensor, wanted)
    if wanted.is_empty:
        assert not parts
        return
    assert wanted.covers([part.region for part in parts])
    for part in parts:
        plan = locator.file(part.rank)
        assert plan.tensors[part.chunk] == tensor
        assert plan.region(part.chunk) == part.chunk_region
        assert part.chunk_region.contains(part.region)


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 3000)), min_size=1, max_size=30), st.integers(2, 9))
def test_replicated_bytes_are_split_evenly_over_the_ranks(shapes: list[tuple[int, int]], ranks: int) -> None:
    mesh = Mesh((ranks,))
    table = TensorTable.of(
        [f"t{n}" for n in range(len(shapes))],
        ["float32"] * len(shapes),
        [4] * len(shapes),
        [Layout(mesh, [Replicate()], shape) for shape in shapes],
    )
    sizes = [file_plan(table, rank).size for rank in range(ranks)]
    best = sum(sizes) / ranks
    # Cuts are made at 4 KiB or a sixty-fourth of the share, and rounded at both ends.
    assert max(sizes) <= best * 1.05 + 2 * 4096


def test_a_large_replicated_tensor_with_few_rows_is_split_evenly() -> None:
    table = TensorTable.of(["w"], ["float32"], [4], [Layout(Mesh((3,)), [Replicate()], (2, 3_000_000))])
    sizes = [file_plan(table, rank).size for rank in range(3)]
    assert max(sizes) <= 1.05 * sum(sizes) / 3


@given(tables())
def test_all_replicas_agree_on_the_writer_of_every_range(table: TensorTable) -> None:
    plans = {rank: file_plan(table, rank) for rank in written_by(table)}
    for rank in plans:
        for share in replica_splits(table, rank):
            for number, tensor in enumerate(share.tensors.tolist()):
                layout = table.sharding(tensor)
                assert isinstance(layout, Layout)
                for writer, first, last in share.writers(number):
                    boxes = boxes_of_range(layout.region(writer), first, last)
                    assert [plans[writer].region(chunk) for chunk in plans[writer].chunks_of(tensor)] == boxes


@given(st.lists(st.integers(1, 6), min_size=0, max_size=4), st.data())
def test_a_range_of_a_region_is_a_few_boxes_in_order(size: list[int], data: st.DataObject) -> None:
    region = Region([7] * len(size), size)
    first = data.draw(st.integers(0, region.volume))
    last = data.draw(st.integers(first, region.volume))
    numbers = torch.arange(region.volume).reshape(size)
    boxes = boxes_of_range(region, first, last)
    taken = [numbers[box.slices(region)].reshape(-1) for box in boxes]
    assert torch.cat([numbers.new_empty(0), *taken]).tolist() == list(range(first, last))
    assert len(boxes) <= max(1, 2 * len(size) - 1)


@pytest.mark.parametrize("size", [(1, 1, 5), (100_000,), (3, 1 << 20), ()])
def test_the_granularity_divides_rows_or_is_small(size: tuple[int, ...]) -> None:
    step = granularity(size, 4, 1 << 20)
    assert 1 <= step * 4 <= max(4096, (1 << 20) // 64)


@given(regions(Region((3, 0, 2), (5, 4, 6))), st.sampled_from([1, 4]), st.sampled_from([8, 32, 64]))
def test_the_blocks_of_a_region_are_those_that_contain_its_bytes(wanted: Region, itemsize: int, block: int) -> None:
    chunk = Region((3, 0, 2), (5, 4, 6))
    numbers = np.arange(chunk.volume * itemsize).reshape(*chunk.size, itemsize) // block
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharing, "BLOCK", block)
        found = sharing.blocks_of(wanted, chunk, itemsize)
    assert found.tolist() == np.unique(numbers[wanted.slices(chunk)]).tolist()


def test_ranks_share_reads_for_columns_but_not_for_rows() -> None:
    rows = Layout(Mesh((4,)), [Shard(0)], (4096, 1024))
    columns = Layout(Mesh((4,)), [Shard(1)], (4096, 1024))
    locator = ChunkLocator(TensorTable.of(["w"], ["float32"], [4], [rows]))
    assert shared([ReadRequest(0, rows), ReadRequest(0, columns)], locator, range(4)) == [False, True]
    assert shared([ReadRequest(0, columns)], locator, [2]) == [False]


def test_the_manifest_of_10_000_tensors_on_4096_ranks_is_below_2_mb() -> None:
    names = [f"model.layers.{n // 10}.block.{n % 10}.weight" for n in range(10_000)]
    mesh = Mesh((4096,))
    layouts_ = [Layout(mesh, [Shard(0)], (1024 * (1 + n % 20), 128)) for n in range(10_000)]
    table = TensorTable.of(names, ["float32"] * 10_000, [4] * 10_000, layouts_)
    tree = ["d", *(item for n, name in enumerate(names) for item in (name, n))]
    files = {rank: FileEntry(1 << 30, 8192, "0" * 32) for rank in range(4096)}
    assert len(Manifest("abcdef", tree, table, files).encode()) < 2_000_000


def test_load_plans_only_the_files_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[int] = []
    monkeypatch.setattr(find, "file_plan", lambda table, rank: planned.append(rank) or file_plan(table, rank))
    rows = Layout(Mesh((4096,)), [Shard(0)], (409_600, 8))
    locator = ChunkLocator(TensorTable.of(["a", "b"], ["float32"] * 2, [4] * 2, [rows, rows]))
    mine = Layout(Mesh((512,)), [Shard(0)], (409_600, 8)).region(100)
    for tensor in (0, 1):
        assert mine.covers([part.region for part in locator.parts(tensor, mine)])
    assert sorted(planned) == list(range(800, 808))
