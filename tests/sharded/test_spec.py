"""Specs shard tensors as PyTorch's do, for every size, and users may write their own."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tilings import random_tiling
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as TorchTensorProperties
from torch.distributed._shard.sharding_spec import ChunkShardingSpec as TorchChunkShardingSpec
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec as TorchEnumerableShardingSpec

from shardwright import Mesh, Partial, Shard, sharded
from shardwright.errors import ArgumentTypeError, PlacementError, TilingError
from shardwright.sharded import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    LayoutShardingSpec,
    ShardedTensorMetadata,
    ShardingSpec,
    ShardMetadata,
    TensorProperties,
    infer_sharding_spec,
)
from shardwright.testing.strategies import layouts

SHAPES = st.lists(st.integers(0, 9), min_size=1, max_size=3)
PROPERTIES = TensorProperties()


def shards_of(spec: ShardingSpec, shape: Any) -> list[ShardMetadata]:
    metadata = spec.build_metadata(torch.Size(shape), PROPERTIES)
    assert metadata.size == torch.Size(shape)
    assert metadata.tensor_properties is PROPERTIES
    metadata.validate()
    return metadata.shards_metadata


@given(SHAPES, st.data())
def test_chunks_equal_pytorchs_with_empty_ones_at_the_end(shape: list[int], data: st.DataObject) -> None:
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    ranks = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=6))
    places = [f"rank:{rank}/cpu" for rank in ranks]
    ours = shards_of(ChunkShardingSpec(dim, places), shape)
    theirs = TorchChunkShardingSpec(dim % len(shape), places)
    reference = theirs.build_metadata(torch.Size(shape), TorchTensorProperties()).shards_metadata
    assert len(ours) == len(reference)
    for one, other in zip(ours, reference, strict=True):
        assert (one.shard_sizes, str(one.placement)) == (list(other.shard_sizes), str(other.placement))
        if other.shard_sizes[dim]:
            assert one.shard_offsets == list(other.shard_offsets)
        else:
            assert one.shard_offsets[dim] == shape[dim]


@given(st.integers(0, 2**32), SHAPES)
def test_the_inferred_spec_builds_the_same_shards(seed: int, shape: list[int]) -> None:
    shards = random_tiling(random.Random(seed), shape, 4)
    spec = infer_sharding_spec(shards, shape)
    assert shards_of(spec, shape) == shards


@given(SHAPES, st.integers(0, 2), st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_chunks_are_inferred_as_chunks(shape: list[int], dim: int, ranks: list[int]) -> None:
    spec = ChunkShardingSpec(dim % len(shape), [f"rank:{rank}/cpu" for rank in ranks])
    shards = shards_of(spec, shape)
    inferred = infer_sharding_spec(shards, shape)
    assert isinstance(inferred, ChunkShardingSpec)
    assert shards_of(inferred, shape) == shards


@pytest.mark.parametrize("shape", [[], [3]])
def test_specs_of_one_shard_or_none_are_inferred_for_scalars(shape: list[int]) -> None:
    whole = [ShardMetadata([0] * len(shape), shape, "rank:1/cpu")]
    assert shards_of(infer_sharding_spec(whole, shape), shape) == whole
    assert isinstance(infer_sharding_spec([], [0, 2]), EnumerableShardingSpec)


@given(layouts(partial=False))
def test_the_regions_of_a_layout_tile_exactly_and_the_first_ranks_own_them(layout: Any) -> None:
    spec = LayoutShardingSpec(layout.mesh, layout.placements, layout.order)
    shards = shards_of(spec, layout.shape)
    for shard in shards:
        holders = [rank for rank in layout.mesh.ranks if layout.region(rank) == shard.region]
        assert shard.placement.rank() in holders
        assert not shard.region.is_empty
    assert len({shard.region for shard in shards}) == len(shards)
    assert pickle.loads(pickle.dumps(spec)) == spec


def test_a_partial_layout_raises() -> None:
    spec = LayoutShardingSpec(Mesh((2,)), [Partial()])
    with pytest.raises(PlacementError, match=r"is partial, but shards hold complete values: use Shard\(dim\)"):
        spec.build_metadata(torch.Size([4]), PROPERTIES)
    on_gpu = LayoutShardingSpec(Mesh((2,)), [Shard(0)], device="cuda")
    assert [str(shard.placement) for shard in shards_of(on_gpu, [4])] == ["rank:0/cuda", "rank:1/cuda"]


def test_specs_can_be_pickled_and_copied() -> None:
    for spec in (
        ChunkShardingSpec(1, ["rank:0/cpu", "trainer1/cuda:1"]),
        EnumerableShardingSpec([ShardMetadata([0], [3], "rank:0/cpu"), ShardMetadata([3], [2], "rank:1/cpu")]),
        LayoutShardingSpec(Mesh((2, 2), ("a", "b")), [Shard(0), Shard(1)]),
    ):
        for copied in (pickle.loads(pickle.dumps(spec)), copy.deepcopy(spec)):
            assert copied == spec
            assert repr(copied) == repr(spec)


def test_pytorchs_spellings_are_accepted() -> None:
    places = ["rank:0/cpu", "rank:1/cpu"]
    ours, theirs = (made(dim=0, placements=places) for made in (ChunkShardingSpec, TorchChunkShardingSpec))
    assert (ours.dim, list(map(str, ours.placements))) == (theirs.dim, list(map(str, theirs.placements)))
    assert ChunkShardingSpec(0, theirs.placements) == ours  # their placements are taken as they are
    boxes = [ShardMetadata(shard_offsets=[0], shard_sizes=[3], placement="rank:0/cpu")]
    assert EnumerableShardingSpec(shards=boxes).shards == boxes
    assert len(TorchEnumerableShardingSpec.__dataclass_fields__) == len(EnumerableShardingSpec.__dataclass_fields__)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: ChunkShardingSpec("rows", ["rank:0/cpu"]), ArgumentTypeError, "dim must be an int, got 'rows'"),
        (lambda: ChunkShardingSpec(True, ["rank:0/cpu"]), ArgumentTypeError, "dim must be an int, got True"),
        (lambda: ChunkShardingSpec(0, []), PlacementError, "placements must not be empty"),
        (lambda: ChunkShardingSpec(0, ["cuda:first"]), PlacementError, "placement 'cuda:first': write rank:1/cuda:0"),
        (lambda: ChunkShardingSpec(0, ["rang:0/cpu"]), PlacementError, "placement 'rang:0/cpu': write rank:1/cuda:0"),
        (lambda: ChunkShardingSpec(0, [0]), ArgumentTypeError, "placement must be a str .*, got int: 0"),
        (lambda: sharded.empty(ChunkShardingSpec(2, ["rank:0/cpu"]), 3, 4), PlacementError, r"dim 2 .* size \[3, 4\]"),
        (lambda: sharded.empty(ChunkShardingSpec(0, ["rank:0/cpu"])), PlacementError, r"dim 0 .* size \[\]"),
        (lambda: sharded.empty(ChunkShardingSpec(0, ["rank:0/cpu"]), -3), ValueError, "negative"),
        (
            lambda: sharded.empty(EnumerableShardingSpec([ShardMetadata([0], [3], "rank:0/cpu")]), 4),
            TilingError,
            r"gap: nothing holds \[3:4\]",
        ),
        (lambda: sharded.empty(TorchChunkShardingSpec(0, ["rank:0/cpu"]), 4), ArgumentTypeError, "is not a sharded.Sh"),
    ],
)
def test_an_invalid_spec_raises(make: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()


class Written(ShardingSpec):
    """A user-defined spec that returns the given answer."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def build_metadata(self, tensor_sizes: torch.Size, tensor_properties: TensorProperties) -> ShardedTensorMetadata:
        return self.answer


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (None, ArgumentTypeError, r"Written.build_metadata must return a ShardedTensorMetadata, got NoneType"),
        (
            ShardedTensorMetadata([], torch.Size([5])),
            TilingError,
            r"returned shards for size \[5\], .* size \[4\]",
        ),
        (ShardedTensorMetadata([], torch.Size([4])), TilingError, r"gap: nothing holds \[0:4\]"),
        (
            ShardedTensorMetadata([ShardMetadata([0], [3], "rank:0/cpu")] * 2, torch.Size([4])),
            TilingError,
            "overlap: shard 0",
        ),
    ],
)
def test_the_result_of_a_user_defined_spec_is_validated(answer: Any, error: type[Exception], words: str) -> None:
    table = sharded.ones(ChunkShardingSpec(0, ["rank:0/cpu"]), 4)
    for use in (lambda s: sharded.zeros(s, 4), lambda s: s.shard(torch.ones(4)), table.reshard):
        with pytest.raises(error, match=words):
            use(Written(answer))
    assert table.gather().tolist() == [1.0] * 4


def test_a_user_defined_spec_decides_the_shards_and_not_the_properties() -> None:
    shards = [ShardMetadata([1], [3], "rank:0/cpu"), ShardMetadata([0], [1], "rank:0/cpu")]
    spec = Written(ShardedTensorMetadata(shards, torch.Size([4])))  # its properties are the default ones
    made = spec.shard(torch.arange(4, dtype=torch.int16))
    assert [shard.tensor.tolist() for shard in made.local_shards()] == [[1, 2, 3], [0]]
    assert made.dtype == made.metadata().tensor_properties.dtype == torch.int16
    assert made.sharding_spec() is spec
