"""copy.copy shares shards and autograd history; copy.deepcopy copies values and gradients of leaves."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from shardwright import comm, sharded
from shardwright.errors import (
    UnsupportedError,
)
from shardwright.sharded import (
    ChunkShardingSpec,
    ShardedTensor,
)
from shardwright.testing import run_ranks
from tests.sharded.specs_and_errors import chunks

HERE = ChunkShardingSpec(0, ["rank:0/cpu"] * 2)


def local_values(tensor: ShardedTensor) -> list[list[float]]:
    return [shard.tensor.tolist() for shard in tensor.local_shards()]


def parameter_with_gradient() -> Any:
    x = nn.Parameter(sharded.ones(HERE, 4))
    for shard in x.local_shards():
        (shard.tensor * 3).sum().backward()
    return x


def test_copy_shares_shards_and_attributes() -> None:
    x = parameter_with_gradient()
    x.note = "mine"
    shallow = copy.copy(x)
    assert shallow is not x
    assert isinstance(shallow, nn.Parameter)
    assert (shallow.note, shallow.is_leaf) == ("mine", True)
    assert [s.tensor for s in shallow.local_shards()] == [s.tensor for s in x.local_shards()]


def test_resharding_a_copy_leaves_the_original_unchanged() -> None:
    x = parameter_with_gradient()
    copy.copy(x).reshard(ChunkShardingSpec(0, ["rank:0/cpu"]))
    assert len(x.local_shards()) == 2


def test_deepcopy_copies_gradients() -> None:
    x = parameter_with_gradient()
    deep = copy.deepcopy(x)
    assert local_values(deep.grad) == [[3.0, 3.0]] * 2
    deep.grad.zero_()
    assert local_values(x.grad) == [[3.0, 3.0]] * 2


def test_deepcopy_of_a_tensor_with_history_raises() -> None:
    x = parameter_with_gradient()
    with pytest.raises(UnsupportedError, match=r"deepcopy of ShardedTensor.*only leaf tensors support deepcopy"):
        copy.deepcopy(x * 2)
    assert local_values(copy.deepcopy((x * 2).detach())) == [[2.0, 2.0]] * 2


def test_copy_keeps_autograd_history() -> None:
    x = parameter_with_gradient()
    y = copy.copy(x * 2)
    assert not y.is_leaf
    y.reshard(ChunkShardingSpec(0, ["rank:0/cpu"])).local_tensor().sum().backward()
    assert local_values(x.grad) == [[5.0, 5.0]] * 2


def test_a_tensor_of_a_subgroup_can_be_copied() -> None:
    def work() -> Any:
        group = dist.new_group([1])
        if not comm.rank():
            return None
        x = sharded.ones(chunks(1), 4, process_group=group)
        return copy.copy(x).gather(1).tolist()

    assert run_ranks(2, work) == [None, [1.0] * 4]
