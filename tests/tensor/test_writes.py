"""Writes through tensors that share memory are counted as long as they can happen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardwright as sw
from shardwright.tensor.base.writes import count_writes_through, memory_version, storage_of, was_written
from shardwright.testing import on_ranks


def tensor() -> Any:
    return sw.ones(4, mesh=sw.init_device_mesh("cpu", (1,)), placements=[sw.Shard(0)])


def give(target: Any, source: Any) -> None:
    target.data = source


def give_data(target: Any, source: Any) -> None:
    target.data = source.data


GIVE: list[Callable[[Any, Any], Any]] = [give, give_data, lambda target, source: target.set_(source)]


def counted(source: Any) -> int:
    return len(memory_version(source).counts)


@pytest.mark.parametrize("given", GIVE)
def test_counters_of_freed_tensors_are_dropped(given: Any) -> None:
    source = tensor()
    for _ in range(20):
        given(tensor(), source)
    target = tensor()
    for _ in range(20):
        given(target, source)
        given(target, tensor())
    assert counted(source) <= 4


@pytest.mark.parametrize("given", GIVE)
def test_writes_through_a_detached_tensor_count_after_its_source_is_freed(given: Any) -> None:
    source, aliases = tensor(), []
    for _ in range(20):  # objects that are gone give their ids to others
        target = tensor()
        given(target, source)
        aliases.append(target.detach())
        del target
    for alias in aliases:
        before = memory_version(source)
        alias.add_(1)
        assert was_written(source, before)
    assert storage_of(alias) is storage_of(source)


def test_swapped_tensor_gets_a_new_counter() -> None:
    source, target, other = tensor(), tensor(), tensor()
    target.data = source
    torch._C._swap_tensor_impl(target, other)  # type: ignore[attr-defined]  # as `.data =` does between devices
    target.data = source
    before = memory_version(source)
    target.add_(1)
    assert was_written(source, before)
    count_writes_through(target, source)


@on_ranks(2)
def test_detach_in_place_works_where_some_local_tensors_are_views() -> None:
    mesh = sw.init_device_mesh("cpu", (2,))
    for rows in (1, 2, 3):
        leaf = sw.ones(rows, 2, mesh=mesh).requires_grad_()
        for made in (
            leaf.redistribute(placements=[sw.Shard(0)]),
            (leaf * 2).redistribute(placements=[sw.Shard(1)]),
            (leaf * 2)[:1],
            (leaf * 2).view(-1),
            leaf * 2,
        ):
            kept = made.sum()
            same = made.detach_()
            assert same is made
            assert not made.requires_grad
            assert made.grad_fn is None
            assert made.is_leaf
            kept.backward()
            made.add_(1)
            assert torch.equal((made + 0).full_tensor(), made.full_tensor())
        assert leaf.grad is not None
        expected = torch.ones(rows, 2, requires_grad=True)
        (expected.sum() + (expected * 2).sum() + (expected * 2)[:1].sum() + 2 * (expected * 2).sum()).backward()
        torch.testing.assert_close(leaf.grad.full_tensor(), expected.grad)


@on_ranks(2, timeout=30)
def test_writes_to_any_argument_are_kept_in_inference_mode() -> None:
    @torch.library.custom_op("writes::store", mutates_args=("out", "more"))
    def store(source: torch.Tensor, out: torch.Tensor, more: list[torch.Tensor]) -> None:
        out.copy_(source)
        more[1].copy_(source * 2)

    mesh = sw.init_device_mesh("cpu", (2,))
    with torch.inference_mode():
        source, out, replicated, last = (
            sw.distribute_tensor(torch.full((4, 2), float(i)), mesh, [placement])
            for i, placement in enumerate((sw.Shard(0), sw.Shard(1), sw.Replicate(), sw.Shard(0)))
        )
        source += 4
        store(source, out, [replicated, last])
        assert out.full_tensor().eq(4).all()
        assert last.full_tensor().eq(8).all()
        assert source.full_tensor().eq(4).all()
        assert replicated.full_tensor().eq(2).all()
        copy = out[:, 0]
        store(source, out, [replicated, last])
        with pytest.raises(sw.errors.InPlaceError, match="written to since"):
            copy.full_tensor()
