"""shard_parameter accepts meta tensors on ranks that are not the source."""

from __future__ import annotations

import copy

import torch
from torch import nn

from shardwright import comm, sharded
from shardwright.errors import (
    RankFailedError,
)
from shardwright.sharded import (
    ChunkShardingSpec,
)
from shardwright.testing import run_ranks
from tests.sharded.specs_and_errors import chunks, error_text


def test_a_parameter_may_be_on_meta_except_on_the_source_rank() -> None:
    def on_rank() -> list[str]:
        torch.manual_seed(3)
        expected = nn.Linear(3, 4)
        for spec in (chunks(0, 1), chunks(0), chunks(1, dim=1)):
            model = copy.deepcopy(expected) if comm.rank() == 1 else nn.Linear(3, 4, device="meta")
            sharded.shard_parameter(model, "weight", spec, src_rank=1)
            for shard in model.weight.local_shards():
                assert torch.equal(shard.tensor, expected.weight.detach()[shard.metadata.region.slices()])
        bare = nn.Linear(3, 4, device="meta")
        messages = error_text(RankFailedError, lambda: sharded.shard_parameter(bare, "weight", chunks(0, 1)))
        nowhere = ChunkShardingSpec(0, ["rank:0/meta", "rank:1/meta"])
        sharded.shard_parameter(bare, "weight", nowhere)
        assert bare.weight.local_tensor().is_meta
        return [messages]

    first, second = run_ranks(2, on_rank)
    assert first == second
    assert "rank 0: ShardError: shard: the tensor of the source rank 0 is a meta tensor" in first[0]
