"""Layouts answer as splitting a real tensor by `torch.chunk` does."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import weakref
from importlib import import_module

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright import Layout, Mesh, Partial, Placement, Ragged, Region, Replicate, Shard
from shardwright.errors import ArgumentTypeError, LayoutError, MeshError, PlacementError, RegionError
from shardwright.testing.strategies import layouts, regions


def chunks(tensor: torch.Tensor, count: int, dim: int) -> list[torch.Tensor]:
    """`torch.chunk`, with the empty chunks that it leaves out."""
    pieces = list(torch.chunk(tensor, count, dim)) if tensor.size(dim) else []
    return pieces + [tensor.narrow(dim, tensor.size(dim), 0)] * (count - len(pieces))


def cut_with_torch(layout: Layout, coordinate: tuple[int, ...]) -> torch.Tensor:
    """The elements at one place of the mesh, by splitting a real tensor."""
    part = torch.arange(int(np.prod(layout.shape))).reshape(layout.shape)
    for mesh_dim in layout.order:
        placement, here = layout.placements[mesh_dim], coordinate[mesh_dim]
        if isinstance(placement, Shard):
            part = chunks(part, layout.mesh.shape[mesh_dim], placement.dim)[here]
        elif isinstance(placement, Ragged):
            part = torch.split(part, list(placement.sizes), placement.dim)[here]
    return part


@given(layouts())
def test_every_rank_holds_the_result_of_splitting_the_tensor(layout: Layout) -> None:
    whole = torch.arange(int(np.prod(layout.shape))).reshape(layout.shape)
    table = layout.table()
    for row, rank in enumerate(layout.mesh.ranks):
        expected = cut_with_torch(layout, layout.mesh.coordinate(rank))
        region = layout.region(rank)
        assert torch.equal(whole[region.slices()], expected)
        assert layout.local_shape(rank) == tuple(expected.shape)
        assert table.ranks[row] == rank
        assert (tuple(table.offsets[row]), tuple(table.sizes[row])) == (region.offset, region.size)


@given(layouts())
def test_the_regions_of_a_layout_tile_the_tensor(layout: Layout) -> None:
    holdings = layout.regions()
    assert Region.whole(layout.shape).covers(region for region, _ in holdings)
    listed = {rank: region for region, ranks in holdings for rank in ranks}
    for rank in layout.mesh.ranks:
        region = layout.region(rank)
        assert listed.get(rank, region) == region
        assert (rank in listed) == (not region.is_empty)


@given(layouts(), st.data())
def test_holders_of_a_region_are_the_ranks_that_overlap_it(layout: Layout, data: st.DataObject) -> None:
    region = data.draw(regions(Region.whole(layout.shape)))
    expected = {}
    for rank in layout.mesh.ranks:
        part = layout.region(rank).intersect(region) if not region.is_empty else None
        if part is not None:
            expected[rank] = part
    found = {rank: part for part, ranks in layout.holders(region) for rank in ranks}
    assert found == expected


@given(layouts())
def test_replicas_hold_the_same_region_and_differ_only_along_replicated_dimensions(layout: Layout) -> None:
    for rank in layout.mesh.ranks:
        mine = layout.mesh.coordinate(rank)
        expected = tuple(
            other
            for other in layout.mesh.ranks
            if all(
                a == b or placement.is_replicate()
                for a, b, placement in zip(mine, layout.mesh.coordinate(other), layout.placements, strict=True)
            )
        )
        assert layout.replicas(rank) == expected
        assert {layout.region(other) for other in expected} == {layout.region(rank)}


@given(layouts())
def test_equal_layouts_are_one_object(layout: Layout) -> None:
    assert Layout(layout.mesh, layout.placements, layout.shape, layout.order) is layout
    assert pickle.loads(pickle.dumps(layout)) is layout
    assert Layout.from_json(json.loads(json.dumps(layout.to_json()))) is layout
    assert copy.deepcopy(layout) is layout
    assert layout.replace() is layout
    assert hash(layout) == hash(layout.replace())


def test_the_order_in_which_mesh_dimensions_split_is_explicit() -> None:
    mesh = Mesh((2, 2), ("dp", "tp"))
    usual = Layout(mesh, [Shard(0), Shard(0)], (8,))
    other = Layout(mesh, [Shard(0), Shard(0)], (8,), order=("tp", "dp"))
    assert [str(usual.region(rank)) for rank in range(4)] == ["[0:2]", "[2:4]", "[4:6]", "[6:8]"]
    assert [str(other.region(rank)) for rank in range(4)] == ["[0:2]", "[4:6]", "[2:4]", "[6:8]"]
    assert str(usual) == "[8] (dp: S(0), tp: S(0))"
    assert str(other) == "[8] (dp: S(0)@1, tp: S(0)@0)"


def test_an_order_without_effect_gives_the_same_layout() -> None:
    mesh = Mesh((2, 2, 2))
    placements = [Shard(0), Replicate(), Shard(1)]
    assert Layout(mesh, placements, (4, 4), order=(2, 1, 0)) is Layout(mesh, placements, (4, 4))


def test_negative_dimensions_count_from_the_end() -> None:
    assert Layout(Mesh((2,)), [Shard(-1)], (4, 6)) is Layout(Mesh((2,)), [Shard(1)], (4, 6))
    assert Layout(Mesh((2,)), [Ragged(-1, (1, 5))], (4, 6)).placements == (Ragged(1, (1, 5)),)


def test_str_and_repr_are_readable() -> None:
    mesh = Mesh((2, 4), ("dp", "tp"))
    assert str(Layout(mesh, [Shard(0), Replicate()], (64, 128))) == "[64, 128] (dp: S(0), tp: R)"
    assert str(Layout(mesh, [Partial(), Shard(1)], (64, 128))) == "[64, 128] (dp: P(sum), tp: S(1))"
    assert str(Layout(Mesh((2,)), [Ragged(0, (1, 3))], (4,))) == "[4] (0: S(0: 1+3))"
    assert repr(Layout(Mesh((2,)), [Shard(0)], (4,))) == "Layout([4] (0: S(0)), Mesh(2))"


def test_placements_of_pytorch_are_accepted() -> None:
    theirs = import_module("torch.distributed.tensor")
    mesh = Mesh((2, 2, 2, 2))
    given_ = [theirs.Shard(0), theirs.Replicate(), theirs.Partial("max"), Shard(1)]
    assert Layout(mesh, given_, (4, 4)).placements == (Shard(0), Replicate(), Partial("max"), Shard(1))


@pytest.mark.parametrize("shape", [(8,), (16, 3), (24,)])
def test_strided_shards_of_pytorch_become_an_order(shape: tuple[int, ...]) -> None:
    """Fully sharded over dp on top of tensor parallel over tp: tp cuts first, though dp stands left of it."""
    types = import_module("torch.distributed.tensor.placement_types")
    mesh = Mesh((2, 2), ("dp", "tp"))
    theirs = Layout(mesh, [types._StridedShard(0, split_factor=2), types.Shard(0)], shape)
    assert theirs is Layout(mesh, [Shard(0), Shard(0)], shape, order=("tp", "dp"))


def test_strided_shards_of_pytorch_nest_in_three_dimensions() -> None:
    types = import_module("torch.distributed.tensor.placement_types")
    strided = types._StridedShard
    mesh = Mesh((2, 3, 5), ("a", "b", "c"))
    for factors, order in [
        ((15, 5, 1), "cba"),
        ((5, 5, 1), "cab"),
        ((3, 1, 1), "bac"),
        ((1, 5, 1), "acb"),
        ((15, 1, 1), "bca"),
    ]:
        placements = [strided(0, split_factor=f) if f > 1 else types.Shard(0) for f in factors]
        layout = Layout(mesh, placements, (60,))
        assert layout is Layout(mesh, [Shard(0)] * 3, (60,), order=tuple(order)), (factors, layout)


def test_unreferenced_layouts_are_garbage_collected() -> None:
    layout = Layout(Mesh((3,)), [Shard(0)], (12345, 7))
    gone = weakref.ref(layout)
    layout.regions()
    del layout
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("bad", [-1, 4, 99])
def test_a_rank_outside_the_mesh_raises(bad: int) -> None:
    with pytest.raises(MeshError, match=f"rank {bad} is not in Mesh\\(2, 2\\): its ranks are 0 to 3"):
        Layout(Mesh((2, 2)), [Shard(0), Replicate()], (4,)).region(bad)


MESH = Mesh((2, 2), ("dp", "tp"))


NONSENSE = {
    r"Mesh\(dp=2, tp=2\) has 2 dimensions, but 1 placements were given: \(S\(0\)\)": (
        PlacementError,
        lambda: Layout(MESH, [Shard(0)], (4,)),
    ),
    r"S\(2\) on mesh dimension tp is out of range: a tensor of shape \(4, 4\) has 2": (
        PlacementError,
        lambda: Layout(MESH, [Shard(0), Shard(2)], (4, 4)),
    ),
    r"S\(-3\) on mesh dimension dp": (PlacementError, lambda: Layout(MESH, [Shard(-3), Replicate()], (4, 4))),
    "has 0 dimensions": (PlacementError, lambda: Layout(MESH, [Shard(0), Replicate()], ())),
    r"must not have negative sizes, got \(4, -1\)": (
        LayoutError,
        lambda: Layout(MESH, [Shard(0), Replicate()], (4, -1)),
    ),
    "must be a sequence with one placement per mesh dimension": (
        ArgumentTypeError,
        lambda: Layout(MESH, Shard(0), (4,)),
    ),
    "expected Shard.*, got str: 'S0'": (ArgumentTypeError, lambda: Layout(MESH, ["S0", Replicate()], (4,))),
    "expected a Mesh.*, got str: 'mesh'": (ArgumentTypeError, lambda: Layout("mesh", [Shard(0)], (4,))),
    r"S\(0: 1\+2\) add up to 3, but dimension 0 of shape \(4,\) has 4": (
        PlacementError,
        lambda: Layout(MESH, [Ragged(0, (1, 2)), Replicate()], (4,)),
    ),
    "has 3 sizes, but mesh dimension dp has 2 ranks": (
        PlacementError,
        lambda: Layout(MESH, [Ragged(0, (1, 2, 1)), Replicate()], (4,)),
    ),
    "must come first": (PlacementError, lambda: Layout(MESH, [Shard(0), Ragged(0, (1, 3))], (4,))),
    "must name each of the 2 dimensions": (MeshError, lambda: Layout(MESH, [Shard(0), Shard(0)], (4,), order=(0, 0))),
    "'pp' is not in": (MeshError, lambda: Layout(MESH, [Shard(0), Shard(0)], (4,), order=("dp", "pp"))),
    "must be a sequence of mesh dimensions": (
        ArgumentTypeError,
        lambda: Layout(MESH, [Shard(0), Shard(0)], (4,), order="dp"),
    ),
    r"\[3:6\] is not inside": (
        RegionError,
        lambda: Layout(MESH, [Shard(0), Shard(0)], (4,)).holders(Region((3,), (3,))),
    ),
    "Shard dimension must be an int, got str: 'rows'": (ArgumentTypeError, lambda: Shard("rows")),
    "unknown Partial op 'median': expected one of sum": (PlacementError, lambda: Partial("median")),
    r"must not be negative, got \(3, -1\)": (PlacementError, lambda: Ragged(0, (3, -1))),
    "unknown placement kind 'ring'": (PlacementError, lambda: Placement.from_json({"kind": "ring"})),
    r"at least one rank, got shape \(2, 0\)": (MeshError, lambda: Mesh((2, 0))),
    "needs 2 names, got 1": (MeshError, lambda: Mesh((2, 2), ("a",))),
    "names must be unique": (MeshError, lambda: Mesh((2, 2), ("a", "a"))),
    "must be a sequence of str": (ArgumentTypeError, lambda: Mesh((2,), "ab")),
    "ranks must be unique, got 1 twice": (MeshError, lambda: Mesh((2,), ranks=(1, 1))),
    "ranks must not be negative": (MeshError, lambda: Mesh((2,), ranks=(0, -1))),
    "needs 2 ranks, got 3": (MeshError, lambda: Mesh((2,), ranks=(0, 1, 2))),
    "'ep' is not in": (MeshError, lambda: MESH.dim("ep")),
    "2 is out of range": (MeshError, lambda: MESH.dim(2)),
    r"\(0, 2\) is not in": (MeshError, lambda: MESH.rank_at((0, 2))),
}


@pytest.mark.parametrize("text", NONSENSE)
def test_invalid_arguments_raise_with_the_value_and_the_rule(text: str) -> None:
    error, make = NONSENSE[text]
    with pytest.raises(error, match=text):
        make()


@given(st.integers(0, 30), st.integers(1, 8))
def test_shard_sizes_and_offsets_equal_torch_chunk(size: int, count: int) -> None:
    chunks = list(torch.arange(size).chunk(count)) if size else []
    for rank in range(count):
        length, offset = Shard.local_shard_size_and_offset(size, count, rank)
        expected = chunks[rank].tolist() if rank < len(chunks) else []
        assert list(range(offset, offset + length)) == expected


@pytest.mark.parametrize("arguments", [(4, 0, 0), (4, 2, 2), (4, 2, -1), (-1, 2, 0)])
def test_sizes_of_chunks_out_of_range_raise(arguments: tuple[int, int, int]) -> None:
    with pytest.raises(PlacementError, match="chunks are numbered from 0"):
        Shard.local_shard_size_and_offset(*arguments)
