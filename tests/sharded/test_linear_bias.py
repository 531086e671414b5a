"""linear accepts the dtypes of a bias that torch accepts."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from shardwright import comm
from shardwright.errors import (
    RankFailedError,
    ShardError,
)
from shardwright.testing import run_ranks
from tests.sharded.specs_and_errors import chunks, error_text


def test_linear_accepts_the_bias_dtypes_that_torch_accepts() -> None:
    def on_rank() -> list[str]:
        batch, weight = torch.rand(2, 3), torch.rand(4, 3)
        cut = chunks(0, 1).shard(weight)
        messages = []
        for bias in (torch.rand(4, dtype=torch.float64), torch.rand(4).half(), torch.ones(4, dtype=torch.int64)):
            with pytest.raises(RuntimeError):
                functional.linear(batch, weight, bias)
            messages.append(error_text(ShardError, lambda bias=bias: functional.linear(batch, cut, bias)))
            messages.append(error_text(ShardError, lambda b=bias: functional.linear(batch, cut, chunks(1).shard(b))))
        one = torch.rand(4) if comm.rank() else torch.rand(4).double()
        messages.append(error_text(RankFailedError, lambda: functional.linear(batch, cut, one)))
        with torch.autocast("cpu", torch.bfloat16):
            bias = torch.rand(4)
            found, expected = functional.linear(batch, cut, bias), functional.linear(batch, weight, bias)
        assert found.dtype == expected.dtype
        return messages

    first, second = run_ranks(2, on_rank)
    assert first == second
    assert "the bias torch.float64" in first[0]
    assert "convert them to one dtype" in first[0]
