"""`shard_batch`: global batches, batches of each rank, uneven sizes, and batches that do not fit together."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch

import shardwright as sw
from shardwright import comm
from shardwright.errors import LocalTensorError, MeshError, MeshMismatchError, TensorError
from shardwright.testing import Raised, outcomes, run_ranks

Pair = namedtuple("Pair", ["first", "second"])


def meshes() -> list[Any]:
    return [
        sw.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)),
        sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")),
        sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "dp")),
    ]


@pytest.mark.parametrize("samples", [8, 5, 3, 1])
def test_a_global_batch_of_any_size_is_sharded_over_data_dimensions_only(samples: int) -> None:
    def work() -> list[str]:
        shown = []
        for mesh in meshes():
            ids = torch.arange(samples * 3).view(samples, 3)
            batch = sw.shard_batch({"ids": ids, "pair": Pair(ids, [ids, 7]), "n": torch.tensor(2), "name": "x"}, mesh)
            assert torch.equal(batch["ids"].full_tensor(), ids)
            assert isinstance(batch["pair"], Pair)
            assert torch.equal(batch["pair"].second[0].full_tensor(), ids)
            assert (batch["pair"].second[1], batch["name"], batch["n"].item()) == (7, "x", 2)
            shown.append(str(batch["ids"].sharding).partition("] ")[2])
        return shown

    expected = ["(dp: S(0))", "(dp: S(0), tp: R)", "(replicate: S(0), dp: S(0))"]
    assert run_ranks(4, work) == [expected] * 4


@pytest.mark.parametrize("sizes", [(2, 2, 2, 2), (3, 1, 0, 4)])
def test_batches_of_each_rank_are_concatenated_in_rank_order(sizes: tuple[int, ...]) -> None:
    def work() -> None:
        mesh = meshes()[0]
        whole = torch.arange(8 * 3).view(8, 3)
        own = whole.split(sizes)[comm.rank()]
        batch = sw.shard_batch({"ids": own}, mesh, per_rank=True)["ids"]
        assert torch.equal(batch.to_local(), own)
        assert torch.equal(batch.full_tensor(), whole)

    run_ranks(4, work)


def test_the_loss_of_uneven_batches_is_the_mean_over_all_samples() -> None:
    def work() -> float:
        own = torch.arange(8.0).split((3, 1, 0, 4))[comm.rank()]
        return sw.shard_batch(own, meshes()[0], per_rank=True).mean().item()

    assert run_ranks(4, work) == [3.5] * 4


def test_different_global_batches_are_refused_on_all_ranks() -> None:
    def work() -> None:
        sw.shard_batch({"ids": torch.full((4, 2), comm.rank())}, meshes()[0])

    for outcome in outcomes(4, work):
        assert isinstance(outcome, Raised)
        assert isinstance(outcome.exception, LocalTensorError)
        assert "rank 0 and rank 1, 2, 3 pass different batches" in str(outcome.exception)
        assert "per_rank=True" in str(outcome.exception)


def test_ranks_of_one_tensor_parallel_group_must_load_the_same_samples() -> None:
    def work() -> None:
        sw.shard_batch(torch.full((4, 2), comm.rank()), meshes()[1], per_rank=True)

    for outcome in outcomes(4, work):
        assert isinstance(outcome, Raised)
        assert isinstance(outcome.exception, LocalTensorError)


def test_sequences_of_different_lengths_are_refused_on_all_ranks() -> None:
    def work() -> None:
        sw.shard_batch(torch.ones(2, 3 + comm.rank()), meshes()[0], per_rank=True)

    for outcome in outcomes(4, work):
        assert isinstance(outcome, Raised)
        assert isinstance(outcome.exception, LocalTensorError)


def test_a_batch_that_is_not_for_this_mesh_is_refused() -> None:
    data = sw.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    both = sw.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    sharded = sw.shard_batch(torch.ones(2, 3), data)
    assert sw.shard_batch(sharded, data) is sharded
    with pytest.raises(MeshMismatchError, match="not on Mesh"):
        sw.shard_batch(sharded, both)
    with pytest.raises(TensorError, match="requires grad"):
        sw.shard_batch(torch.ones(2, requires_grad=True), data)
    for names in (None, ("rows",)):
        with pytest.raises(MeshError, match="must be named"):
            sw.shard_batch(torch.ones(2), sw.init_device_mesh("cpu", (1,), mesh_dim_names=names))
