"""A ShardedTensor describes the global tensor without communication, and has the shards of its spec."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import shardwright as sw
from shardwright import comm, sharded
from shardwright.errors import ShardError, UnsupportedError
from shardwright.sharded import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    LayoutShardingSpec,
    ShardingSpec,
    ShardMetadata,
)
from shardwright.testing import run_ranks
from tests.sharded.specs_and_errors import chunks

ALONE = ChunkShardingSpec(0, ["rank:0/cpu"] * 2)


def specs() -> list[ShardingSpec]:
    """Strategy: specs of 9 x 5 elements for four ranks."""
    boxes = [((0, 0), (4, 5), 2), ((4, 0), (5, 2), 0), ((4, 2), (3, 3), 2), ((7, 2), (2, 3), 1)]
    return [
        chunks(0, 1, 2, 3),
        chunks(3, 3, 0, dim=1),
        chunks(2),
        EnumerableShardingSpec([ShardMetadata(offset, size, f"rank:{rank}/cpu") for offset, size, rank in boxes]),
        LayoutShardingSpec(sw.Mesh((2, 2)), [sw.Shard(1), sw.Shard(0)]),
    ]


def test_factories_give_the_same_values_for_every_spec() -> None:
    def work() -> None:
        rank = comm.world().rank
        mesh = sw.init_device_mesh("cpu", (4,))

        def dtensor(make: Any, **how: Any) -> torch.Tensor:
            sw.manual_seed(7)
            make(3, mesh=mesh)  # so that it is not the first draw alone that agrees
            return make(9, 5, mesh=mesh, placements=[sw.Shard(0)], **how).full_tensor()

        def drawn(make: Any, spec: ShardingSpec, **how: Any) -> sharded.ShardedTensor:
            sw.manual_seed(7)
            make(chunks(0, 1), 3)
            return make(spec, 9, 5, **how)

        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            wholes = [
                *(torch.zeros(9, 5, dtype=dtype), torch.ones(9, 5, dtype=dtype), torch.full((9, 5), 2.5, dtype=dtype)),
                *(dtensor(sw.rand, dtype=dtype), dtensor(sw.randn, dtype=dtype)),
            ]
            for spec in specs():
                tensors = [
                    sharded.zeros(spec, 9, 5, dtype=dtype),
                    sharded.ones(spec, [9, 5], dtype=dtype),
                    sharded.full(spec, (9, 5), 2.5, dtype=dtype),
                    drawn(sharded.rand, spec, dtype=dtype),
                    drawn(sharded.randn, spec, dtype=dtype),
                ]
                for made, whole in zip(tensors, wholes, strict=True):
                    owned = [s for s in made.shards_metadata() if s.placement.rank() == rank]
                    assert [shard.metadata for shard in made.local_shards()] == owned
                    for shard in made.local_shards():
                        assert torch.equal(shard.tensor, whole[shard.metadata.region.slices()])
                    assert made.dtype == dtype

    run_ranks(4, work)


def test_factories_accept_torchs_arguments() -> None:
    made = sharded.empty(ALONE, 4, 3, 2, 2, memory_format=torch.channels_last, requires_grad=True, dtype=torch.float16)
    properties = made.metadata().tensor_properties
    assert (properties.memory_format, properties.requires_grad) == (torch.channels_last, True)
    for shard in made.local_shards():
        assert shard.tensor.is_contiguous(memory_format=torch.channels_last)
        assert shard.tensor.requires_grad
        assert shard.tensor.is_leaf
        assert shard.tensor.dtype == torch.float16
    assert sharded.zeros(ALONE, torch.Size([4, 3])).shape == sharded.zeros(ALONE, 4, 3).shape == (4, 3)
    assert sharded.zeros(EnumerableShardingSpec([ShardMetadata([], [], "rank:0/cpu")])).gather().shape == ()
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert sharded.zeros(ALONE, 4).dtype == torch.float64
    finally:
        torch.set_default_dtype(default)
    assert sharded.rand(ALONE, 4, requires_grad=True).local_shards()[0].tensor.requires_grad
    with pytest.raises(TypeError, match="size must be a sequence of ints, got str: 'rows'"):
        sharded.zeros(ALONE, "rows")


def test_attributes_need_no_communication() -> None:
    def work() -> None:
        made = sharded.zeros(chunks(0, 1, 1), 9, 5, requires_grad=True)
        if comm.world().rank != 1:
            return  # the other ranks do not take part
        with comm.count() as traffic:
            assert made.size() == made.shape == torch.Size([9, 5])
            assert (made.size(0), made.size(-1), made.size(dim=1)) == (9, 5, 5)
            assert (made.dim(), made.ndim, made.numel(), len(made.shards_metadata())) == (2, 2, 45, 3)
            assert (made.dtype, made.device.type, made.layout) == (torch.float32, "cpu", torch.strided)
            assert (made.requires_grad, made.is_leaf, made.grad, made.grad_fn) == (True, True, None, None)
            assert repr(made) == str(made) == f"{made}"
            assert repr(made) == "ShardedTensor([9, 5], torch.float32, 3 shards; here: [3:6, 0:5], [6:9, 0:5])"
            with pytest.raises(IndexError):
                made.size(2)
            assert made.detach().clone().to(torch.float64).dtype == torch.float64
            assert copy.deepcopy(made).shape == (9, 5)
            assert isinstance(made, torch.Tensor)
        assert not traffic.calls

    run_ranks(2, work)


def test_local_tensor_returns_the_only_shard_or_raises() -> None:
    def work() -> str:
        made = sharded.zeros(chunks(0, 1, 1), 9, 5)
        try:
            assert made.local_tensor() is made.local_shards()[0].tensor
            return "one"
        except UnsupportedError as error:
            return str(error)

    found = run_ranks(3, work)
    assert found[0] == "one"
    assert found[1].endswith("rank 1 has 2 shards, expected exactly one: use local_shards()")
    assert found[2].endswith("rank 2 has 0 shards, expected exactly one: use local_shards()")


def test_to_changes_dtype_and_device_on_all_ranks() -> None:
    def work() -> list[Any]:
        made = sharded.ones(chunks(0, 1, 1), 9, 5)
        assert made.to(torch.float32) is made is made.cpu() is made.to("cpu") is made.to(torch.device("cpu"))
        doubled = made.to(torch.float64)
        assert doubled.dtype == doubled.metadata().tensor_properties.dtype == torch.float64
        assert [shard.tensor.dtype for shard in doubled.local_shards()] == [torch.float64] * len(made.local_shards())
        assert doubled.shards_metadata() == made.shards_metadata()
        whole = doubled.gather()
        assert whole is None or torch.equal(whole, torch.ones(9, 5, dtype=torch.float64))
        assert made.to(doubled).dtype == torch.float64
        assert made.to(torch.zeros(1, dtype=torch.int16)).dtype == torch.int16
        away = made.to("meta")
        assert away.device.type == "meta"
        places = [str(shard.placement) for shard in away.shards_metadata()]
        assert all(shard.tensor.is_meta for shard in away.local_shards())
        assert made.device.type == "cpu"
        ints = sharded.ones(chunks(0, 1), 4, requires_grad=True).to(torch.int64)
        return [places, doubled.sharding_spec(), ints.requires_grad]

    for found in run_ranks(3, work):
        assert found[0] == ["rank:0/meta", "rank:1/meta", "rank:1/meta"]
        assert found[1] == chunks(0, 1, 1)
        assert found[2] is False


def test_to_a_memory_format_updates_the_metadata_on_every_rank() -> None:
    def work() -> bool:
        made = sharded.ones(chunks(0, 1), 4, 3, 2, 2).to(memory_format=torch.channels_last)
        assert all(s.tensor.is_contiguous(memory_format=torch.channels_last) for s in made.local_shards())
        assert made.clone().metadata().tensor_properties.memory_format is torch.channels_last
        back = made.clone(memory_format=torch.contiguous_format)
        assert back.metadata().tensor_properties.memory_format is torch.contiguous_format
        assert all(s.tensor.is_contiguous() for s in back.local_shards())
        return made.metadata().tensor_properties.memory_format is torch.channels_last

    assert run_ranks(3, work) == [True] * 3


def test_clones_copy_memory_and_detached_tensors_share_it() -> None:
    made = sharded.ones(ALONE, 4, requires_grad=True)
    for copied, shared in ((made.clone(), False), (copy.deepcopy(made), False), (made.detach(), True)):
        with torch.no_grad():
            for shard, other in zip(made.local_shards(), copied.local_shards(), strict=True):
                assert (shard.tensor.data_ptr() == other.tensor.data_ptr()) == shared
        assert copied.shards_metadata() == made.shards_metadata()
        assert torch.equal(copied.gather(), torch.ones(4))
    assert made.clone().requires_grad
    assert not made.clone().is_leaf
    assert not made.detach().requires_grad
    with torch.no_grad():
        assert not made.clone().requires_grad
    again = copy.deepcopy(made)
    assert again.requires_grad
    assert again.is_leaf
    assert again.local_shards()[0].tensor.is_leaf
    assert copy.deepcopy([made, made])[0] is not made
    two = copy.deepcopy([made, made])
    assert two[0] is two[1]


def test_gradients_are_those_of_the_shards() -> None:
    made = sharded.ones(ALONE, 4, requires_grad=True)
    first, second = (shard.tensor for shard in made.local_shards())
    (first.sum() * 2).backward()
    assert made.grad.gather().tolist() == [2, 2, 0, 0]  # one of the two has none yet
    (second.sum() * 3).backward()
    assert made.grad.gather().tolist() == [2, 2, 3, 3]
    assert made.grad.local_shards()[0].tensor is first.grad
    assert not made.grad.requires_grad
    made.grad = sharded.full(ALONE, (4,), 5.0)
    assert (first.grad.tolist(), second.grad.tolist()) == ([5, 5], [5, 5])
    for wrong in (torch.ones(4), sharded.ones(ChunkShardingSpec(0, ["rank:0/cpu"]), 4), sharded.ones(ALONE, 5)):
        with pytest.raises(
            ShardError, match=r"the gradient of ShardedTensor\(\[4\].* must be a ShardedTensor with the same sharding"
        ):
            made.grad = wrong
    made.grad = None
    assert first.grad is second.grad is made.grad is None
    made.requires_grad_(False)
    assert not first.requires_grad
    assert not made.metadata().tensor_properties.requires_grad
    made.requires_grad = True
    assert first.requires_grad


def test_assigning_data_replaces_the_shards() -> None:
    made = sharded.ones(ALONE, 4, requires_grad=True)
    assert not made.data.requires_grad
    assert made.data.local_shards()[0].tensor.data_ptr() == made.local_shards()[0].tensor.data_ptr()
    made.data = sharded.full(ChunkShardingSpec(0, ["rank:0/cpu"] * 3), (4,), 2.0, dtype=torch.float64)
    assert (made.dtype, made.requires_grad, len(made.local_shards())) == (torch.float64, True, 3)
    assert made.gather().tolist() == [2.0] * 4
    for wrong in (torch.ones(4), sharded.ones(ALONE, 5)):
        with pytest.raises(ShardError, match="must be a ShardedTensor of the same size, got"):
            made.data = wrong


def test_bool_and_values_raise() -> None:
    made = sharded.ones(ALONE, 4)
    with pytest.raises(UnsupportedError, match=r"the truth value of ShardedTensor.* is distributed over ranks"):
        bool(made)
    with pytest.raises(UnsupportedError, match="init_rrefs=True"):
        made.remote_shards()
