"""In-place operators and `out=` keep the layout of their target, follow torch's rules, and never write to a copy."""

from __future__ import annotations

import copy

import pytest
import torch

import shardwright as sw
from shardwright.errors import InPlaceError
from shardwright.layout import Partial, Ragged, Replicate, Shard
from shardwright.testing import on_ranks
from tests.tensor.values import close, line, partial_sums, randn, spread

R, P = Replicate(), Partial()
ROWS = Shard(0)


@on_ranks(3)
def test_in_place_shape_changes_update_the_layout_or_are_refused() -> None:
    """The layout would otherwise describe a shape that the tensor no longer has."""
    for placement in (R, ROWS, P):
        for write in (
            lambda x: x.t_(),
            lambda x: x.unsqueeze_(0),
            lambda x: x.transpose_(0, 1),
            lambda x: x.squeeze_(),
        ):
            x = (
                partial_sums(randn(4, 1)).detach()
                if placement == P
                else sw.distribute_tensor(randn(4, 1), line(), [placement])
            )
            try:
                write(x)
            except InPlaceError:
                close(x, randn(4, 1))
            else:
                close(x, write(randn(4, 1)))


@on_ranks(2, timeout=30)
def test_copy_that_looks_like_a_view_is_never_written_to() -> None:
    for _ in range(3):
        x = spread(torch.zeros(6, 4), Shard(1))
        y = x.view(24)  # moved: a copy
        for write in (
            lambda y=y: y.add_(1),
            lambda y=y: y.detach().add_(1),
            lambda y=y: y.view(6, 4).add_(1),
            lambda y=y: torch.add(y, y, out=y),
        ):
            with pytest.raises(InPlaceError, match="copy"):
                write()


@on_ranks(2, timeout=30)
def test_out_with_a_dtype_that_cannot_hold_the_result_is_refused() -> None:
    x, z = spread(torch.full((4,), 1.5), Shard(0)), spread(torch.zeros(4, dtype=torch.int64), R)
    with pytest.raises(InPlaceError, match=r"torch.int64 cannot hold the result of torch.float32"):
        torch.mul(x, x, out=z)


@on_ranks(4, timeout=30)
def test_target_keeps_its_shard_order_beside_an_operand_of_another_order() -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2))
    whole = torch.arange(16.0).reshape(2, 8)
    x = sw.distribute_tensor(whole, mesh, [Shard(1), Shard(1)])
    x.add_(sw.distribute_tensor(whole, mesh, [Shard(1), Shard(1)], order=(1, 0)))
    assert torch.equal(x.full_tensor(), whole * 2)


@on_ranks(2, timeout=30)
def test_writing_to_a_tensor_during_async_redistribution_does_not_change_the_result() -> None:
    x = spread(torch.zeros(4), Shard(0))
    y = x.redistribute(placements=[R], async_op=True)
    x.add_(1)
    assert y.tolist() == [0, 0, 0, 0]


@on_ranks(2, timeout=30)
def test_operators_without_rules_and_their_writes_work_in_inference_mode() -> None:
    with torch.inference_mode():
        x = spread(torch.eye(4) * 2, Shard(0))
        assert torch.equal(torch.linalg.inv(x).full_tensor(), torch.eye(4) / 2)
        x.renorm_(2, 0, 1.0)  # no rule, in place
        assert torch.allclose(x.full_tensor(), torch.eye(4), atol=1e-4)


@on_ranks(3)
def test_write_that_reads_a_part_of_its_target_is_refused_on_all_ranks() -> None:
    """torch refuses it too, or its result depends on the order of the writes; rows of one element are no exception."""
    for placement in (R, Shard(0), Shard(1)):
        for write in (
            lambda x: x.add_(x[-2]),
            lambda x: x.mul_(x[:, 1:2]),
            lambda x: x.sub_(x.select(1, 0)[:, None]),
            lambda x: x.view(4, 4).add_(x[0]),
            lambda x: x.__iadd__(x.view(16)[:1]),
        ):
            x = spread(randn(4, 4), placement)
            with pytest.raises(InPlaceError, match="part of the same memory"):
                write(x)
            close(x, randn(4, 4))


@on_ranks(3)
def test_write_that_reads_another_part_of_the_memory_gives_what_torch_gives() -> None:
    for placement in (R, Shard(0), Shard(1)):
        for write in (
            lambda x: x[:2].add_(x[3]),
            lambda x: x[:, :2].mul_(x[:, 3:]),
            lambda x: x.fill_(x[1, 1]),
            lambda x: x.masked_fill_(x > 0, x[1, 1]),
            lambda x: x.unbind(0)[1].mul_(2),
            lambda x: x.add_(x[1].clone()),
        ):
            x, plain = spread(randn(4, 4), placement), randn(4, 4)
            write(x), write(plain)
            close(x, plain)


@on_ranks(2)
def test_write_to_an_item_of_a_reshaped_tensor_reaches_its_base() -> None:
    x = spread(torch.full((1,), 5.0), ROWS).requires_grad_()
    item = x.reshape(-1).unbind(-1)[0]
    with torch.no_grad():
        item.mul_(2)
    close(x, torch.full((1,), 10.0))


@on_ranks(2)
def test_in_place_shape_change_of_a_leaf_that_requires_grad_is_refused() -> None:
    """The gradient of what was computed from it before has the shards that it had then."""
    x = spread(randn(6, 6), ROWS).requires_grad_()
    y = x[[1, 3], 2]
    for change in (lambda: x.transpose_(0, 1), lambda: x.t_(), lambda: x.unsqueeze_(0)):
        with torch.no_grad(), pytest.raises(InPlaceError, match="a leaf that requires grad"):
            change()
    (y * y).sum().backward()
    plain = randn(6, 6).requires_grad_()
    (plain[[1, 3], 2] ** 2).sum().backward()
    close(x.grad, plain.grad)


@on_ranks(2)
def test_masked_write_to_an_expanded_tensor_is_refused() -> None:
    for placement in (R, Shard(1)):
        x = spread(torch.zeros(1, 4), placement).expand(2, 4)
        mask = spread(torch.tensor([True, False]), R)
        for value in (torch.ones(4), torch.ones(1, 4)):
            with pytest.raises(InPlaceError, match=r"x\[mask\] = value: .* share memory"):
                x[mask] = spread(value, R)
        close(x, torch.zeros(2, 4))


@on_ranks(4)
def test_write_to_a_copied_tensor_whose_elements_share_memory_is_refused_on_all_ranks() -> None:
    """Ranks with empty shards cannot see in their own memory that elements are shared: the copy keeps the strides."""
    x = copy.deepcopy(spread(torch.zeros(7, 2, 2), Shard(2)).unfold(0, 2, 1))
    with pytest.raises(InPlaceError, match="share memory"):
        x[-5:, -2, -1].neg_()


@on_ranks(2)
def test_write_by_index_to_an_expanded_tensor_is_refused() -> None:
    index = torch.tensor([1, 0])
    writes = {
        "index_fill": lambda x, i: x.index_fill_(1, i, 5),
        "index_copy": lambda x, i: x.index_copy_(1, i, torch.ones_like(x[:, :2])),
        "index_add": lambda x, i: x.index_add_(1, i, torch.ones_like(x[:, :2])),
        "scatter": lambda x, i: x.scatter_(1, torch.zeros_like(x, dtype=torch.int64), 5),
    }
    for name, write in writes.items():
        base = spread(torch.zeros(4), ROWS)
        with pytest.raises(InPlaceError, match=rf"{name}.*share memory"):
            write(base.expand(2, 4), spread(index, R))
        close(base, torch.zeros(4))


@on_ranks(2)
def test_a_copy_of_an_inference_tensor_is_stale_after_a_write_that_torch_refuses_too_late() -> None:
    """Outside inference mode, torch writes to an inference tensor and raises then."""
    zero = spread(torch.tensor([0]), R)
    for write in (
        lambda x: x.unsqueeze(0).add_(2),
        lambda x: torch._foreach_add_([x], 2),
        lambda x: x.index_fill_(0, zero, 3),
    ):
        with torch.inference_mode():
            x = spread(torch.ones(1, 1), Shard(1)).sum(0)
        last = x[-1]  # a copy: finding it needs communication
        with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
            write(x)
        with pytest.raises(InPlaceError, match="written to since"):
            last * 1
        close(x[zero][0], x.full_tensor()[0])


@on_ranks(2)
def test_write_to_an_expanded_tensor_is_refused_on_ranks_with_empty_shards_too() -> None:
    x = spread(torch.ones(1), ROWS).expand(2, -1)
    for write in (lambda: x.mul_(2), lambda: x.zero_(), lambda: x.copy_(torch.ones_like(x)), lambda: x.cumsum_(0)):
        with pytest.raises(InPlaceError, match="share memory"):
            write()
    close(x, torch.ones(2, 1))


@on_ranks(4)
def test_write_by_index_that_reads_its_target_is_refused_on_ranks_with_empty_shards_too() -> None:
    def setitem(x: torch.Tensor) -> None:
        x[[0, -1, -1], ...] = x

    index = spread(torch.tensor([0]), R)
    for write in (setitem, lambda x: x.index_copy_(0, index, x), lambda x: x.index_add_(0, index, x)):
        x = spread(torch.ones(1, 3), Ragged(1, (1, 0, 1, 1)))
        with pytest.raises(InPlaceError, match="a part of the same memory"):
            write(x)
        close(x, torch.ones(1, 3))
    rows = spread(torch.arange(6.0).view(2, 3), Shard(1))
    rows[1] = rows[0]  # other elements
    close(rows, torch.tensor([[0.0, 1.0, 2.0]] * 2))
