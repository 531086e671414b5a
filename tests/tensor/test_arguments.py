"""Arguments mean what they mean in torch: keywords in any order, NumPy's names, empty lists, unsupported dtypes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.layout import Partial, Replicate, Shard
from shardwright.testing import on_ranks
from tests.tensor.values import close, line, randn, spread

R, P = Replicate(), Partial()
ROWS = Shard(0)


@on_ranks(3)
def test_numpy_argument_names_and_any_keyword_order_are_accepted() -> None:
    """Rules get keyword arguments."""
    x, w = sw.distribute_tensor(randn(4, 5), line(), [ROWS]), sw.distribute_tensor(randn(2, 5), line(), [Shard(1)])
    b = sw.distribute_tensor(randn(2, seed=1), line())
    close(torch.sum(x, axis=0), randn(4, 5).sum(0))
    close(x.mean(axis=1, keepdims=True), randn(4, 5).mean(1, keepdim=True))
    close(nn.functional.linear(x, bias=b, weight=w), nn.functional.linear(randn(4, 5), randn(2, 5), randn(2, seed=1)))
    close(torch.mm(mat2=w.t(), input=x), randn(4, 5) @ randn(2, 5).t())
    close(torch.sub(other=x, input=x[:1], alpha=2), randn(4, 5)[:1] - 2 * randn(4, 5))


@on_ranks(2, timeout=30)
def test_empty_dim_list_means_what_it_means_in_torch() -> None:
    whole = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    x = spread(whole, Shard(0))
    torch.testing.assert_close(x.var(dim=[]).full_tensor(), whole.var(dim=[]))
    torch.testing.assert_close(x.std(dim=()).full_tensor(), whole.std(dim=()))
    assert torch.equal((x > 0).any(dim=()).full_tensor(), (whole > 0).any(dim=()))
    assert torch.equal((x > 0).all(dim=()).full_tensor(), (whole > 0).all(dim=()))


@on_ranks(3, timeout=30)
def test_softmax_along_a_sharded_dimension_accepts_what_torch_accepts() -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        spread(torch.ones(4, 3, dtype=torch.int64), Shard(0)).softmax(0)
    assert spread(torch.ones(3, 0), Shard(1)).softmax(1).shape == (3, 0)
