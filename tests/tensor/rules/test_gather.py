"""Lookups and writes by index and by mask along sharded dimensions match torch, with little communication."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwright as sw
from shardwright.testing import on_ranks


def real(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()


def count(*shape: int, high: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(high + sum(shape)))


CASES = [
    ("gather", lambda x, i: x.gather(0, i), [real(5, 4), count(3, 4, high=5)]),
    ("gather of a part", lambda x, i: x.gather(0, i), [real(5, 4), count(3, 2, high=5)]),
    ("take_along_dim", lambda x, i: torch.take_along_dim(x, i, 1), [real(5, 4), count(5, 3, high=4) - 4]),
    ("take_along_dim of all", lambda x, i: torch.take_along_dim(x, i), [real(5, 4), count(7, high=20)]),
    ("index_select", lambda x, i: x.index_select(0, i), [real(5, 2), count(7, high=5)]),
    ("x[i, j]", lambda x, i, j: x[i, j], [real(5, 4), count(3, 1, high=5), count(2, high=4) - 4]),
    ("x[i, :, j]", lambda x, i, j: x[i, :, j], [real(4, 2, 3), count(4, high=4), count(4, high=3)]),
    ("x[i].mul_", lambda x, i: x.square()[i].mul_(2).add_(1), [real(5, 4), count(3, high=5)]),
    ("scatter", lambda x, i, y: x.scatter(0, i, y), [real(5, 4), torch.tensor([[0] * 4, [3] * 4]), real(2, 4)]),
    ("scatter a number", lambda x, i: x.scatter(0, i, 2.0), [real(5, 4), count(2, 4, high=5)]),
    ("scatter_add", lambda x, i, y: x.scatter_add(0, i, y), [real(5, 4), count(3, 4, high=5), real(3, 4)]),
    ("scatter_add of a part", lambda x, i, y: x.scatter_add(0, i, y), [real(5, 4), count(3, 2, high=5), real(3, 2)]),
    ("reduce", lambda x, i, y: x.scatter_reduce(1, i, y, "mean"), [real(4, 5), count(4, 3, high=5), real(4, 3)]),
    ("index_add", lambda x, i, y: x.index_add(0, i, y), [real(5, 4), count(3, high=5), real(3, 4)]),
    ("index_copy", lambda x, i, y: x.index_copy(0, i, y), [real(5, 4), torch.tensor([4, 1]), real(2, 4)]),
    ("index_fill", lambda x, i: x.index_fill(0, i, 2.0), [real(5, 4), torch.tensor([-1, 1])]),
    ("index_put", lambda x, i, y: x.index_put((i,), y), [real(5, 4), torch.tensor([-1, 1]), real(4)]),
    ("index_put by a mask", lambda x, m, y: x.index_put((m,), y), [real(5, 4), count(5, high=2) == 1, real(4)]),
    ("index_put, adding", lambda x, i, y: x.index_put((i,), y, True), [real(5, 4), torch.tensor([4, 4]), real(2, 4)]),
    ("x[:, i] = y", lambda x, i, y: _written(x, (slice(None), i), y), [real(4, 5), torch.tensor([3, 0]), real(2)]),
    ("x[i] = 3", lambda x, i: _written(x, i, 3), [real(5, 2), torch.tensor([3, -1])]),
    ("x[mask]", lambda x: x[x.detach() > 0], [real(5, 4)]),
    ("x[mask of rows]", lambda x, m: x[m], [real(5, 4), count(5, high=2) == 1]),
    ("x[:, mask]", lambda x, m: x[:, m], [real(5, 4), count(4, high=2) == 1]),
    ("x[1:, mask, None]", lambda x, m: x[1:, m, None], [real(5, 4), count(4, high=2) == 1]),
    ("x[..., mask of two]", lambda x, m: x[..., m], [real(2, 3, 4), count(3, 4, high=2) == 1]),
    ("x[no rows]", lambda x, m: x[m], [real(5, 4), torch.zeros(5, dtype=torch.bool)]),
    ("x[mask] = row", lambda x, m, y: _written(x, m, y), [real(5, 4), count(5, high=2) == 1, real(4)]),
    ("x[mask] = values", lambda x, m, y: _written(x, m, y), [real(5), torch.arange(5) % 2 == 0, real(3)]),
    ("masked_scatter", lambda x, m, y: x.masked_scatter(m, y), [real(5, 4), count(5, 4, high=2) == 1, real(20)]),
    ("masked_scatter, spread", lambda x, m, y: x.masked_scatter(m, y), [real(5, 4), count(4, high=2) == 1, real(4, 6)]),
]  # fmt: skip


def _written(x: Any, index: Any, value: Any) -> Any:
    y = x * 1
    y[index] = value
    return y


def test_lookups_and_writes_match_torch_for_every_layout(against_torch: Callable[..., None]) -> None:
    against_torch((3,), CASES, max_combinations=24)


def test_lookups_and_writes_match_torch_on_a_2d_mesh(against_torch: Callable[..., None]) -> None:
    against_torch((2, 2), CASES, max_combinations=8)


@on_ranks(4)
def test_lookups_along_a_sharded_dimension_do_not_communicate() -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    x = sw.distribute_tensor(torch.arange(400.0).reshape(100, 4), mesh, [sw.Shard(0)])
    index = sw.distribute_tensor(torch.tensor([3, 99, 50]), mesh, [sw.Replicate()])
    wide = index.unsqueeze(1).expand(3, 4)
    with sw.trace() as seen:
        results = [x[index], x.index_select(0, index), x.gather(0, wide)]
    assert not seen.redistributions
    for result in results:
        assert result.placements == (sw.Partial(),)
        assert result.full_tensor()[:, 0].tolist() == [12, 396, 200]


@on_ranks(4)
def test_writes_along_a_sharded_dimension_do_not_communicate_and_keep_the_layout() -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    x = sw.zeros(10, 4, mesh=mesh, placements=[sw.Shard(0)])
    index = sw.distribute_tensor(torch.tensor([3, 9, 3]), mesh, [sw.Replicate()])
    values = sw.distribute_tensor(torch.ones(3, 4), mesh, [sw.Replicate()])
    wide = index.unsqueeze(1).expand(3, 4)
    with sw.trace() as seen:
        results = [
            x.index_add(0, index, values),
            x.scatter_add(0, wide, values),
            x.index_put((index,), values, accumulate=True),
        ]
        x.index_add_(0, index, values)
    assert not seen.redistributions
    for result in (*results, x):
        assert result.placements == (sw.Shard(0),)
        assert result.full_tensor()[:, 0].tolist() == [0, 0, 0, 2, 0, 0, 0, 0, 0, 1]


@on_ranks(4)
def test_rows_selected_by_a_mask_stay_on_their_rank() -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    whole = torch.arange(4000.0).reshape(1000, 4)
    x = sw.distribute_tensor(whole, mesh, [sw.Shard(0)])
    mask = x[:, 0] > 2600
    with sw.trace() as seen:
        selected = x[mask]
    assert torch.equal(selected.full_tensor(), whole[whole[:, 0] > 2600])
    assert seen.received <= 3 * 8  # one count from each of the other ranks
    source = sw.distribute_tensor(torch.arange(4000.0), mesh, [sw.Replicate()])
    with sw.trace() as seen:
        replaced = x.masked_scatter(x > 2600, source)
    assert seen.received <= 3 * 8
    assert replaced.placements == (sw.Shard(0),)
    assert torch.equal(replaced.full_tensor(), whole.masked_scatter(whole > 2600, torch.arange(4000.0)))


@on_ranks(3)
def test_out_of_range_index_raises_on_every_rank() -> None:
    mesh = sw.init_device_mesh("cpu", (3,))
    x = sw.distribute_tensor(torch.arange(10.0), mesh, [sw.Shard(0)])
    for wrong in (10, -11):
        index = sw.distribute_tensor(torch.tensor([0, wrong]), mesh, [sw.Replicate()])
        calls: list[Callable[[], Any]] = [
            lambda index=index: x[index],
            lambda index=index: x.gather(0, index),
            lambda index=index: x.index_select(0, index),
            lambda index=index: x.scatter(0, index, 1.0),
            lambda index=index: x.index_put((index,), x[:2]),
            lambda index=index: x.take(index),
        ]
        for call in calls:
            with pytest.raises(IndexError, match=f"index {wrong} is out of range for 10"):
                call()
    negative = sw.distribute_tensor(torch.tensor([-1]), mesh, [sw.Replicate()])
    with pytest.raises(IndexError, match="index -1 is out of range"):
        x.gather(0, negative)  # as torch does
    assert x[negative].item() == 9


@on_ranks(2)
def test_masked_scatter_with_too_few_elements_raises() -> None:
    mesh = sw.init_device_mesh("cpu", (2,))
    x = sw.distribute_tensor(torch.arange(6.0), mesh, [sw.Shard(0)])
    with pytest.raises(RuntimeError, match="the mask selects 4 elements, but source has only 3"):
        x.masked_scatter(x > 1, sw.ones(3, mesh=mesh))
