"""A copy that looks like a view behaves as torch's view, or raises before anything is written."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.errors import InPlaceError, LoadMismatchError
from shardwright.tensor.base.copied import is_copied
from shardwright.tensor.base.tagging import version_of
from shardwright.testing import on_ranks, run_ranks


def rows(whole: Tensor, placement: Any = None) -> Any:
    mesh = sw.init_device_mesh("cpu", (4,))
    return sw.distribute_tensor(whole, mesh, [placement or sw.Shard(0)], src_data_rank=None)


def whole(*shape: int) -> Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)


def column() -> Any:
    return rows(torch.ones(1), sw.Replicate())


class SameObject(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient


class Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x[1]

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return None


def hooked_with(leaf: Any, gradient: Any) -> Any:
    leaf.register_hook(lambda _: gradient)
    return leaf * 1


def module_hooked_with(leaf: Any, gradient: Any) -> Any:
    module = nn.Identity()
    module.register_full_backward_hook(lambda *_: (gradient,))
    return module(leaf) * 1


USES: list[Callable[[Any], Any]] = [
    lambda row: row + 1,
    lambda row: row * row,
    lambda row: torch.stack([row, row]),
    lambda row: torch.cat((row.new_zeros(1), row)),
    lambda row: row[:1],
    lambda row: row.item(),
    lambda row: row.tolist(),
    lambda row: float(row),
    lambda row: bool(row),
    lambda row: row.full_tensor(),
    lambda row: row.to_local(),
    lambda row: row.numpy(),
    lambda row: row.data,
    lambda row: row.detach(),
    lambda row: repr(row),
    lambda row: copy.copy(row),
    lambda row: copy.deepcopy(row),
    lambda row: setattr(column(), "data", row),
    lambda row: SameObject.apply(row),
    lambda row: sw.local_map(lambda local: local, out_placements=[sw.Partial()])(row),
    lambda row: (column().requires_grad_() * 1).backward(row),
    lambda row: torch.autograd.grad((leaf := column().requires_grad_()) * 1, leaf, row),
    lambda row: hooked_with(column().requires_grad_(), row).sum().backward(),
    lambda row: module_hooked_with(column().requires_grad_(), row).sum().backward(),
    lambda row: row.redistribute(placements=[sw.Replicate()]),
    lambda row: row.add_(1),
    lambda row: row.__setitem__(0, 1.0),
    lambda row: torch.add(row.clone(), 1, out=row),
]


@on_ranks(4)
def test_every_use_of_a_stale_copy_raises() -> None:
    for use in USES:
        x = rows(whole(4, 1))
        row = x[2]
        use(row)  # up to date
        x, row = (y := rows(whole(4, 1))), y[2]
        x[0] = 5.0
        with pytest.raises(InPlaceError, match=r"looks like a view but is a copy.*again after the write, or clone"):
            use(row)
        assert x.full_tensor().tolist() == [[5], [2], [3], [4]]  # a refused write has written nothing
        assert tuple(row.shape) == (1,)  # what is known without its values


@on_ranks(4)
def test_every_kind_of_write_to_the_base_makes_a_copy_stale() -> None:
    def through_data(x: Any) -> None:
        x.data[1] = 5.0

    def through_data_taken_before(x: Any, before: Any) -> None:
        before[1] = 5.0

    other = rows(whole(4, 4))
    writes: list[Callable[[Any], Any]] = [
        lambda x: x.add_(1), lambda x: x[2:3].zero_(), lambda x: x.view(16).zero_(), lambda x: x.detach().zero_(),
        through_data, lambda x: x[1].add_(1), lambda x: x[1].data.add_(1), lambda x: x.to_local().add_(1),
        lambda x: x.t_(), lambda x: x.transpose_(0, 1), lambda x: x.unsqueeze_(0), lambda x: x.squeeze_(),
        lambda x: x.resize_(2, 4), lambda x: x.set_(x + 100), lambda x: setattr(x, "data", other),
    ]  # fmt: skip
    for write in writes:
        x = rows(whole(4, 4))
        row = x[1]
        write(x)
        with pytest.raises(InPlaceError, match="looks like a view but is a copy"):
            row.sum()
    x = rows(whole(4, 4))
    before = x.data
    row = x[1]
    through_data_taken_before(x, before)
    with pytest.raises(InPlaceError, match="looks like a view but is a copy"):
        row.sum()
    x, y = rows(whole(4, 4)), rows(whole(4, 4))
    y.data = x  # its writes are counted by another counter
    row = x[1]
    y.zero_()
    with pytest.raises(InPlaceError, match="looks like a view but is a copy"):
        row.sum()


def pickled(*tensors: Any) -> Any:
    file = io.BytesIO()
    torch.save(tensors, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def given_data_of(x: Any) -> Any:
    y = torch.zeros_like(x)
    y.data = x
    return y


# Tensors that share memory, most of them with version counters of their own.
PAIRS: list[Callable[[Any], tuple[Any, Any]]] = [
    lambda x: (x, x.data),
    lambda x: (x, x.data.data),
    lambda x: (x.view(4, 4, 1), x.detach().data),
    lambda x: (x, x.data.detach()[:]),
    lambda x: (x, nn.Parameter(x.data, requires_grad=False)),
    lambda x: (x, torch.zeros_like(x).set_(x)),
    lambda x: (x, given_data_of(x)),
    lambda x: (given_data_of(x), given_data_of(x)),
    lambda x: (given_data_of(x).data, given_data_of(x)),
    lambda x: (x, copy.copy(x)),
    lambda x: copy.deepcopy((x, x.view(4, 2, 2).view(4, 4))),
    lambda x: copy.deepcopy((x, x.data)),
    lambda x: pickled(x, x.data),
]


@on_ranks(4)
def test_write_through_any_tensor_that_shares_memory_makes_a_copy_stale() -> None:
    for number, pair in enumerate(PAIRS):
        for first in (True, False):
            one, other = pair(rows(whole(4, 4)))
            base, written = (one, other) if first else (other, one)
            row = base[1]
            assert row.sum().item() == 26  # sharing memory is no write
            written.mul_(2)
            with pytest.raises(InPlaceError, match="looks like a view but is a copy"):
                row.sum()
            assert base[1].sum().item() == 52, number


@on_ranks(4)
def test_sharing_memory_is_not_a_write() -> None:
    for share in PAIRS:
        x = rows(whole(4, 4)).add_(1)
        row = x[1]
        one, other = share(x)
        assert row.sum().item() == 30
        del one, other


# Other objects with the memory of a copy, which are copies as well.
SAME_MEMORY: list[Callable[[Any], Any]] = [
    lambda x: copy.copy(x[1]),
    lambda x: SameObject.apply(x[1]),
    lambda x: SameObject.apply(x[1].requires_grad_()),
    lambda x: Row.apply(x),
    lambda x: nn.Parameter(x[1]),
    lambda x: with_backward_hook(x[1].requires_grad_()),
    lambda x: with_backward_hook(x.view(2, 8).requires_grad_()),
]


def with_backward_hook(x: Any) -> Any:
    module = nn.Identity()
    module.register_full_backward_hook(lambda *_: None)
    return module(x)


@on_ranks(4)
def test_object_that_shares_the_memory_of_a_copy_is_stale_with_it() -> None:
    for same in SAME_MEMORY:
        x = rows(whole(4, 4))
        y = same(x)
        assert y.sum().item() > 0
        x.zero_()
        with pytest.raises(InPlaceError, match="looks like a view but is a copy"):
            y.sum()


@on_ranks(4)
def test_stale_copy_does_not_reach_a_module_with_a_backward_hook() -> None:
    x = rows(whole(4, 4), sw.Shard(1)).requires_grad_()
    flat = x.ravel()
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(InPlaceError, match=r"ravel of a sharded dimension.*again after the write"):
        with_backward_hook(flat)


@on_ranks(4)
def test_copy_copied_with_its_base_follows_the_copied_base() -> None:
    for order in (1, -1):
        x = rows(whole(4, 4))
        base, row = copy.deepcopy((x, x[1])[::order])[::order]
        assert row.sum().item() == 26
        row.mul_(2)
        assert base.sum().item() == 136 + 26
        assert x.sum().item() == 136
        base.zero_()
        with pytest.raises(InPlaceError, match="looks like a view but is a copy"):
            row.sum()


@on_ranks(4)
def test_set_to_the_memory_of_a_copy_raises() -> None:
    x, target = rows(whole(4, 4)), rows(torch.zeros(4))
    with pytest.raises(InPlaceError, match=r"set_ of .*clone\(\) it first"):
        target.set_(x[1])
    assert target.set_(x[1].clone()).sum().item() == 26


@on_ranks(4)
def test_copy_is_not_taken_as_a_gradient_that_autograd_adds_to() -> None:
    leaf = rows(torch.ones(16)).requires_grad_()
    flat = rows(whole(4, 4), sw.Shard(1)).ravel()
    assert is_copied(flat)
    with pytest.raises(InPlaceError, match=r"\.grad = .*clone\(\) it first"):
        leaf.grad = flat.redistribute(placements=leaf.placements)
    leaf.grad = flat.clone().redistribute(placements=leaf.placements)


@on_ranks(4)
def test_copy_of_a_copy_or_view_is_stale_after_a_write_to_the_base() -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2))
    for places in ([sw.Shard(0), sw.Shard(1)], [sw.Shard(1), sw.Shard(0)], [sw.Shard(0), sw.Shard(0)]):
        for take in (lambda x: x[1][2], lambda x: x[1:3][0][1:2], lambda x: x.t()[1], lambda x: x.unbind(dim=1)[0]):
            x = sw.distribute_tensor(whole(4, 4), mesh, places)
            taken = take(x)
            torch.testing.assert_close(taken.full_tensor(), take(whole(4, 4)))
            x.zero_()
            if not is_copied(taken):  # a view, along dimensions that are not sharded
                assert taken.sum().item() == 0
                continue
            with pytest.raises(InPlaceError, match="looks like a view but is a copy"):
                taken.sum()
            assert take(x).sum().item() == 0


@on_ranks(4)
def test_changing_dimensions_or_memory_of_a_copy_in_place_raises() -> None:
    changes: list[Callable[[Any], Any]] = [
        lambda row: row.t_(), lambda row: row.transpose_(0, 1), lambda row: row.unsqueeze_(0),
        lambda row: row.squeeze_(), lambda row: row.resize_(2), lambda row: row.resize_as_(row.clone()),
        lambda row: row.set_(row.clone()),
        lambda row: setattr(row, "data", row.clone()), lambda row: row.detach_(),
    ]  # fmt: skip
    for change in changes:
        x = rows(whole(4, 2, 2))
        row = x[1]
        with pytest.raises(InPlaceError, match="looks like a view but is a copy"):
            change(row)
        assert tuple(row.shape) == (2, 2)
        assert torch.equal(row.full_tensor(), whole(4, 2, 2)[1])


@on_ranks(4)
def test_write_to_a_copy_without_a_base_index_raises() -> None:
    for made in (lambda x: x.view(2, 2, 6), lambda x: x.reshape(3, 8), lambda x: x.unfold(0, 2, 1)):
        for _ in range(2):  # the second call is answered from its plan
            x = rows(whole(4, 6))
            view = made(x)
            assert view.sum().item() != 0  # as long as nothing was written
            for write in (lambda view: view.zero_(), lambda view: view[0].add_(1), lambda view: view.data.add_(1)):
                with pytest.raises(InPlaceError, match="looks like a view but is a copy"):
                    write(view)
            assert torch.equal(x.full_tensor(), whole(4, 6))
            x.zero_()
            with pytest.raises(InPlaceError, match=r"looks like a view but is a copy.*again after the write"):
                view.sum()
            assert made(x).sum().item() == 0


def plus_equals(x: Any, w: Any) -> Any:
    x[1] += w
    return x


def in_place(x: Any, w: Any) -> Any:
    row = x[1]
    row.mul_(w).add_(1)
    return x * row


def a_part_of_a_row(x: Any, w: Any) -> Any:
    row = x[3]
    row[:1] += w[:1]
    return x.sum() + (row * row).sum()


def a_place_of_a_row(x: Any, w: Any) -> Any:
    x[2][1] = w[0]
    x[0][0] *= 2
    return x


def a_row_used_before(x: Any, w: Any) -> Any:
    row = x[1]
    used = row * 3
    row.add_(w)
    return used.sum() + (row * x[0]).sum() + x.sum()


def detached(x: Any, w: Any) -> Any:
    x[1].detach().mul_(2)
    return x * w


def without_gradients(x: Any, w: Any) -> Any:
    row = x[1]
    with torch.no_grad():
        row.mul_(2)
    return x * w + row


def retained(x: Any, w: Any) -> Any:
    row = x[1]
    row.retain_grad()
    row.mul_(2)
    (row * w).sum().backward(retain_graph=True)
    return x * row.grad


WRITES = [
    plus_equals, in_place, a_part_of_a_row, a_place_of_a_row, a_row_used_before, detached, without_gradients, retained,
]  # fmt: skip


@pytest.mark.parametrize("body", WRITES)
@pytest.mark.parametrize("grads", ["both", "original", "value", "none"])
@on_ranks(4)
def test_write_to_a_copy_reaches_the_base_with_the_gradients_of_torch(
    body: Callable[[Any, Any], Any], grads: str
) -> None:
    found: list[list[Any]] = []
    for make in (lambda t: t, rows):
        x, w = make(whole(4, 2)), make(torch.tensor([2.0, 3.0]))
        x.requires_grad_(grads in ("both", "original"))
        w.requires_grad_(grads in ("both", "value"))
        if body is retained and grads in ("value", "none"):
            return  # there is nothing to retain
        y = x * 1 if x.requires_grad else x.clone()
        result = body(y, w)
        seen = [result.detach(), y.detach()]
        if result.requires_grad:
            for _ in range(2):
                result.sum().backward(retain_graph=True)
            seen += [tensor.grad for tensor in (x, w) if tensor.grad is not None]
        found.append(seen)
    want, got = found
    assert len(want) == len(got)
    for one, other in zip(want, got, strict=True):
        torch.testing.assert_close(other.full_tensor(), one)


@on_ranks(4)
def test_write_that_autograd_refuses_changes_nothing() -> None:
    def with_a_hook(row: Any) -> Any:
        row.register_hook(lambda gradient: None)
        return row.add_(1)

    cases: list[tuple[bool, Callable[[Any], Any]]] = [
        (True, lambda x: x[1].add_(1)),
        (True, lambda x: x[1].__setitem__(0, 1.0)),
        (False, lambda x: x.unbind(0)[1].add_(1)),
        (False, lambda x: with_a_hook(x[1])),
        (False, lambda x: x.detach()[1].requires_grad_().add_(1)),
        (False, lambda x: x[1].add_(rows(torch.ones(3)))),  # no such shape
        (False, lambda x: torch.aminmax(x, dim=0, out=(x[1], x.view(2, 4)[0][:2]))),
    ]
    for is_leaf, write in cases:
        leaf = rows(whole(4, 2)).requires_grad_()
        x = leaf if is_leaf else leaf * 1
        with pytest.raises(RuntimeError):
            write(x)
        assert torch.equal(x.detach().full_tensor(), whole(4, 2))
        (x * 2).sum().backward()
        assert torch.equal(leaf.grad.full_tensor(), torch.full((4, 2), 2.0))


@on_ranks(4)
def test_writes_are_counted_on_every_rank() -> None:
    """Ranks that hold none of the elements written count too, so that all ranks raise for a stale copy."""
    first = rows(torch.tensor([0]), sw.Replicate())
    one = rows(torch.ones(1, 2), sw.Replicate())
    mask = rows(torch.tensor([True, False, False, False, False, True]))
    writes: list[Callable[[Any], Any]] = [
        lambda x: x.__setitem__(2, 5.0),
        lambda x: x.__setitem__((1, 1), 5.0),
        lambda x: x.__setitem__(slice(1, 2), 5.0),
        lambda x: x.__setitem__(mask, 1.0),
        lambda x: x.__setitem__(first, 1.0),
        lambda x: x[3].add_(1),
        lambda x: x[1:2].zero_(),
        lambda x: x.fill_(1),
        lambda x: x.copy_(x + 1),
        lambda x: x.index_add_(0, first, one),
        lambda x: x.scatter_(0, first.unsqueeze(0), 2.0),
        lambda x: x.masked_fill_(mask.unsqueeze(1), 2.0),
        lambda x: x.put_(first, one[0, :1]),
        lambda x: x.fill_diagonal_(1.0),
        lambda x: torch._foreach_add_([x], 1.0),
        lambda x: torch.add(x, 1, out=x),
    ]
    for place, write in enumerate(writes):
        x = rows(whole(6, 2))
        before = version_of(x)
        write(x)
        counted = torch.tensor([version_of(x) - before])
        mesh = sw.init_device_mesh("cpu", (4,))
        each = sw.DTensor.from_local(counted, mesh, [sw.Shard(0)], shape=(4,)).full_tensor()
        assert each.min() == each.max() > 0, place


@on_ranks(4)
def test_compiled_program_does_not_take_or_return_a_stale_copy() -> None:
    x = rows(whole(4, 2))
    row, view = x[1], x.view(2, 2, 2)
    doubled = sw.compile(lambda a: a * 2)
    for _ in range(2):
        assert doubled(row).tolist() == [6, 8]
    x.zero_()
    for stale in (row, view):
        with pytest.raises(InPlaceError, match="looks like a view but is a copy"):
            doubled(stale)

    def written_after(a: Any) -> Any:
        b = a * 1
        picked = b[1]
        b.add_(1)
        return picked

    with pytest.raises(InPlaceError, match="looks like a view but is a copy"):
        sw.compile(written_after)(x)
    compiled = sw.compile(lambda a: (a[1], (a * 2)[2]))
    for _ in range(2):
        of_the_input, of_its_own = compiled(x)
        x.add_(1)
        assert of_its_own.tolist() == [0, 0]
        with pytest.raises(InPlaceError, match="looks like a view but is a copy"):
            of_the_input.tolist()
        x.zero_()


def load_into_a_copy(folder: str) -> None:
    x = rows(whole(4, 6))
    sw.checkpoint.save({"x": rows(torch.zeros(2, 12))}, folder)
    with pytest.raises(LoadMismatchError, match="'x' looks like a view of a DTensor but is a copy"):
        sw.checkpoint.load({"x": x.view(2, 12)}, folder)
    assert torch.equal(x.full_tensor(), whole(4, 6))


def test_loading_a_checkpoint_into_a_copy_raises(tmp_path: Path) -> None:
    run_ranks(4, load_into_a_copy, str(tmp_path / "saved"))


WRITES: list[Callable[[Any], Any]] = [
    lambda x: x.add_(1),
    lambda x: x.mul_(rows(whole(4, 2))),
    lambda x: x.__setitem__(2, 5.0),
    lambda x: x.__setitem__((slice(None), 1), 5.0),
    lambda x: x.__setitem__(x > 3, 5.0),
    lambda x: x[2:3].zero_(),
    lambda x: x.view(4, 2, 1).neg_(),
    lambda x: x.data.add_(1),
    lambda x: x.detach()[:, :1].copy_(x[:, 1:]),
    lambda x: torch.add(rows(whole(4, 2)), 1, out=x),
    lambda x: torch._foreach_add_([x], 1),
    lambda x: x.fill_(3),
    lambda x: x.copy_(rows(whole(4, 2), sw.Shard(1)) * 2),
    lambda x: x.index_add_(0, rows(torch.tensor([2, 2]), sw.Replicate()), rows(torch.ones(2, 2), sw.Replicate())),
    lambda x: x.cumsum_(1),
    lambda x: x.clamp_(max=2),
]


@on_ranks(4)
def test_stale_copy_in_inference_mode_raises() -> None:
    for made_inside in (True, False):
        for write in WRITES:
            x = rows(whole(4, 2))
            with torch.inference_mode():
                x = rows(whole(4, 2)) if made_inside else x
                alias = x.view(4, 2, 1)
                row = x[2]
                assert torch.equal((row * 1).full_tensor(), whole(4, 2)[2])
                write(x)
                with pytest.raises(InPlaceError, match="written to since"):
                    row * 1
                row = x[2]
                assert torch.equal((row * 1).full_tensor(), x.full_tensor()[2])
                alias.add_(1)
                with pytest.raises(InPlaceError, match="written to since"):
                    row.tolist()
                row = x[2]
                row.mul_(2)  # written to the original too, and up to date after
                assert torch.equal((row * 1).full_tensor(), x.full_tensor()[2])
