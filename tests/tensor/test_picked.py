"""What looks like a view shows what is written to the original, or is refused: never what was there before."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwright as sw
from shardwright.errors import InPlaceError, LoadMismatchError
from shardwright.tensor.local import version_of
from shardwright.testing import on_ranks, run_ranks


def rows(whole: Tensor, placement: Any = None) -> Any:
    mesh = sw.init_device_mesh("cpu", (4,))
    return sw.distribute_tensor(whole, mesh, [placement or sw.Shard(0)], src_data_rank=None)


def whole(*shape: int) -> Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)


def written_to_the_original(x: Any) -> Any:
    row = x[2]
    x[2] = 5.0
    return row


def written_to_another(x: Any) -> Any:
    first, second = x[0], x[0]
    first.add_(1)
    return first + second


def unbound(x: Any) -> Any:
    pieces = x.unbind(0)
    x.add_(1)
    return pieces[3] * pieces[0]


def a_view_of_what_was_picked(x: Any) -> Any:
    part = x[0][1:3]
    x.mul_(3)
    return part


def twice(x: Any) -> Any:
    row = x[1]
    x.add_(1)
    before = row * 1
    x.add_(1)
    return torch.cat([before, row])


def in_a_list(x: Any) -> Any:
    row = x[3]
    x[3:4] = 0.0
    return torch.stack([row, x[0]])


@pytest.mark.parametrize(
    "body", [written_to_the_original, written_to_another, unbound, a_view_of_what_was_picked, twice, in_a_list]
)
@on_ranks(4)
def test_what_was_picked_shows_what_is_written_later(body: Callable[[Any], Any]) -> None:
    torch.testing.assert_close(body(rows(whole(4, 6))).full_tensor(), body(whole(4, 6)))


@on_ranks(4)
def test_gradients_go_through_what_was_written() -> None:
    found = []
    for x in (whole(4, 2), rows(whole(4, 2))):
        x.requires_grad_()
        y = x * 1
        row = y[0]
        y.mul_(2)
        (row * row).sum().backward()
        found.append(x.grad)
    torch.testing.assert_close(found[1].full_tensor(), found[0])


@on_ranks(4)
def test_values_read_in_every_manner_are_those_of_now() -> None:
    x = rows(whole(4, 1))
    row = x[2]
    x.zero_()
    assert row.item() == 0
    assert row.tolist() == [0]
    assert float(row) == 0
    assert not row
    assert row.full_tensor().tolist() == [0]
    assert row.numpy().tolist() == [0]
    assert copy.deepcopy(row).full_tensor().tolist() == [0]
    assert row.redistribute(placements=[sw.Replicate()]).to_local().tolist() == [0]


@on_ranks(4)
def test_where_no_index_says_how_to_pick_it_again_it_is_refused() -> None:
    for made in (lambda x: x.view(2, 2, 6), lambda x: x.reshape(3, 8), lambda x: x.unfold(0, 2, 1)):
        x = rows(whole(4, 6))
        view = made(x)
        assert view.sum().item() != 0  # as long as nothing was written
        x.zero_()
        with pytest.raises(InPlaceError, match=r"looks like a view but is a copy.*again after the write"):
            view.sum()
        with pytest.raises(InPlaceError, match="looks like a view but is a copy"):
            view.full_tensor()
        assert made(x).sum().item() == 0


@on_ranks(4)
def test_a_write_is_counted_alike_on_every_rank() -> None:
    """It decides whether ranks pick anew, together: also those count that hold nothing of what is written."""
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
def test_a_compiled_program_gets_what_is_there_now() -> None:
    x = rows(whole(4, 2))
    row, view = x[1], x.view(2, 2, 2)
    doubled = sw.compile(lambda a: a * 2)
    assert doubled(row).tolist() == [6, 8]
    x.zero_()
    assert doubled(row).tolist() == [0, 0]
    with pytest.raises(InPlaceError, match="looks like a view but is a copy"):
        doubled(view)

    def program(a: Any) -> Any:
        b = a * 1
        picked = b[1]
        b.add_(1)
        return picked

    assert sw.compile(program)(x).tolist() == program(x).tolist() == [1, 1]


def load_into_a_copy(folder: str) -> None:
    x = rows(whole(4, 6))
    sw.checkpoint.save({"x": rows(torch.zeros(2, 12))}, folder)
    with pytest.raises(LoadMismatchError, match="'x' looks like a view of a DTensor but is a copy"):
        sw.checkpoint.load({"x": x.view(2, 12)}, folder)
    assert torch.equal(x.full_tensor(), whole(4, 6))


def test_a_checkpoint_is_not_loaded_into_a_copy_that_looks_like_a_view(tmp_path: Path) -> None:
    run_ranks(4, load_into_a_copy, str(tmp_path / "saved"))
