"""Invalid local shards on any rank raise the same error on every rank, with rank, shard and sizes.

All cases run on the same four ranks, one after the other: one that left a rank waiting would break those after it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import shardwright as sw
from shardwright import comm, sharded
from shardwright.errors import ShardwrightError
from shardwright.sharded import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    Shard,
    ShardedTensor,
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
)
from shardwright.testing import run_ranks

RANKS = 4
EVEN = ChunkShardingSpec(0, [f"rank:{rank}/cpu" for rank in range(RANKS)])
COLUMNS = ChunkShardingSpec(1, [f"rank:{rank}/cpu" for rank in range(RANKS)])


class Case(NamedTuple):
    name: str
    wrong: Callable[[int], Any]
    error: str
    words: str


CASES: list[Case] = []


def case(error: str, words: str) -> Callable[[Callable[[int], Any]], Callable[[int], Any]]:
    """Registers what every rank does with its number, and the error that all of them raise."""

    def register(wrong: Callable[[int], Any]) -> Callable[[int], Any]:
        CASES.append(Case(wrong.__name__, wrong, error, words))
        return wrong

    return register


def rows(rank: int, first: int | None = None, tensor: Tensor | None = None, place: str | None = None) -> Shard:
    """Two of the eight rows of a tensor."""
    metadata = ShardMetadata([2 * rank if first is None else first, 0], [2, 3], place or f"rank:{rank}/cpu")
    return Shard(torch.zeros(2, 3) if tensor is None else tensor, metadata)


def build(*shards: Shard, size: Any = (8, 3)) -> ShardedTensor:
    return sharded.init_from_local_shards(list(shards), *size)


def pictures(rank: int, tensor: Tensor) -> ShardedTensor:
    offsets = [2 * rank, 0, 0, 0]
    return sharded.init_from_local_shards([Shard.from_tensor_and_offsets(tensor, offsets)], 8, 3, 4, 5)


# Regions.


@case(
    "TilingError", r"overlap: shard 1 \[2:4, 0:3\] on rank:1/cpu and shard 2 \[3:5, 0:3\] on rank:2/cpu .* \[3:4, 0:3\]"
)
def overlapping_regions(rank: int) -> None:
    build(rows(rank, first=3 if rank == 2 else None))


@case("TilingError", r"gap: nothing holds \[6:8, 0:3\] of \[0:8, 0:3\]")
def a_missing_region(rank: int) -> None:
    build(*([rows(rank)] if rank < 3 else []))


@case("TilingError", r"outside: shard 3 \[7:9, 0:3\] on rank:3/cpu is not inside \[0:8, 0:3\]")
def a_region_outside(rank: int) -> None:
    build(rows(rank, first=7 if rank == 3 else None))


@case("TilingError", r"shard 0 \[0:2, 0:3\] on rank:0/cpu has 2 dimensions, its tensor of size \[24\] has 1")
def a_region_of_other_dimensions(rank: int) -> None:
    build(rows(rank), size=(24,))


@case("ShardError", r"no rank holds a shard of a tensor of size \(8, 3\): its dtype is unknown")
def nobody_holds_anything(rank: int) -> None:
    build()


# A tensor that does not match its metadata.


@case("ShardError", r"^rank 1, shard 0: the tensor has size \[1, 3\], but its metadata says \[2, 3\]$")
def a_tensor_of_another_size(rank: int) -> None:
    shard = rows(rank)
    if rank == 1:
        shard.tensor = torch.zeros(1, 3)
    build(shard)


@case("ShardError", r"^rank 3, shard 1: dtype is torch.float64, but torch.float32 in shard 0 of rank 3$")
def two_dtypes_on_one_rank(rank: int) -> None:
    half = [ShardMetadata([2 * rank + n, 0], [1, 3], f"rank:{rank}/cpu") for n in range(2)]
    dtypes = [torch.float32, torch.float64 if rank == 3 else torch.float32]
    build(*(Shard(torch.zeros(1, 3, dtype=dtype), box) for dtype, box in zip(dtypes, half, strict=True)))


@case("ShardError", r"^rank 2, shard 0: the tensor is on meta, but its placement is rank:2/cpu$")
def a_tensor_on_another_device(rank: int) -> None:
    build(rows(rank, tensor=torch.zeros(2, 3, device="meta" if rank == 2 else "cpu")))


@case(
    "ShardError", r"^rank 1, shard 0: shards must be strided tensors, got layout torch.sparse_coo: call to_dense\(\)$"
)
def a_tensor_of_another_layout(rank: int) -> None:
    build(rows(rank, tensor=torch.ones(2, 3).to_sparse() if rank == 1 else None))


@case("ShardError", r"^rank 0, shard 0: size \[2, 3\] with strides \[1, 2\] is neither contiguous nor channels last")
def a_tensor_with_holes(rank: int) -> None:
    build(rows(rank, tensor=torch.zeros(3, 2).T if rank == 0 else None))


@case("ShardError", r"^rank 1, shard 0: .*; rank 3, shard 0: ")
def two_ranks_are_wrong_and_both_are_named(rank: int) -> None:
    build(rows(rank, tensor=torch.ones(2, 3).to_sparse() if rank % 2 else None))


@case("ShardError", r"^rank 2: expected a sharded.Shard, got Tensor$")
def a_tensor_instead_of_a_shard(rank: int) -> None:
    sharded.init_from_local_shards([torch.zeros(2, 3) if rank == 2 else rows(rank)], 8, 3)


@case("ShardError", r"^rank 2: local shards must be a list of sharded.Shard, got NoneType$")
def no_list_of_shards(rank: int) -> None:
    sharded.init_from_local_shards(None if rank == 2 else [rows(rank)], 8, 3)


@case("ShardError", r"^rank 1: global size must be an int, got float: 8.5$")
def a_size_that_is_no_number(rank: int) -> None:
    build(rows(rank), size=(8.5 if rank == 1 else 8, 3))


# Ranks that disagree.


@case("DisagreementError", r"ranks disagree about the global size: rank 0 has \(8, 3\), rank 2 has \(9, 3\)")
def disagreement_about_size(rank: int) -> None:
    build(rows(rank), size=(9 if rank == 2 else 8, 3))


@case("DisagreementError", r"ranks disagree about dtype: rank 0 has float32, rank 3 has float64")
def disagreement_about_dtype(rank: int) -> None:
    build(rows(rank, tensor=torch.zeros(2, 3, dtype=torch.float64 if rank == 3 else torch.float32)))


@case("DisagreementError", r"ranks disagree about requires_grad: rank 0 has False, rank 1 has True")
def disagreement_about_requires_grad(rank: int) -> None:
    build(rows(rank, tensor=torch.zeros(2, 3, requires_grad=rank == 1)))


@case("DisagreementError", r"ranks disagree about memory_format: rank 0 has 0, rank 2 has 1")
def disagreement_about_memory_format(rank: int) -> None:
    how = torch.channels_last if rank == 2 else torch.contiguous_format
    pictures(rank, torch.zeros(2, 3, 4, 5).to(memory_format=how))


# Placements.


@case("ShardError", r"^rank 1, shard 0: placement rank:9/cpu belongs to rank 9: pass only this rank's own shards$")
def a_shard_of_another_rank(rank: int) -> None:
    build(rows(rank, place="rank:9/cpu" if rank == 1 else None))


@case("PlacementError", r"placement cpu names no rank, but the group has 4 ranks: write rank:0/cpu")
def a_placement_without_a_rank(rank: int) -> None:
    build(rows(rank, place="cpu" if rank == 1 else None))


@case("PlacementError", r"placement rank:4/cpu: rank 4 is not in the group of ranks \[0, 1, 2, 3\]")
def a_new_tensor_on_a_rank_outside(rank: int) -> None:
    sharded.zeros(ChunkShardingSpec(0, ["rank:0/cpu", "rank:4/cpu"]), 8, 3)


@case("PlacementError", r"placement cpu names no rank, but the group has 4 ranks")
def a_new_tensor_on_no_rank(rank: int) -> None:
    sharded.zeros(ChunkShardingSpec(0, ["cpu", "cpu"]), 8, 3)


# New tensors.


@case("ShardError", r"requires_grad=True needs a floating point or complex dtype, got torch.int64")
def integers_that_require_grad(rank: int) -> None:
    sharded.zeros(ChunkShardingSpec(0, ["rank:1/cpu"]), 8, dtype=torch.int64, requires_grad=True)


@case("ShardError", r"memory_format channels_last needs 4 dimensions, got size \[8, 3\]")
def channels_last_of_a_matrix(rank: int) -> None:
    sharded.zeros(ChunkShardingSpec(0, ["rank:1/cpu"]), 8, 3, memory_format=torch.channels_last)


@case("ShardError", r"memory_format must be contiguous_format or channels_last, got torch.preserve_format")
def a_memory_format_that_says_nothing(rank: int) -> None:
    sharded.zeros(EVEN, 8, 3, memory_format=torch.preserve_format)


@case("ShardError", r"layout must be torch.strided, got torch.sparse_coo")
def a_sparse_new_tensor(rank: int) -> None:
    sharded.zeros(EVEN, 8, 3, layout=torch.sparse_coo)


# Metadata that all ranks know, checked.


def checked(rank: int, tensor: Tensor | None = None, size: int = 8, **properties: Any) -> ShardedTensor:
    metadata = EVEN.build_metadata(torch.Size([size, 3]), TensorProperties(**properties))
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        [rows(rank, tensor=tensor)], metadata, run_check=True
    )


@case(
    "RankFailedError", r"(?s)failed on 4 ranks.*rank 3: ShardError: rank 3, shard 0: pin_memory is False, but True in"
)
def memory_that_is_not_pinned(rank: int) -> None:
    checked(rank, pin_memory=True)


@case("RankFailedError", r"failed on 1 rank\n  rank 2: ShardError: rank 2, shard 0: dtype is torch.int64, but torch.fl")
def a_dtype_against_the_metadata(rank: int) -> None:
    checked(rank, torch.zeros(2, 3, dtype=torch.int64) if rank == 2 else None)


@case(
    "RankFailedError", r"rank 1: ShardError: rank 1, shard 0: requires_grad is True, but False in the tensor's metadata"
)
def requires_grad_against_the_metadata(rank: int) -> None:
    checked(rank, torch.zeros(2, 3, requires_grad=rank == 1))


@case(
    "RankFailedError",
    r"rank 3: ShardError: rank 3, shard 0: memory format is torch.channels_last, but torch.contiguous",
)
def memory_format_against_the_metadata(rank: int) -> None:
    how = torch.channels_last if rank == 3 else torch.contiguous_format
    tensor = torch.zeros(2, 3, 4, 5).to(memory_format=how)
    metadata = EVEN.build_metadata(torch.Size([8, 3, 4, 5]), TensorProperties())
    own = [Shard(tensor, metadata.shards_metadata[rank])]
    ShardedTensor._init_from_local_shards_and_global_metadata(own, metadata, run_check=True)


@case("RankFailedError", r"failed on 1 rank\n  rank 2: ShardError: rank 2 passed the shards \[ShardMetadata.*\[0, 0\]")
def a_shard_that_the_metadata_gives_to_another(rank: int) -> None:
    metadata = EVEN.build_metadata(torch.Size([8, 3]), TensorProperties())
    own = [Shard(torch.zeros(2, 3), ShardMetadata([0, 0], [2, 3], "rank:2/cpu"))] if rank == 2 else [rows(rank)]
    ShardedTensor._init_from_local_shards_and_global_metadata(own, metadata, run_check=True)


@case("RankFailedError", r"failed on 1 rank\n  rank 1: TilingError: gap: nothing holds \[8:9, 0:3\]")
def metadata_with_a_gap_on_one_rank(rank: int) -> None:
    metadata = EVEN.build_metadata(torch.Size([8, 3]), TensorProperties())
    if rank == 1:
        metadata = ShardedTensorMetadata(metadata.shards_metadata, torch.Size([9, 3]))
    ShardedTensor._init_from_local_shards_and_global_metadata([rows(rank)], metadata, run_check=True)


@case("DisagreementError", r"ranks disagree: rank 0 has 4 shards .*; rank 3 has 3 shards")
def metadata_that_differ(rank: int) -> None:
    shards = EVEN.build_metadata(torch.Size([8, 3]), TensorProperties()).shards_metadata
    if rank == 3:
        shards = [ShardMetadata([0, 0], [4, 3], "rank:0/cpu"), shards[2], shards[3]]
    metadata = ShardedTensorMetadata(shards, torch.Size([8, 3]))
    ShardedTensor._init_from_local_shards_and_global_metadata([rows(rank)], metadata, run_check=True)


# Gathering.


def gather(rank: int, **how: Any) -> None:
    sharded.ones(EVEN, 8, 3).gather(**how)


@case(
    "RankFailedError",
    r"gather failed on 1 rank\n  rank 0: ShardError: gather: `out` has size \[8, 2\], .* size \[8, 3\]",
)
def gather_into_another_size(rank: int) -> None:
    gather(rank, out=torch.zeros(8, 2) if rank == 0 else None)


@case(
    "RankFailedError",
    r"rank 1: ShardError: gather: with enforce_dtype, `out` must be torch.float32 like the tensor, got torch.int64",
)
def gather_into_another_dtype(rank: int) -> None:
    gather(rank, dst=1, out=torch.zeros(8, 3, dtype=torch.int64) if rank == 1 else None, enforce_dtype=True)


@case("RankFailedError", r"rank 0: ShardError: gather: `out` is torch.int64, but dtype=torch.int32 was given")
def gather_into_two_dtypes(rank: int) -> None:
    gather(rank, out=torch.zeros(8, 3, dtype=torch.int64) if rank == 0 else None, dtype=torch.int32)


@case("RankFailedError", r"rank 2: ShardError: gather: rank 2 passed `out`, but the tensor is gathered on rank 0")
def gather_into_another_ranks_buffer(rank: int) -> None:
    gather(rank, out=torch.zeros(8, 3) if rank in (0, 2) else None)


@case("RankFailedError", r"rank 0: ShardError: gather: `out` must not be a leaf that requires grad")
def gather_into_a_parameter(rank: int) -> None:
    gather(rank, out=torch.zeros(8, 3, requires_grad=True) if rank == 0 else None)


@case("PlacementError", r"gather: dst 4 is not in the group of ranks \[0, 1, 2, 3\]")
def gather_on_a_rank_outside(rank: int) -> None:
    gather(rank, dst=4)


@case("DisagreementError", r"gather: ranks disagree: rank 0 has dst 0 of .*; rank 3 has dst 1 of ")
def gather_on_different_ranks(rank: int) -> None:
    gather(rank, dst=rank // 3)


@case("DisagreementError", r"gather: ranks disagree: .* of torch.float32; .*rank 1 has .* of torch.float64")
def gather_of_different_tensors(rank: int) -> None:
    sharded.ones(EVEN, 8, 3, dtype=torch.float64 if rank == 1 else torch.float32).gather()


@case("DisagreementError", r"gather: ranks disagree: ")
def gather_of_tensors_cut_differently(rank: int) -> None:
    sharded.ones(COLUMNS if rank == 1 else EVEN, 8, 8).gather()


# Resharding.


@case("DisagreementError", r"reshard: ranks disagree: rank 0 has 4 shards")
def reshard_to_different_specs(rank: int) -> None:
    sharded.ones(EVEN, 8, 8).reshard(COLUMNS if rank == 2 else EVEN)


@case(
    "RankFailedError",
    r"reshard failed on 1 rank\n  rank 2: PlacementError: ChunkShardingSpec: dim 2 is out of range",
)
def reshard_to_a_bad_spec_on_one_rank(rank: int) -> None:
    sharded.ones(EVEN, 8, 8).reshard(ChunkShardingSpec(2, EVEN.placements) if rank == 2 else EVEN)


@case("TilingError", r"^gap: nothing holds \[4:8, 0:8\] of \[0:8, 0:8\]$")
def reshard_to_the_same_bad_spec_everywhere(rank: int) -> None:
    short = EnumerableShardingSpec([ShardMetadata([0, 0], [4, 8], "rank:0/cpu")])
    sharded.ones(EVEN, 8, 8).reshard(short)


@case("PlacementError", r"placement rank:7/cpu: rank 7 is not in the group of ranks \[0, 1, 2, 3\]")
def reshard_to_a_rank_outside(rank: int) -> None:
    sharded.ones(EVEN, 8, 8).reshard(ChunkShardingSpec(0, ["rank:7/cpu"]))


@case("RankFailedError", r"reshard failed on 1 rank\n  rank 3: ArgumentTypeError: str is not a sharded.ShardingSpec")
def reshard_to_no_spec(rank: int) -> None:
    sharded.ones(EVEN, 8, 8).reshard("columns" if rank == 3 else EVEN)


@case("DisagreementError", r"reshard: ranks disagree: .* with gradients; rank 2 has .* without gradients")
def reshard_with_gradients_on_some(rank: int) -> None:
    with torch.set_grad_enabled(rank != 2):
        x = sharded.ones(EVEN, 8, 8, requires_grad=True)
        with torch.enable_grad():
            y = x.clone()
        y.reshard(COLUMNS)


# Sharding a plain tensor.


@case("DisagreementError", r"shard: ranks disagree: rank 0 has \[8, 3\] .*; rank 1 has \[8, 4\] of torch.float32")
def shard_of_different_sizes(rank: int) -> None:
    EVEN.shard(torch.zeros(8, 4 if rank == 1 else 3))


@case("DisagreementError", r"shard: ranks disagree: .*rank 3 has \[8, 3\] of torch.float64")
def shard_of_different_dtypes(rank: int) -> None:
    EVEN.shard(torch.zeros(8, 3, dtype=torch.float64 if rank == 3 else None))


@case("DisagreementError", r"shard: ranks disagree: .*no gradient.*rank 3 has .* requires_grad, from rank 0")
def shard_of_different_requires_grad(rank: int) -> None:
    EVEN.shard(torch.zeros(8, 3, requires_grad=rank == 3))


@case("DisagreementError", r"shard: ranks disagree: .* from rank 0, .* from rank 1, ")
def shard_from_different_ranks(rank: int) -> None:
    EVEN.shard(torch.zeros(8, 3), src_rank=int(rank == 2))


@case("DisagreementError", r"shard: ranks disagree: ")
def shard_to_different_specs(rank: int) -> None:
    (COLUMNS if rank == 2 else EVEN).shard(torch.zeros(8, 8))


@case("PlacementError", r"shard: src_rank 4 is not in the group of ranks \[0, 1, 2, 3\]")
def shard_from_a_rank_outside(rank: int) -> None:
    EVEN.shard(torch.zeros(8, 3), src_rank=4)


@case(
    "RankFailedError", r"shard failed on 1 rank\n  rank 1: ArgumentTypeError: shard: expected a plain tensor, got list"
)
def shard_of_a_list(rank: int) -> None:
    EVEN.shard([0.0] if rank == 1 else torch.zeros(8, 3))


@case("ArgumentTypeError", r"shard: expected a plain tensor, got ShardedTensor; use reshard\(spec\)")
def shard_of_a_sharded_tensor(rank: int) -> None:
    EVEN.shard(sharded.zeros(EVEN, 8, 3))


@case("ArgumentTypeError", r"shard: expected a plain tensor, got DTensor; .* sharded.from_dtensor")
def shard_of_a_dtensor(rank: int) -> None:
    EVEN.shard(sw.zeros(8, 3, mesh=sw.init_device_mesh("cpu", (RANKS,))))


@case("ShardError", r"shard: the tensor must be strided, got layout torch.sparse_coo: call to_dense\(\)")
def shard_of_a_sparse_tensor(rank: int) -> None:
    EVEN.shard(torch.ones(8, 3).to_sparse())


@case("ProgramMismatchError|CommError", r"rank 0 is in 'gather', rank 1 in 'reshard'")
def ranks_in_different_calls(rank: int) -> None:
    x = sharded.ones(EVEN, 8, 8)
    if rank == 1:
        x.reshard(COLUMNS)
    else:
        x.gather()


def try_all(cases: list[Callable[[int], Any]]) -> list[tuple[str, str]]:
    rank, found = comm.world().rank, []
    for wrong in cases:
        try:
            wrong(rank)
        except ShardwrightError as error:
            found.append((type(error).__name__, str(error)))
        else:
            found.append(("nothing", ""))
    after = build(rows(rank, tensor=torch.full((2, 3), float(rank)))).gather()  # the ranks still understand each other
    assert after is None or after[:, 0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, list[tuple[str, str]]]:
    """What each rank raised in each case."""
    by_rank = run_ranks(RANKS, try_all, [one.wrong for one in CASES])
    return {one.name: [told[number] for told in by_rank] for number, one in enumerate(CASES)}


@pytest.mark.parametrize("wrong", CASES, ids=lambda case: case.name)
def test_every_rank_raises_the_same_error(wrong: Case, found: dict[str, list[tuple[str, str]]]) -> None:
    kinds, texts = zip(*found[wrong.name], strict=True)
    assert len(set(kinds)) == 1, found[wrong.name]
    assert len(set(texts)) == 1, found[wrong.name]
    assert kinds[0] in wrong.error.split("|"), found[wrong.name][0]
    assert re.search(wrong.words, texts[0], re.DOTALL), texts[0]


def test_local_shards_are_used_without_copying() -> None:
    def work() -> tuple[Any, ...]:
        rank = comm.world().rank
        boxes = {0: [(0, 1), (5, 8)], 1: [], 2: [(1, 5)], 3: [(8, 8)]}[rank]
        mine = [
            Shard.from_tensor_and_offsets(torch.full((high - low, 3), 10.0 * rank + n), [low, 0])
            for n, (low, high) in enumerate(boxes)
        ]
        with comm.count() as traffic:
            made = sharded.init_from_local_shards(mine, 8, 3)
        assert not traffic.calls
        assert all(a.tensor is b.tensor for a, b in zip(made.local_shards(), mine, strict=True))
        whole = made.gather(2)
        return made.metadata(), None if whole is None else whole[:, 0].tolist(), made.local_shards() == mine

    metadata, values, same = zip(*run_ranks(RANKS, work), strict=True)
    assert values == (None, None, [0, 20, 20, 20, 20, 1, 1, 1], None)
    assert all(one == metadata[0] for one in metadata)
    assert [str(shard.region) for shard in metadata[0].shards_metadata] == [
        "[0:1, 0:3]",
        "[5:8, 0:3]",
        "[1:5, 0:3]",
        "[8:8, 0:3]",
    ]
    assert all(same)


def test_the_spec_of_local_shards_is_inferred() -> None:
    def work() -> sharded.ShardingSpec:
        return build(rows(comm.world().rank)).sharding_spec()

    assert run_ranks(RANKS, work) == [EVEN] * RANKS


def test_a_local_tensor_becomes_the_only_shard_of_its_rank() -> None:
    def work() -> list[Any]:
        rank = comm.world().rank
        local = torch.full((2 if rank else 3, 3), float(rank))
        spec = EnumerableShardingSpec(
            [ShardMetadata([0, 0], [3, 3], "rank:0/cpu")]
            + [ShardMetadata([1 + 2 * r, 0], [2, 3], f"rank:{r}/cpu") for r in range(1, 4)]
        )
        with comm.count() as traffic:
            made = ShardedTensor._init_from_local_tensor(local, spec, 9, 3)
        assert not traffic.calls
        assert made.local_tensor() is local
        assert made.sharding_spec() is spec
        errors = []
        for tensor, other in ((local[:1], spec), (local, ChunkShardingSpec(0, ["rank:0/cpu"] * 2))):
            with pytest.raises(ShardwrightError) as caught:
                ShardedTensor._init_from_local_tensor(tensor, other, 9, 3)
            errors.append(str(caught.value))
        whole = made.gather(3)
        return [errors, None if whole is None else whole[:, 0].tolist()]

    found = run_ranks(RANKS, work)
    for rank, (errors, _) in enumerate(found):
        sizes, place = ([3, 3], 0) if rank == 0 else ([2, 3], 1 + 2 * rank)
        assert (
            errors[0]
            == f"rank {rank}: the local tensor has size [1, 3], but the spec says {sizes} at offsets [{place}, 0]"
        )
        assert errors[1].startswith(f"rank {rank} has {0 if rank else 2} shards under ChunkShardingSpec")
    assert found[3][1] == [0, 0, 0, 1, 1, 2, 2, 3, 3]


def test_known_metadata_need_no_communication_and_define_the_order_of_shards() -> None:
    def work() -> list[Any]:
        rank = comm.world().rank
        spec = ChunkShardingSpec(0, [f"rank:{n % 2 * 3}/cpu" for n in range(4)])  # ranks 0 and 3, two each
        metadata = spec.build_metadata(torch.Size([8, 3]), TensorProperties())
        mine = [
            Shard(torch.full((2, 3), float(n)), shard)
            for n, shard in enumerate(metadata.shards_metadata)
            if shard.placement.rank() == rank
        ]
        if rank == 1:
            return []  # others do not wait for it
        made = ShardedTensor._init_from_local_shards_and_global_metadata(mine[::-1], metadata, sharding_spec=spec)
        assert made.sharding_spec() is spec
        with pytest.raises(ShardwrightError, match=f"rank {rank} passed the shards "):
            ShardedTensor._init_from_local_shards_and_global_metadata([*mine, rows(rank)], metadata)
        return [shard.tensor[0, 0].item() for shard in made.local_shards()]

    assert run_ranks(RANKS, work) == [[0.0, 2.0], [], [], [1.0, 3.0]]
