"""Sparse gradients of embeddings report their layout, and cannot be transferred."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from shardwright import sharded
from shardwright.errors import (
    UnsupportedError,
)
from shardwright.testing import run_ranks
from tests.sharded.specs_and_errors import chunks, error_text


def test_sparse_gradients_have_their_layout_and_cannot_be_transferred() -> None:
    def on_rank() -> str:
        table = sharded.rand(chunks(0, 1, 0), 7, 2, requires_grad=True)
        functional.embedding(torch.tensor([0, 5, 5]), table, sparse=True).sum().backward()
        gradient: Any = table.grad
        assert gradient.layout == torch.sparse_coo
        assert gradient.is_sparse
        dense = gradient.to_dense()
        assert dense.layout == torch.strided
        whole = dense.gather()
        assert whole is None or whole.sum() == 12
        with pytest.raises(RuntimeError, match="SparseAdam"):
            torch.optim.Adam([table], foreach=False).step()
        assert "ShardedOptimizer" in error_text(UnsupportedError, torch.optim.SparseAdam([table]).step)
        before = table.detach().clone()
        sharded.ShardedOptimizer({"table": table}, torch.optim.SparseAdam, lr=0.1).step()
        assert not torch.equal(table, before)
        for shard in table.local_shards()[:1]:  # the zeros for missing gradients are sparse, too
            shard.tensor.grad = None
        zeros = table.grad
        assert zeros is None or zeros.local_shards()[0].tensor.layout == torch.sparse_coo
        assert error_text(UnsupportedError, lambda: gradient.reshard(chunks(1, 0))).startswith("reshard: ")
        assert error_text(UnsupportedError, lambda: sharded.to_dtensor(gradient)).startswith("to_dtensor: ")
        return error_text(UnsupportedError, gradient.gather)

    first, second = run_ranks(2, on_rank)
    assert first == second
    assert "torch.sparse_coo, and only strided shards can be transferred: call to_dense()" in first
