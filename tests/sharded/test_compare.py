"""Comparisons raise on all ranks if they are invalid on one."""

from __future__ import annotations

import torch

from shardwright import comm, sharded
from shardwright.errors import (
    RankFailedError,
)
from shardwright.testing import run_ranks
from tests.sharded.specs_and_errors import chunks, error_text


def test_an_invalid_comparison_on_one_rank_raises_on_all() -> None:
    def on_rank() -> list[str]:
        here = comm.rank()
        x = sharded.ones(chunks(0, 1), 4, 2)
        other = sharded.ones(chunks(0, 1, dim=here), 4, 2)
        plain = torch.ones(4, 2) if here else x
        double = x.double() if here else x
        messages = [
            error_text(RankFailedError, lambda: torch.equal(x, other)),
            error_text(RankFailedError, lambda: torch.allclose(x, other)),
            error_text(RankFailedError, lambda: torch.equal(x, plain)),
            error_text(RankFailedError, lambda: torch.allclose(x, double)),
        ]
        assert not torch.equal(x, double)  # equal on one rank only
        assert not torch.equal(x, sharded.ones(chunks(0, 1), 4, 2 + here))
        assert torch.equal(x, x)
        return messages

    first, second = run_ranks(2, on_rank)
    assert first == second
    assert "rank 1: ShardError: equal: " in first[0]
