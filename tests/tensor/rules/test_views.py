"""Views, their copies, roll and flip along sharded dimensions communicate only what is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwright as sw
from shardwright.errors import InPlaceError, UnsupportedError
from shardwright.testing import on_ranks


def real(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()


def _after_write(x: Any, write: Callable[[Any], Any]) -> Any:
    y = x * 1
    write(y)
    return y


def _incremented(x: Any, index: Any) -> Any:
    y = x.square()  # reduces partial sums, which cannot be incremented
    y[index] += 1
    return y


CASES = [
    ("roll", lambda x: x.roll(2, 0), [real(5, 4)]),
    ("roll back, both", lambda x: x.roll((-1, 7), (0, 1)), [real(5, 4)]),
    ("roll all", lambda x: x.roll(3), [real(5, 4)]),
    ("roll few", lambda x: x.roll(1, 0), [real(2, 4)]),
    ("flip", lambda x: x.flip(0, 1), [real(5, 4)]),
    ("flip few", lambda x: x.flip(-1), [real(5, 2)]),
    ("fliplr, flipud", lambda x: (x.fliplr(), x.flipud()), [real(5, 4)]),
    *((f"rot90 {k}", lambda x, k=k: x.rot90(k), [real(5, 4)]) for k in (-1, 1, 2, 4)),
    ("unfold", lambda x: x.unfold(0, 3, 2), [real(9, 2)]),
    ("unfold far", lambda x: x.unfold(0, 5, 1), [real(6, 2)]),
    ("unfold_copy", lambda x: torch.unfold_copy(x, 1, 2, 1), [real(5, 4)]),
    ("repeat", lambda x: x.repeat(2, 3), [real(5, 4)]),
    ("tile", lambda x: x.tile((2, 1, 3)), [real(5, 4)]),
    ("repeat_interleave", lambda x, n: x.repeat_interleave(n, 0), [real(5, 4), torch.tensor([2, 0, 1, 3, 1])]),
    ("repeat_interleave of all", lambda x, n: x.repeat_interleave(n), [real(2, 2), torch.tensor([2, 0, 1, 3])]),
    ("diagonal", lambda x: (x.diagonal(), x.diagonal(-2), x.diagonal(1, 1, 0)), [real(5, 4)]),
    ("diag", lambda x: (x.diag(1), x[0].diag(-1)), [real(5, 4)]),
    ("diagflat", lambda x: x.diagflat(2), [real(3, 2)]),
    ("diag_embed", lambda x: x.diag_embed(1, 0, 2), [real(3, 4)]),
    ("trace", lambda x: x.trace(), [real(5, 4)]),
    ("select_scatter", lambda x, y: x.select_scatter(y, 0, -2), [real(5, 4), real(4)]),
    ("slice_scatter", lambda x, y: x.slice_scatter(y, 0, 1, 5, 2), [real(5, 4), real(2, 4)]),
    ("diagonal_scatter", lambda x, y: x.diagonal_scatter(y, -1), [real(5, 4), real(4)]),
    ("narrow", lambda x, at: x.narrow(0, at, 2), [real(5, 4), torch.tensor(3)]),
    ("tensor_split", lambda x, at: x.tensor_split(at), [real(5, 4), torch.tensor([1, 3])]),
    ("sum_to_size", lambda x: x.sum_to_size(1, 4), [real(2, 5, 4)]),
    ("atleast", lambda x, y: (*torch.atleast_2d(x, y), torch.atleast_3d(x)), [real(5), real(5, 4)]),
    ("copies", lambda x: (torch.permute_copy(x, (1, 0)), torch.narrow_copy(x, 0, 1, 2)), [real(3, 4)]),
    ("copies of many", lambda x: torch.unbind_copy(x), [real(3, 4)]),
    ("unravel_index", lambda x: torch.unravel_index(x, (5, 4)), [torch.tensor([3, 19, 0, 7])]),
    ("x[1] += 1", lambda x: _incremented(x, 1), [real(5, 4)]),
    ("x[i] += 1", lambda x: _incremented(x, [0, 3]), [real(5, 4)]),
    ("x[:, 2] += 1", lambda x: _incremented(x, (slice(None), 2)), [real(5, 4)]),
    ("x[1].mul_", lambda x: _after_write(x, lambda y: y[1].mul_(3)), [real(5, 4)]),
    ("x[1][1:3].mul_", lambda x: _after_write(x, lambda y: y[1][1:3].mul_(3)), [real(5, 4)]),
    ("x[1][0] = 7", lambda x: _after_write(x, lambda y: y[1].__setitem__(0, 7)), [real(5, 4)]),
    ("x.select.zero_", lambda x: _after_write(x, lambda y: y.select(-2, 1).zero_()), [real(5, 4)]),
]  # fmt: skip


def test_roll_and_flip_match_torch_for_every_layout(against_torch: Callable[..., None]) -> None:
    against_torch((3,), CASES, max_combinations=12)


def test_roll_and_flip_match_torch_on_a_2d_mesh(against_torch: Callable[..., None]) -> None:
    against_torch((2, 2), CASES, max_combinations=6)


@on_ranks(4)
def test_roll_and_flip_send_each_row_once() -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    whole = torch.arange(4000.0).reshape(1000, 4)
    x = sw.distribute_tensor(whole, mesh, [sw.Shard(0)])
    with sw.trace() as seen:
        rolled = x.roll(3, 0)
    assert rolled.placements == x.placements
    assert seen.received == 3 * 4 * 4  # three rows of four values
    assert torch.equal(rolled.full_tensor(), whole.roll(3, 0))
    with sw.trace() as seen:
        flipped = x.flip(0)
    assert flipped.placements == x.placements
    assert seen.received == 250 * 4 * 4  # its own share, from the rank at the other end
    assert torch.equal(flipped.full_tensor(), whole.flip(0))


@on_ranks(4)
def test_unfold_along_a_sharded_dimension_exchanges_only_a_halo() -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    whole = torch.arange(400.0)
    x = sw.distribute_tensor(whole, mesh, [sw.Shard(0)])
    with sw.trace() as seen:
        windows = x.unfold(0, 5, 1)
    assert seen.received <= 4 * 4  # a window of five lacks four values
    assert torch.equal(windows.full_tensor(), whole.unfold(0, 5, 1))
    with pytest.raises(InPlaceError, match="looks like a view but is a copy, because unfold"):
        windows.zero_()


@on_ranks(4)
def test_diagonals_and_scatters_into_views_do_not_communicate() -> None:
    mesh = sw.init_device_mesh("cpu", (4,))
    x = sw.distribute_tensor(torch.arange(60.0).reshape(10, 6), mesh, [sw.Shard(0)])
    row = sw.zeros(6, mesh=mesh)
    with sw.trace() as seen:
        results = [
            x.diagonal(-1), x[:, 0].diag(2), x.select_scatter(row, 0, 3), x.slice_scatter(x[2:8] * 2, 0, 2, 8),
            x.diagonal_scatter(row), torch.permute_copy(x, (1, 0)), x.repeat_interleave(3, 0),
        ]  # fmt: skip
    assert not seen.redistributions
    assert all(any(p.is_shard() for p in result.placements) for result in results)
    x.diagonal().zero_()  # every rank's part is a view
    assert x.full_tensor().trace().item() == 0


@on_ranks(2)
def test_copies_of_views_do_not_share_memory() -> None:
    x = sw.ones(4, 2, mesh=sw.init_device_mesh("cpu", (2,)), placements=[sw.Shard(0)])
    for copy in (
        torch.alias_copy(x), torch.view_copy(x, (8,)), torch.t_copy(x), torch.expand_copy(x, (4, 2)),
        torch.slice_copy(x, 0, 0, 4), torch.split_with_sizes_copy(x, [2, 2])[0], torch.unsqueeze_copy(x, 0),
        torch.squeeze_copy(x), torch.transpose_copy(x, 0, 1), torch.select_copy(x, 1, 0), torch.diagonal_copy(x),
    ):  # fmt: skip
        copy.zero_()
        assert x.full_tensor().sum().item() == 8


@on_ranks(2)
def test_as_strided_of_a_non_contiguous_dtensor_raises() -> None:
    mesh = sw.init_device_mesh("cpu", (2,))
    x = sw.distribute_tensor(torch.arange(12.0).reshape(4, 3), mesh, [sw.Shard(0)])
    assert x.as_strided((2, 2), (3, 1), 1).full_tensor().tolist() == [[1, 2], [4, 5]]
    with pytest.raises(UnsupportedError, match=r"strides refer to the memory of one tensor, but .* is not contiguous"):
        x.t().as_strided((2, 2), (3, 1))


@on_ranks(4)
def test_resize_keeps_element_order_and_remaining_shards() -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2))
    for places in ([sw.Shard(0), sw.Shard(1)], [sw.Shard(1), sw.Replicate()], [sw.Replicate(), sw.Shard(0)]):
        x = sw.distribute_tensor(torch.arange(20.0).reshape(5, 4), mesh, places)
        assert x.resize_(3, 5) is x
        assert x.full_tensor().tolist() == torch.arange(15.0).reshape(3, 5).tolist()
        assert list(x.placements) == places
        x.resize_(17)
        assert x.full_tensor()[:15].tolist() == list(range(15))
        assert x.to_local().shape == x.sharding.local_shape(torch.distributed.get_rank())
    with pytest.raises(InPlaceError, match="that requires grad: its gradient would not fit"):
        sw.ones(4, mesh=mesh).requires_grad_().resize_(3)
