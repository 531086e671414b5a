"""Embedding matches torch in values and gradients: the table sharded by rows or columns, the indices in any layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # torch's own short name
from torch import Tensor

import shardwright as sw
from shardwright import comm
from shardwright.errors import UnsupportedError
from shardwright.testing import run_ranks


def table(rows: int, columns: int = 4) -> Tensor:
    return torch.randn(rows, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()


def indices(*shape: int, high: int) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(sum(shape)))


CASES: list[Any] = [
    ("embedding", lambda i, w: F.embedding(i, w), [indices(5, high=7), table(7)]),
    ("fewer rows than ranks", lambda i, w: F.embedding(i, w), [indices(4, 2, high=2), table(2)]),
    ("one index", lambda i, w: F.embedding(i, w), [torch.tensor(3), table(5)]),
    ("no index", lambda i, w: F.embedding(i, w), [torch.zeros(0, 3, dtype=torch.int64), table(5)]),
    ("padding_idx", lambda i, w: F.embedding(i, w, padding_idx=2), [indices(9, high=5), table(5)]),
    ("padding_idx from the end", lambda i, w: F.embedding(i, w, padding_idx=-1), [indices(9, high=5), table(5)]),
    ("scale_grad_by_freq", lambda i, w: F.embedding(i, w, scale_grad_by_freq=True), [indices(9, high=4), table(5)]),
    ("torch.embedding", lambda w, i: torch.embedding(w, i), [table(5), indices(3, 2, high=5)]),
    ("named in another order", lambda i, w: torch.embedding(indices=i, weight=w), [indices(5, high=7), table(7)]),
    ("one_hot", lambda i: F.one_hot(i, 6), [indices(5, 2, high=6)]),
    ("one_hot, classes unsaid", lambda i: F.one_hot(i), [indices(5, 2, high=6)]),
    ("embedding_bag", lambda i, w: F.embedding_bag(i, w, mode="mean"), [indices(5, 3, high=6), table(6)]),
]


def test_values_and_gradients_match_torch_for_every_placement(against_torch: Any) -> None:
    against_torch((4,), CASES, max_combinations=16)
    against_torch((2, 2), CASES, max_combinations=5)


def test_max_norm_renormalises_looked_up_rows_in_any_layout() -> None:
    def on_a_rank() -> None:
        mesh = sw.init_device_mesh("cpu", (3,))
        i, w = torch.tensor([1, 4, 4, 0]), torch.randn(6, 4, generator=torch.Generator().manual_seed(0)) * 3
        expected = w.clone()
        looked_up = F.embedding(i, expected, max_norm=1.0)
        for of_table in (sw.Replicate(), sw.Shard(0), sw.Shard(1)):
            for of_indices in (sw.Replicate(), sw.Shard(0)):
                ours = sw.distribute_tensor(w, mesh, [of_table])
                found = F.embedding(sw.distribute_tensor(i, mesh, [of_indices]), ours, max_norm=1.0)
                torch.testing.assert_close(found.full_tensor(), looked_up)
                torch.testing.assert_close(ours.full_tensor(), expected)
                assert ours.placements == (of_table,)

    run_ranks(3, on_a_rank)


def test_a_table_sharded_by_rows_is_never_gathered_and_its_gradient_stays_local() -> None:
    def on_a_rank() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        weight = torch.nn.Parameter(sw.distribute_tensor(torch.randn(1000, 8), mesh, [sw.Shard(0)]))
        tokens = sw.distribute_tensor(torch.tensor([1, 999, 3]), mesh, [sw.Replicate()])
        with comm.count() as traffic:
            found = F.embedding(tokens, weight)
            assert found.placements == (sw.Partial(),)
            found.backward(torch.ones_like(found))
        assert traffic.bytes == 0
        assert weight.grad is not None
        assert weight.grad.placements == (sw.Shard(0),)

    run_ranks(2, on_a_rank)


def test_out_of_range_index_error_names_the_index() -> None:
    def on_a_rank() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        weight = sw.distribute_tensor(torch.randn(5, 2), mesh, [sw.Shard(0)])
        for wrong in (5, -1):
            tokens = sw.distribute_tensor(torch.tensor([1, wrong]), mesh, [sw.Replicate()])
            with pytest.raises(IndexError, match=f"index {wrong} is out of range for 5"):
                F.embedding(tokens, weight)

    run_ranks(2, on_a_rank)


def test_sparse_gradients_raise() -> None:
    mesh = sw.init_device_mesh("cpu", (1,))
    weight = sw.ones(3, 2, mesh=mesh, requires_grad=True)
    with pytest.raises(UnsupportedError, match="sparse=True is not supported: a DTensor cannot hold a sparse gradient"):
        F.embedding(sw.zeros(2, mesh=mesh, dtype=torch.int64), weight, sparse=True)
