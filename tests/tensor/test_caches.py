"""Caches are bounded, and different calls never share a plan."""

from __future__ import annotations

import gc
import tracemalloc

import torch

import shardwright as sw
from shardwright.layout import layout as layouts
from shardwright.testing import RankPool


def test_ten_thousand_steps_of_changing_shapes_do_not_leak_memory() -> None:
    def on_a_rank() -> tuple[int, int]:
        mesh = sw.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))

        def steps(first: int, last: int) -> None:
            for step in range(first, last):
                x = sw.ones(1 + step % 977, 3, mesh=mesh, placements=[sw.Shard(0)])
                y = torch.addcmul(x * float(step), x, x, value=step)
                z = y.view(-1, 1).sum(0) + step
                z.add_(step, alpha=step)

        steps(0, 2000)
        gc.collect()
        tracemalloc.start()  # and never stopped, in a process of its own: see tests/peak_memory.py
        before, interned = tracemalloc.get_traced_memory()[0], len(layouts._interned)
        steps(2000, 12000)
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before, len(layouts._interned) - interned

    with RankPool() as pool:
        [(grown_by, more_layouts)] = pool.run(1, on_a_rank, timeout=150)
    assert grown_by < 1_000_000
    assert more_layouts <= 100


def test_equal_numbers_of_different_types_have_different_plans() -> None:
    mesh = sw.init_device_mesh("cpu", (1,))
    x = sw.ones(3, mesh=mesh, dtype=torch.int64)
    assert (x * 2).dtype == torch.int64
    assert (x * 2.0).dtype == torch.float32
    assert (x * True).dtype == torch.int64
    assert (x * 3).tolist() == [3, 3, 3]  # the value is not part of any plan


def test_different_static_arguments_have_different_plans() -> None:
    mesh = sw.init_device_mesh("cpu", (1,))
    x = sw.ones(2, 3, mesh=mesh)
    assert x.sum(0).shape == (3,)
    assert x.sum(1).shape == (2,)
    assert x.sum(0, keepdim=True).shape == (1, 3)
    assert torch.softmax(x, 0)[0, 0].item() == 0.5
    assert abs(torch.softmax(x, 1)[0, 0].item() - 1 / 3) < 1e-6
