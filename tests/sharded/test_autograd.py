"""Shards keep their autograd history; gradients and data of a ShardedTensor are those of its shards."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright import comm, interop, sharded
from shardwright.errors import (
    ShardError,
)
from shardwright.sharded import (
    ChunkShardingSpec,
    Shard,
    ShardedTensor,
    TensorProperties,
)
from shardwright.testing import run_ranks
from tests.sharded.specs_and_errors import chunks

HERE = ChunkShardingSpec(0, ["rank:0/cpu"] * 2)


def local_values(tensor: ShardedTensor) -> list[list[float]]:
    return [shard.tensor.tolist() for shard in tensor.local_shards()]


def with_history(constructor: str, rank: int) -> tuple[Tensor, ShardedTensor]:
    """Return a leaf of this rank, and a tensor of four elements computed from the leaves of all ranks."""
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
    return leaf, make[constructor]()


CONSTRUCTORS = ["local shards", "known metadata", "checked metadata", "a local tensor", "a copy", "PyTorch's"]


@pytest.mark.parametrize("constructor", CONSTRUCTORS)
def test_reshard_is_differentiable_for_every_constructor(constructor: str) -> None:
    def work() -> Any:
        rank = comm.rank()
        leaf, tensor = with_history(constructor, rank)
        before = tensor.is_leaf
        tensor.reshard(chunks(1, 0))
        (tensor.local_tensor().sum() * (rank + 1)).backward()
        return before, tensor.is_leaf, leaf.grad.tolist()

    first, second = run_ranks(2, work)
    assert first == (False, False, [6.0, 6.0])  # its elements are on rank 1 now, which doubles them
    assert second == (False, False, [3.0, 3.0])


def test_reshard_tells_ranks_without_shards_that_a_tensor_is_not_a_leaf() -> None:
    def work() -> list[Any]:
        held, rank = chunks(0), comm.rank()
        x = sharded.ones(held, 4, requires_grad=True)
        doubled = x * 2
        mine = doubled.local_shards()
        build = functools.partial(ShardedTensor._init_from_local_shards_and_global_metadata, mine, doubled.metadata())
        informed = [sharded.init_from_local_shards(mine, 4), build(run_check=True)]
        theirs = interop.from_torch_sharded_tensor(interop.to_torch_sharded_tensor(doubled))
        uninformed = [build(), theirs]
        assert [made.is_leaf for made in informed] == [False, False]
        assert [made.is_leaf for made in uninformed] == [bool(rank)] * 2
        for number, made in enumerate([*informed, *uninformed]):
            made.reshard(chunks(0, 1))
            assert not made.is_leaf
            assert made.requires_grad
            (made.local_tensor() * 10**number).sum().backward(retain_graph=True)  # all gradients flow to one leaf
        leaf = build()
        leaf.reshard(held)  # the same sharding: only is_leaf is updated
        assert not leaf.is_leaf
        return local_values(x.grad) if x.grad is not None else []

    assert run_ranks(2, work) == [[[2222.0] * 4], []]


def test_reshard_under_no_grad_records_no_history() -> None:
    def work() -> None:
        x = sharded.ones(chunks(0, 1), 4, requires_grad=True)
        y = x * 2
        with torch.no_grad():
            assert y.reshard(chunks(0, 1)) is y  # the same sharding: nothing happens
            assert not y.is_leaf
            y.reshard(chunks(1, 0))
            x.reshard(chunks(1, 0))
        assert (y.requires_grad, y.is_leaf) == (False, True)
        assert not y.local_tensor().requires_grad
        assert (x.requires_grad, x.is_leaf) == (True, True)  # leaves become new leaves

    run_ranks(2, work)


def test_reshard_to_the_same_sharding_keeps_shards_and_gradients() -> None:
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
        assert local_values(x.grad) == [[1.0, 1.0]] * len(held)
        x.reshard(chunks(1, 0, 0))
        assert x.grad is None

    run_ranks(2, work)


def test_grad_fills_missing_gradients_with_zeros() -> None:
    x = sharded.ones(HERE, 4, requires_grad=True)
    assert x.grad is None
    first, second = (shard.tensor for shard in x.local_shards())
    (first * 2).sum().backward()
    assert local_values(x.grad) == [[2.0, 2.0], [0.0, 0.0]]
    assert x.grad.local_shards()[0].tensor is first.grad
    assert second.grad is None  # reading x.grad does not set it


def test_an_optimizer_steps_shards_without_a_gradient_by_zero() -> None:
    x = sharded.ones(HERE, 4, requires_grad=True)
    (x.local_shards()[0].tensor * 2).sum().backward()
    torch.optim.SGD([x], lr=1.0, foreach=False).step()
    assert x.gather().tolist() == [-1.0, -1.0, 1.0, 1.0]


def test_grad_of_an_empty_shard_is_empty() -> None:
    empty = sharded.ones(ChunkShardingSpec(0, ["rank:0/cpu"] * 3), 2, requires_grad=True)  # the last shard is empty
    for shard in empty.local_shards()[:2]:
        shard.tensor.sum().backward()
    assert local_values(empty.grad) == [[1.0], [1.0], []]


def test_assigning_data_shares_memory_but_not_requires_grad() -> None:
    parameter, other = nn.Parameter(sharded.ones(HERE, 4)), sharded.zeros(HERE, 4)
    parameter.data = other
    assert not other.requires_grad
    assert not any(shard.tensor.requires_grad for shard in other.local_shards())
    assert all(shard.tensor.requires_grad and shard.tensor.is_leaf for shard in parameter.local_shards())
    other.fill_(5.0)
    assert parameter.gather().tolist() == [5.0] * 4


def test_assigning_data_drops_autograd_history() -> None:
    history = sharded.ones(HERE, 4, requires_grad=True) * 2
    for target in (nn.Parameter(sharded.ones(HERE, 4)), sharded.ones(HERE, 4)):
        wanted = target.requires_grad
        target.data = history
        assert (target.is_leaf, target.requires_grad) == (True, wanted)
        assert all(shard.tensor.is_leaf for shard in target.local_shards())
    assert not history.is_leaf


def test_assigning_integer_data_to_a_parameter_raises_and_changes_nothing() -> None:
    parameter = nn.Parameter(sharded.ones(HERE, 4))
    with pytest.raises(ShardError, match=r"which requires grad, cannot be torch\.int64"):
        parameter.data = sharded.ones(HERE, 4, dtype=torch.int64)
    assert parameter.dtype == torch.float32
