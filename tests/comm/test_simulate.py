"""A process that acts as one rank of a simulated world counts what that rank would receive, and sends nothing."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import shardwright as sw
from shardwright import comm
from shardwright.errors import CommError, RankFailedError
from shardwright.layout import Layout, Mesh
from shardwright.testing import on_ranks, run_ranks

COUNT = 60


def layouts() -> list[tuple[Layout, Layout]]:
    draw = random.Random(7)
    pairs = []
    for number in range(COUNT):
        mesh = Mesh((4,)) if number % 2 else Mesh((2, 2))
        shape = tuple(draw.choice((1, 3, 4, 7, 8)) for _ in range(2))
        placements = [sw.Shard(0), sw.Shard(1), sw.Replicate(), sw.Partial()]
        source, target = ([draw.choice(placements) for _ in mesh.shape] for _ in range(2))
        pairs.append((Layout(mesh, source, shape), Layout(mesh, target, shape)))
    return pairs


@on_ranks(4, timeout=120)
def test_simulated_ranks_count_what_real_ranks_receive() -> None:
    real = [forward_transfers(source, target, "cpu") for source, target in layouts()]
    with comm.simulate(4, comm.rank()):
        simulated = [forward_transfers(source, target, "meta") for source, target in layouts()]
    assert simulated == real
    assert sum(map(len, real)) > COUNT // 2
    again = [forward_transfers(source, target, "cpu") for source, target in layouts()[:4]]  # the world is back
    assert again == real[:4]


def forward_transfers(source: Layout, target: Layout, device: str) -> list[comm.Transfer]:
    seen: list[comm.Transfer] = []
    local = torch.ones(source.local_shape(comm.rank()), device=device)
    x = sw.DTensor.from_local(local, source.mesh, source.placements, shape=source.shape, run_check=False)
    with comm.listen(seen.append):
        y = x.redistribute(placements=target.placements)
    assert tuple(y.to_local().shape) == target.local_shape(comm.rank())
    return seen


def training_step(device: str) -> list[comm.Transfer]:
    mesh = Mesh((2, 2))
    seen: list[comm.Transfer] = []
    with torch.device(device):
        x, w, v = torch.ones(8, 6), torch.ones(6, 10), torch.ones(10, 3)
    x = sw.distribute_tensor(x, mesh, [sw.Shard(0), sw.Replicate()], src_data_rank=None)
    w = sw.distribute_tensor(w, mesh, [sw.Shard(0), sw.Shard(1)], src_data_rank=None).requires_grad_()
    v = sw.distribute_tensor(v, mesh, [sw.Replicate(), sw.Shard(0)], src_data_rank=None).requires_grad_()
    with comm.listen(seen.append):
        loss = ((x @ w).relu() @ v).square().mean()
        loss.backward()
    assert w.grad is not None
    return seen


@on_ranks(4)
def test_simulated_training_step_runs_the_collectives_of_the_real_one() -> None:
    real = training_step("cpu")
    with comm.simulate(4, comm.rank()):
        assert training_step("meta") == real
    assert real


def many_tensors(device: str) -> list[comm.Transfer]:
    seen: list[comm.Transfer] = []
    sizes = [[3, 2, 2, 0], [1, 1, 1, 1]]
    pieces = [torch.ones(size[comm.rank()], 5, device=device) for size in sizes]
    with comm.listen(seen.append):
        wholes = comm.all_gather_many(pieces, sizes=sizes)
        reduced = comm.reduce_scatter_many(wholes, sizes=sizes, present=[True, False])
    assert [whole.shape[0] for whole in wholes] == [7, 4]
    assert reduced[1] is None
    return seen


@on_ranks(4)
def test_simulated_collectives_of_many_tensors_are_counted_as_the_real_ones() -> None:
    real = many_tensors("cpu")
    with comm.simulate(4, comm.rank()):
        assert many_tensors("meta") == real
    with comm.simulate(4, comm.rank(), device="cuda"):
        assert many_tensors("meta") == real


def test_any_number_of_ranks_can_be_simulated_in_one_process() -> None:
    layout = Layout(Mesh((1000,)), [sw.Shard(0)], (10_000, 8))
    with comm.simulate(1000, 999), comm.count() as traffic:
        local = torch.empty(layout.local_shape(999), device="meta")
        x = sw.DTensor.from_local(local, layout.mesh, layout.placements, shape=layout.shape)
        assert x.full_tensor().shape == (10_000, 8)
    assert traffic.calls == {"all_gather": 1}
    assert traffic.bytes == 9_990 * 8 * 4
    assert comm.world().size == 1


def test_reductions_are_counted_as_the_device_runs_them() -> None:
    counted = {}
    for device in ("cpu", "cuda"):
        with comm.simulate(4, device=device), comm.count() as traffic:
            partial = sw.DTensor.from_local(torch.empty(1000, device="meta"), Mesh((4,)), [sw.Partial()])
            partial.full_tensor()
        counted[device] = dict(traffic.calls)
    assert counted == {"cpu": {"reduce_scatter": 1, "all_gather": 1}, "cuda": {"all_reduce": 1}}


def test_agreement_takes_the_other_ranks_to_be_like_this_one() -> None:
    def fail() -> Any:
        raise ValueError("no")

    with comm.simulate(3, 1):
        assert comm.gather_bytes(b"mine") == [b"mine"] * 3
        assert comm.agree(lambda: 5, what="counting") == 5
        with pytest.raises(RankFailedError, match="counting failed"):
            comm.agree(fail, what="counting")


def test_rank_outside_the_simulated_world_is_refused() -> None:
    with pytest.raises(CommError, match="rank 4 is not among 4 ranks"), comm.simulate(4, 4):
        pass


def test_tensor_with_values_is_refused_in_a_simulated_world() -> None:
    with comm.simulate(2), pytest.raises(CommError, match="simulated"):
        comm.all_gather(torch.ones(2))


def test_real_world_is_restored_after_an_error_inside() -> None:
    def inside() -> tuple[int, list[float]]:
        with pytest.raises(ZeroDivisionError), comm.simulate(8, 5):
            _ = comm.rank() // 0
        return comm.rank(), comm.all_gather(torch.ones(1)).tolist()

    assert run_ranks(2, inside) == [(0, [1.0, 1.0]), (1, [1.0, 1.0])]
