"""What a review of ShardedTensor found broken: graphs, owners, gradients, placements, buffers and copies."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.metadata import ShardMetadata as TheirShardMetadata
from torch.nn import functional

import shardwright as sw
from shardwright import comm, interop, sharded
from shardwright.errors import ArgumentTypeError, ShardError, ShardwrightError, UnsupportedError
from shardwright.sharded import ChunkShardingSpec, Shard, ShardedTensor, ShardMetadata, TensorProperties
from shardwright.testing import run_ranks

HERE = ChunkShardingSpec(0, ["rank:0/cpu"] * 2)


def chunks(*ranks: int, dim: int = 0) -> ChunkShardingSpec:
    return ChunkShardingSpec(dim, [f"rank:{rank}/cpu" for rank in ranks])


def refusal(call: Callable[[], Any]) -> str:
    try:
        made = call()
    except ShardwrightError as error:
        return f"{type(error).__name__}: {error}"
    return f"no error: {made}"


def local(tensor: ShardedTensor) -> list[list[float]]:
    return [shard.tensor.tolist() for shard in tensor.local_shards()]


# Graphs.


def with_history(kind: str, rank: int) -> tuple[Tensor, ShardedTensor]:
    """A leaf of this rank, and a tensor of four elements whose shards are computed from the ranks' leaves."""
    leaf = torch.ones(2, requires_grad=True)
    tripled, spec = leaf * 3, chunks(0, 1)
    mine = [Shard.from_tensor_and_offsets(tripled, [2 * rank])]
    metadata = spec.build_metadata(torch.Size([4]), TensorProperties(requires_grad=True))
    build = ShardedTensor._init_from_local_shards_and_global_metadata
    make: dict[str, Callable[[], ShardedTensor]] = {
        "local shards": lambda: sharded.init_from_local_shards(mine, 4),
        "known metadata": lambda: build(mine, metadata),
        "checked metadata": lambda: build(mine, metadata, run_check=True),
        "a local tensor": lambda: ShardedTensor._init_from_local_tensor(tripled, spec, 4),
        "a copy": lambda: copy.copy(sharded.init_from_local_shards(mine, 4)),
        "PyTorch's": lambda: interop.from_torch_sharded_tensor(
            interop.to_torch_sharded_tensor(sharded.init_from_local_shards(mine, 4))
        ),
    }
    return leaf, make[kind]()


KINDS = ["local shards", "known metadata", "checked metadata", "a local tensor", "a copy", "PyTorch's"]


def test_shards_with_a_history_keep_it_whoever_made_the_tensor() -> None:
    def work() -> dict[str, Any]:
        rank, found = comm.rank(), {}
        for kind in KINDS:
            leaf, made = with_history(kind, rank)
            before = made.is_leaf
            made.reshard(chunks(1, 0))
            (made.local_tensor().sum() * (rank + 1)).backward()
            found[kind] = (before, made.is_leaf, leaf.grad.tolist())
        return found

    first, second = run_ranks(2, work)
    assert first == dict.fromkeys(KINDS, (False, False, [6.0, 6.0]))  # rank 1 has its elements now, and doubles them
    assert second == dict.fromkeys(KINDS, (False, False, [3.0, 3.0]))


def test_a_rank_without_shards_learns_from_the_others_that_there_is_a_history() -> None:
    def work() -> list[Any]:
        held, rank = chunks(0), comm.rank()
        x = sharded.ones(held, 4, requires_grad=True)
        doubled = x * 2
        mine = doubled.local_shards()
        build = functools.partial(ShardedTensor._init_from_local_shards_and_global_metadata, mine, doubled.metadata())
        told = [sharded.init_from_local_shards(mine, 4), build(run_check=True)]
        theirs = interop.from_torch_sharded_tensor(interop.to_torch_sharded_tensor(doubled))
        untold = [build(), theirs]
        assert [made.is_leaf for made in told] == [False, False]
        assert [made.is_leaf for made in untold] == [bool(rank)] * 2
        for number, made in enumerate([*told, *untold]):
            made.reshard(chunks(0, 1))
            assert not made.is_leaf
            assert made.requires_grad
            (made.local_tensor() * 10**number).sum().backward(retain_graph=True)  # all go back to one
        leaf = build()
        leaf.reshard(held)  # cut like that already: what is learnt is learnt
        assert not leaf.is_leaf
        return local(x.grad) if x.grad is not None else []

    assert run_ranks(2, work) == [[[2222.0] * 4], []]


def test_without_grad_mode_a_reshard_makes_no_history() -> None:
    def work() -> None:
        x = sharded.ones(chunks(0, 1), 4, requires_grad=True)
        y = x * 2
        with torch.no_grad():
            assert y.reshard(chunks(0, 1)) is y  # cut like that already: nothing happens
            assert not y.is_leaf
            y.reshard(chunks(1, 0))
            x.reshard(chunks(1, 0))
        assert (y.requires_grad, y.is_leaf) == (False, True)
        assert not y.local_tensor().requires_grad
        assert (x.requires_grad, x.is_leaf) == (True, True)  # leaves become new leaves

    run_ranks(2, work)


def test_resharding_to_the_same_cut_changes_nothing() -> None:
    def work() -> None:
        x = sharded.ones(chunks(0, 1, 1), 6, requires_grad=True)
        for shard in x.local_shards():
            shard.tensor.sum().backward()
        held = [shard.tensor for shard in x.local_shards()]
        spec = sharded.EnumerableShardingSpec(
            list(chunks(0, 1, 1).build_metadata(x.shape, x.metadata()).shards_metadata)
        )
        with comm.count() as traffic:
            assert x.reshard(spec) is x
        assert not traffic.bytes
        assert x.sharding_spec() is spec
        assert all(new.tensor is old for new, old in zip(x.local_shards(), held, strict=True))
        assert local(x.grad) == [[1.0, 1.0]] * len(held)
        x.reshard(chunks(1, 0, 0))
        assert x.grad is None

    run_ranks(2, work)


# Gradients and data.


def test_a_shard_without_a_gradient_has_one_of_zeros_beside_shards_with_one() -> None:
    x = sharded.ones(HERE, 4, requires_grad=True)
    assert x.grad is None
    first, second = (shard.tensor for shard in x.local_shards())
    (first * 2).sum().backward()
    assert local(x.grad) == [[2.0, 2.0], [0.0, 0.0]]
    assert x.grad.local_shards()[0].tensor is first.grad
    assert second.grad is None  # reading makes none
    torch.optim.SGD([x], lr=1.0, foreach=False).step()
    assert x.gather().tolist() == [-1.0, -1.0, 1.0, 1.0]
    empty = sharded.ones(ChunkShardingSpec(0, ["rank:0/cpu"] * 3), 2, requires_grad=True)  # the last shard is empty
    for shard in empty.local_shards()[:2]:
        shard.tensor.sum().backward()
    assert local(empty.grad) == [[1.0], [1.0], []]


def test_what_is_assigned_to_data_stays_as_it_is() -> None:
    parameter, other = nn.Parameter(sharded.ones(HERE, 4)), sharded.zeros(HERE, 4)
    parameter.data = other
    assert not other.requires_grad
    assert not any(shard.tensor.requires_grad for shard in other.local_shards())
    assert all(shard.tensor.requires_grad and shard.tensor.is_leaf for shard in parameter.local_shards())
    other.fill_(5.0)
    assert parameter.gather().tolist() == [5.0] * 4  # one memory
    history = sharded.ones(HERE, 4, requires_grad=True) * 2
    for target in (parameter, sharded.ones(HERE, 4)):
        wanted = target.requires_grad
        target.data = history
        assert (target.is_leaf, target.requires_grad) == (True, wanted)
        assert all(shard.tensor.is_leaf for shard in target.local_shards())
    assert not history.is_leaf
    with pytest.raises(ShardError, match=r"which requires grad, cannot be torch\.int64"):
        parameter.data = sharded.ones(HERE, 4, dtype=torch.int64)
    assert parameter.dtype == torch.float32  # and nothing was replaced


# Copies.


def test_copies_share_shards_and_history_and_deep_copies_share_nothing() -> None:
    x = nn.Parameter(sharded.ones(HERE, 4))
    for shard in x.local_shards():
        (shard.tensor * 3).sum().backward()
    x.note = "mine"
    shallow = copy.copy(x)
    assert shallow is not x
    assert isinstance(shallow, nn.Parameter)
    assert (shallow.note, shallow.is_leaf) == ("mine", True)
    assert [s.tensor for s in shallow.local_shards()] == [s.tensor for s in x.local_shards()]
    shallow.reshard(ChunkShardingSpec(0, ["rank:0/cpu"]))
    assert len(x.local_shards()) == 2
    deep = copy.deepcopy(x)
    assert local(deep.grad) == [[3.0, 3.0]] * 2
    deep.grad.zero_()
    assert local(x.grad) == [[3.0, 3.0]] * 2
    with pytest.raises(UnsupportedError, match=r"deepcopy of ShardedTensor.*only leaf tensors support deepcopy"):
        copy.deepcopy(x * 2)
    assert local(copy.deepcopy((x * 2).detach())) == [[2.0, 2.0]] * 2
    y = copy.copy(x * 2)
    assert not y.is_leaf
    y.reshard(ChunkShardingSpec(0, ["rank:0/cpu"])).local_tensor().sum().backward()
    assert local(x.grad) == [[5.0, 5.0]] * 2


def test_a_tensor_of_a_sub_group_can_be_copied() -> None:
    def work() -> Any:
        group = dist.new_group([1])
        if not comm.rank():
            return None
        x = sharded.ones(chunks(1), 4, process_group=group)
        return copy.copy(x).gather(1).tolist()

    assert run_ranks(2, work) == [None, [1.0] * 4]


# Placements, memory formats.


def test_a_change_of_dtype_keeps_placements_and_one_of_device_changes_their_kind() -> None:
    def work() -> list[Any]:
        spec = ChunkShardingSpec(0, ["rank:0/meta", "rank:1/cpu", "rank:1/cpu", "rank:1/cpu"])
        x = sharded.zeros(spec, 3)  # the last shard is empty, and the one before is not
        double = x.to(torch.float64)
        assert double.sharding_spec() is spec
        moved = x.to("meta")
        assert moved.to("meta") is moved
        back = sharded.zeros(chunks(0, 1), 4).to("cpu", torch.float64)
        assert (
            back.shards_metadata() == chunks(0, 1).build_metadata(torch.Size([4]), TensorProperties()).shards_metadata
        )
        assert [shard.tensor.device.type for shard in moved.local_shards()] == ["meta"] * len(x.local_shards())
        return [[str(shard.placement) for shard in tensor.shards_metadata()] for tensor in (double, moved)]

    same = ["rank:0/meta", "rank:1/cpu", "rank:1/cpu", "rank:1/cpu"]
    assert run_ranks(3, work) == [[same, ["rank:0/meta", *["rank:1/meta"] * 3]]] * 3


def test_tensors_made_like_others_lie_where_their_placements_say() -> None:
    def work() -> list[str]:
        x = sharded.ones(chunks(0, 1), 4)
        made = torch.zeros_like(x, device="meta")
        assert made.device.type == "meta"
        assert all(shard.tensor.is_meta for shard in made.local_shards())
        assert all(shard.metadata in made.shards_metadata() for shard in made.local_shards())
        computed = torch.cumsum(sharded.ones(chunks(0, 1), 4, 2), 1)  # of what it is found by a tensor without memory
        assert [str(shard.placement) for shard in computed.shards_metadata()] == ["rank:0/cpu", "rank:1/cpu"]
        return [str(shard.placement) for shard in made.shards_metadata()]

    assert run_ranks(3, work) == [["rank:0/meta", "rank:1/meta"]] * 3


def test_resharding_keeps_the_memory_format() -> None:
    def work() -> None:
        whole = torch.arange(8 * 3 * 2 * 2.0).reshape(8, 3, 2, 2)
        for history in (False, True):
            x = sharded.empty(chunks(0, 1, 1), 8, 3, 2, 2, memory_format=torch.channels_last, requires_grad=history)
            with torch.no_grad():
                for shard in x.local_shards():
                    shard.tensor.copy_(whole[shard.metadata.region.slices()])
            made = x * 1 if history else x
            made.reshard(chunks(1, 0, dim=1))
            assert made.metadata().tensor_properties.memory_format == torch.channels_last
            for shard in made.local_shards():
                assert shard.tensor.is_contiguous(memory_format=torch.channels_last)
                assert torch.equal(shard.tensor, whole[shard.metadata.region.slices()])
            ShardedTensor._init_from_local_shards_and_global_metadata(made.local_shards(), made.metadata())
            copied = copy.deepcopy(made.detach())
            assert copied.local_tensor().is_contiguous(memory_format=torch.channels_last)
            assert copied.metadata().tensor_properties.memory_format == torch.channels_last

    run_ranks(2, work)


def test_shards_of_one_channel_or_none_lie_as_the_others_do() -> None:
    boxes = [
        ShardMetadata([0, start, 0, 0], [2, count, 4, 4], f"rank:{rank}/cpu")
        for start, count, rank in ((0, 2, 1), (2, 1, 0), (3, 0, 0))
    ]

    def work() -> None:
        for how in (torch.channels_last, torch.contiguous_format):
            # Of the channels 0:2, 2:3 and 3:3, those of one channel, or none, lie in memory both ways.
            x = sharded.zeros(sharded.EnumerableShardingSpec(boxes), 2, 3, 4, 4, memory_format=how)
            for made in (
                sharded.init_from_local_shards(x.local_shards(), 2, 3, 4, 4),
                ShardedTensor._init_from_local_shards_and_global_metadata(x.local_shards(), x.metadata()),
            ):
                assert made.metadata().tensor_properties.memory_format == how
        ambiguous = [Shard.from_tensor_and_offsets(torch.zeros(2, 1, 4, 4), [0, comm.rank(), 0, 0])]
        made = sharded.init_from_local_shards(ambiguous, 2, 2, 4, 4)
        assert made.metadata().tensor_properties.memory_format == torch.contiguous_format

    run_ranks(2, work)


# What is refused.


def test_a_buffer_that_cannot_be_filled_is_refused_on_every_rank_before_anything_moves() -> None:
    def work() -> list[str]:
        x = ChunkShardingSpec(1, ["rank:0/cpu", "rank:1/cpu"]).shard(torch.arange(8.0).reshape(2, 4))
        bad: list[Any] = [
            "x",
            torch.zeros(1, 1).expand(2, 4),
            torch.zeros(8).as_strided((2, 4), (1, 1)),
            torch.zeros(2, 4).to_sparse(),
            torch.zeros(2, 4, device="meta"),
            sharded.zeros(chunks(0, 1), 2, 4),
        ]
        found = [refusal(lambda out=out: x.gather(0, None if comm.rank() else out)) for out in bad]
        found.append(refusal(lambda: x.gather(0, dtype="float32")))
        interlaced = torch.zeros(10).as_strided((2, 4), (3, 2))  # 0 2 4 6 and 3 5 7 9: strange, and no two alike
        for fine in (torch.zeros(7, 9)[::5, ::2][:, :4], interlaced):
            got = x.gather(0, out=None if comm.rank() else fine)
            assert got is None or torch.equal(got, torch.arange(8.0).reshape(2, 4))
        return found

    first, second = run_ranks(2, work)
    assert first == second
    wanted = [
        "`out` must be a plain tensor, got str",
        "share memory",
        "share memory",
        "torch.sparse_coo on cpu",
        "on meta",
    ]
    wanted += ["`out` must be a plain tensor, got ShardedTensor", "dtype must be a torch.dtype, got 'float32'"]
    for text, part in zip(first, wanted, strict=True):
        assert part in text


def test_a_buffer_that_is_a_negative_view_is_filled_with_the_values() -> None:
    base = torch.zeros(4, dtype=torch.complex64)
    out = base.conj().imag
    assert out.is_neg()
    assert sharded.ones(HERE, 4).gather(out=out) is out
    assert out.tolist() == [1.0] * 4
    assert base.imag.tolist() == [-1.0] * 4


def test_whatever_is_wrong_with_a_shard_is_raised_on_all_ranks() -> None:
    def work() -> list[str]:
        rank, found = comm.rank(), []
        mine = [
            ShardMetadata([2 * rank], [2], f"rank:{rank}/cpu"),
            TheirShardMetadata([2 * rank], [2], f"rank:{rank}/cpu"),
        ]
        converted = Shard(torch.ones(2), mine[rank])
        assert isinstance(converted.metadata, ShardMetadata)
        assert sharded.init_from_local_shards([converted], 4).shards_metadata()[1].placement.rank() == 1
        for change in ({"tensor": None}, {"metadata": None}):
            shard = Shard(torch.ones(2), mine[0])
            for name, value in change.items() if rank else ():
                setattr(shard, name, value)
            found.append(refusal(lambda shard=shard: sharded.init_from_local_shards([shard], 4)))
        spec = chunks(0, 1)
        metadata = spec.build_metadata(torch.Size([4]), TensorProperties())
        build = ShardedTensor._init_from_local_shards_and_global_metadata
        for given, known in (([shard], metadata), ([Shard(torch.ones(2), mine[0])], None if rank else metadata)):
            found.append(refusal(lambda given=given, known=known: build(given, known, run_check=True)))
        return found

    first, second = run_ranks(2, work)
    assert first == second
    assert first[0].startswith(
        "ShardError: rank 1: a Shard must have a torch.Tensor and a sharded.ShardMetadata, got NoneType and "
        "ShardMetadata"
    )
    assert first[1].startswith(
        "ShardError: rank 1: a Shard must have a torch.Tensor and a sharded.ShardMetadata, got Tensor and NoneType"
    )
    assert (
        "rank 1: ArgumentTypeError: a Shard must have a torch.Tensor and a sharded.ShardMetadata, got Tensor and "
        "NoneType" in first[2]
    )
    assert "rank 1: ArgumentTypeError: expected a sharded.ShardedTensorMetadata, got NoneType" in first[3]
    for wrong in (lambda: Shard(None, ShardMetadata([0], [2])), lambda: Shard(torch.ones(2), "rank:0")):
        with pytest.raises(ArgumentTypeError, match=r"a Shard (of|with) a"):
            wrong()


def test_shards_lie_where_the_metadata_of_all_ranks_say() -> None:
    metadata = ChunkShardingSpec(0, ["rank:0/meta"]).build_metadata(torch.Size([4]), TensorProperties())
    mine = [Shard(torch.ones(4), ShardMetadata([0], [4], "rank:0/cpu"))]
    with pytest.raises(ShardError, match=r"rank 0: the shard \[0:4\] is on cpu, but its placement is rank:0/meta"):
        ShardedTensor._init_from_local_shards_and_global_metadata(mine, metadata)


def test_a_tensor_of_sharded_shards_is_refused_alike_by_all_that_needs_its_boxes() -> None:
    def work() -> list[str]:
        rank = comm.rank()
        mesh = sw.init_device_mesh("cpu", (2,))
        inner = [sharded.ones(chunks(0, 1), 4, 2), sw.distribute_tensor(torch.ones(4, 2), mesh, [sw.Shard(0)])]
        found = []
        for held in inner:
            x = sharded.init_from_local_shards([Shard(held, ShardMetadata([0, 0], [4, 2], f"rank:{rank}/cpu"))], 4, 2)
            for tensor in (x, x.detach(), copy.copy(x)):
                found += [
                    refusal(lambda tensor=tensor: tensor.gather()),
                    refusal(lambda tensor=tensor: tensor.reshard(chunks(1, 0))),
                    refusal(lambda tensor=tensor: tensor.to(torch.float64)),
                    refusal(lambda tensor=tensor: sharded.to_dtensor(tensor)),
                    refusal(lambda tensor=tensor: interop.to_torch_sharded_tensor(tensor)),
                    refusal(lambda tensor=tensor: functional.embedding(torch.tensor([0]), tensor)),
                    refusal(lambda tensor=tensor: functional.linear(torch.ones(1, 2), tensor)),
                    refusal(lambda tensor=tensor: tensor.uniform_()),
                ]
        return found

    first, second = run_ranks(2, work)
    assert first == second
    assert all(text.startswith("UnsupportedError") and "are themselves sharded" in text for text in first)


def test_arguments_of_the_wrong_kind_are_typed_errors() -> None:
    for make in (sharded.zeros, sharded.rand, sharded.empty):
        with pytest.raises(ArgumentTypeError, match=r"dtype must be a torch\.dtype, got 'float32'"):
            make(HERE, 4, dtype="float32")
        if not torch.accelerator.is_available():
            with pytest.raises(UnsupportedError, match="pin_memory=True needs an accelerator"):
                make(HERE, 4, pin_memory=True)
