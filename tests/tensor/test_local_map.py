"""Functions of local tensors on DTensors: values, gradients, sizes, and what is refused."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwright as sw
from shardwright import comm
from shardwright.errors import LocalTensorError, MeshMismatchError, TensorError
from shardwright.testing import run_ranks

ROWS, WHOLE, SUM = [sw.Shard(0)], [sw.Replicate()], [sw.Partial()]


def mesh_of_all() -> sw.DeviceMesh:
    return sw.init_device_mesh("cpu", (comm.world().size,))


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def product() -> None:
    """Uneven rows, a replicate beside them, a partial sum over a cut inner dimension."""
    mesh = mesh_of_all()
    a, b = randn(7, 5).requires_grad_(), randn(5, 3).requires_grad_()
    expected = torch.mm(a, b)
    expected.square().sum().backward()
    for ins, outs in (
        ((ROWS, WHOLE), ROWS),
        ((WHOLE, [sw.Shard(1)]), [sw.Shard(1)]),
        (([sw.Shard(1)], ROWS), SUM),
        ((WHOLE, WHOLE), WHOLE),
    ):
        x, w = (sw.distribute_tensor(v.detach(), mesh, p).requires_grad_() for v, p in zip((a, b), ins, strict=True))
        mapped = sw.local_map(torch.mm, ins, outs)
        for _ in range(2):
            x.grad = w.grad = None
            y = mapped(x, w)
            assert y.placements == tuple(outs)
            torch.testing.assert_close(y.full_tensor(), expected)
            y.square().sum().backward()
            torch.testing.assert_close(x.grad.full_tensor(), a.grad)
            torch.testing.assert_close(w.grad.full_tensor(), b.grad)
    with comm.count() as traffic:
        mapped(x, w)
    assert not traffic.calls  # sizes are known by now


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_values_and_gradients_are_those_of_the_whole(ranks: int) -> None:
    run_ranks(ranks, product)


def two_dimensional() -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2))
    a, b = randn(5, 3).requires_grad_(), randn(3, 6).requires_grad_()
    (a @ b).sin().sum().backward()
    rows, columns = [sw.Shard(0), sw.Replicate()], [sw.Replicate(), sw.Shard(1)]
    x, w = (sw.distribute_tensor(v.detach(), mesh, p).requires_grad_() for v, p in ((a, rows), (b, columns)))
    y = sw.local_map(torch.mm, (rows, columns), [sw.Shard(0), sw.Shard(1)])(x, w)
    assert y.shape == (5, 6)
    y.sin().sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), a.grad)
    torch.testing.assert_close(w.grad.full_tensor(), b.grad)


def test_a_mesh_of_two_dimensions() -> None:
    run_ranks(4, two_dimensional)


def each_ranks_share() -> None:
    """A replicate of which every rank takes its own part: its gradient is the sum of theirs."""
    mesh, rank = mesh_of_all(), comm.rank()
    x = sw.distribute_tensor(randn(4, 2), mesh, WHOLE).requires_grad_()
    y = sw.local_map(lambda local: local[rank * 2 : rank * 2 + 2] * (rank + 1), (WHOLE,), ROWS)(x)
    y.sum().backward()
    assert x.grad.tolist() == [[1.0, 1.0], [1.0, 1.0], [2.0, 2.0], [2.0, 2.0]]
    # Said otherwise: the function has made its gradient whole itself.
    z = sw.local_map(lambda local: local * 2, (WHOLE,), SUM, in_grad_placements=(WHOLE,))(x)
    x.grad = None
    z.sum().backward()
    assert x.grad.tolist() == [[2.0, 2.0]] * 4


def test_gradients_of_replicates() -> None:
    run_ranks(2, each_ranks_share)


def nested() -> None:
    mesh = mesh_of_all()
    x = sw.distribute_tensor(randn(6, 2), mesh, ROWS)

    def function(pair: dict[str, Any], factor: float, *, plain: Tensor) -> dict[str, Any]:
        assert type(pair["x"]) is Tensor
        return {"y": pair["x"] * factor + plain, "same": pair["x"], "name": "z", "plain": plain}

    placements = (ROWS, WHOLE, None, None)
    mapped = sw.local_map(function, placements, (ROWS, ROWS, None, None), redistribute_inputs=True)
    found = mapped({"x": x, "w": x}, 2.0, plain=torch.ones(2))
    torch.testing.assert_close(found["y"].full_tensor(), x.full_tensor() * 2 + 1)
    assert found["same"].placements == x.placements
    assert found["same"] is not x
    assert found["name"] == "z"
    assert type(found["plain"]) is Tensor
    assert sw.local_map(lambda: torch.ones(2), None, ROWS, mesh=mesh)().shape == (2 * comm.world().size,)
    assert sw.local_map(torch.neg, None, ROWS)(x).placements == x.placements


def test_arguments_and_results_nest() -> None:
    run_ranks(2, nested)


def keywords_in_any_order() -> None:
    mesh = mesh_of_all()
    a, b = (sw.distribute_tensor(randn(6, 2) + n, mesh, WHOLE).requires_grad_() for n in range(2))
    expected = (a + 10 * b).full_tensor().sum(0)

    def by_name(*, a: Tensor, b: Tensor) -> Tensor:
        return a.sum(0) + b.sum(0) * (10 / comm.world().size)

    def positional(a: Tensor, b: Tensor) -> Tensor:
        return by_name(a=a, b=b)

    def anything(**given: Tensor) -> Tensor:
        return by_name(**given)

    class Unsigned:
        """A function that does not tell its parameters, as those that are written in C."""

        __signature__ = "none"
        __call__ = staticmethod(anything)

    for function in (by_name, positional, anything, Unsigned()):
        for gradients in (None, (ROWS, SUM)):
            mapped = sw.local_map(function, (ROWS, WHOLE), SUM, redistribute_inputs=True, in_grad_placements=gradients)
            for given in ({"a": a, "b": b}, {"b": b, "a": a}):
                a.grad = b.grad = None
                y = mapped(**given)
                torch.testing.assert_close(y.full_tensor(), expected)
                y.sum().backward()
                torch.testing.assert_close(a.grad.full_tensor(), torch.full_like(a.full_tensor(), 1.0))
                torch.testing.assert_close(b.grad.full_tensor(), torch.full_like(b.full_tensor(), 10.0))


def test_placements_go_by_parameters_however_the_call_is_spelled() -> None:
    run_ranks(2, keywords_in_any_order)


class Taking:
    """An object whose text says nothing of what it holds."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __repr__(self) -> str:
        return "Taking()"


def sizes_by_arguments() -> None:
    mesh = mesh_of_all()
    x = sw.distribute_tensor(randn(6, 2), mesh, ROWS)
    ranks = comm.world().size
    by_object = sw.local_map(lambda local, taking: local[: taking.count], (ROWS, None), ROWS)
    by_type = sw.local_map(lambda local, n: local[: 1 if isinstance(n, str) else 2], (ROWS, None), ROWS)
    by_name = sw.local_map(lambda local, *, one=0, two=0: local[: one + 2 * two], (ROWS, None), ROWS)
    assert by_object(x, Taking(1)).shape == (ranks, 2)
    assert by_object(x, Taking(2)).shape == (2 * ranks, 2)
    assert by_type(x, "1").shape == (ranks, 2)
    assert by_type(x, 1).shape == (2 * ranks, 2)
    assert by_name(x, one=1).shape == (ranks, 2)
    assert by_name(x, two=1).shape == (2 * ranks, 2)
    with comm.count() as traffic:
        assert by_name(x, one=1).shape == (ranks, 2)
    assert not traffic.calls
    # What is not cut needs nobody else to know its size.
    sizes = iter([1, 2])
    uncut = sw.local_map(lambda local: local[0, : next(sizes)], (ROWS,), SUM)
    assert [tuple(uncut(x).shape) for _ in range(2)] == [(1,), (2,)]


def test_sizes_follow_from_what_is_passed() -> None:
    run_ranks(2, sizes_by_arguments)


def results_that_come_and_go() -> None:
    x = sw.distribute_tensor(randn(6, 2), mesh_of_all(), ROWS)
    answers = iter([(True, False), (True, True), (False,)])

    def function(local: Tensor) -> list[Tensor | None]:
        return [local if there else None for there in next(answers)]

    mapped = sw.local_map(function, (ROWS,), ROWS)
    assert mapped(x)[0].placements == x.placements
    with pytest.raises(LocalTensorError, match=r"are \(3, 2\), \(3, 2\) on rank \d, and were \(3, 2\), none"):
        mapped(x)
    with pytest.raises(LocalTensorError, match=r"are none on rank \d, and were \(3, 2\), none"):
        mapped(x)


def test_results_that_change_their_number_or_kind_are_refused() -> None:
    run_ranks(2, results_that_come_and_go)


def captured() -> None:
    mesh = mesh_of_all()
    x, w = sw.distribute_tensor(randn(7, 5), mesh, ROWS), sw.distribute_tensor(randn(5, 3), mesh, WHOLE)
    mapped = sw.local_map(torch.mm, (ROWS, WHOLE), ROWS)
    compiled = sw.compile(lambda x, w: mapped(x, w).relu())
    for _ in range(2):
        assert torch.equal(compiled(x, w).full_tensor(), mapped(x, w).relu().full_tensor())


def test_it_can_be_captured() -> None:
    run_ranks(2, captured)


def refusals() -> None:
    mesh = mesh_of_all()
    x = sw.distribute_tensor(randn(6, 2), mesh, ROWS)
    with pytest.raises(TensorError, match=r"neg: argument 0 is \[6, 2\] \(0: S\(0\)\), in_placements want .*R.*redist"):
        sw.local_map(torch.neg, (WHOLE,), WHOLE)(x)
    assert sw.local_map(torch.neg, (WHOLE,), WHOLE, redistribute_inputs=True)(x).placements == (sw.Replicate(),)
    with pytest.raises(TensorError, match="neg: in_placements has 2 entries for 1 arguments"):
        sw.local_map(torch.neg, (ROWS, ROWS), ROWS)(x)
    with pytest.raises(TensorError, match=r"add: argument 1 is a DTensor .* in_placements have none for it"):
        sw.local_map(torch.add, (ROWS, None), ROWS)(x, x)
    with pytest.raises(TensorError, match="out_placements has 2 entries for 1 results"):
        sw.local_map(torch.neg, (ROWS,), (ROWS, ROWS))(x)
    with pytest.raises(TensorError, match=r"result 0 has placements .* give one per mesh dimension"):
        sw.local_map(torch.neg, (ROWS,), [sw.Shard(0), sw.Shard(1)])(x)
    with pytest.raises(TensorError, match="no DTensor among the arguments"):
        sw.local_map(torch.neg, None, ROWS)(torch.ones(2))
    with pytest.raises(TensorError, match="result 0 is a DTensor"):
        sw.local_map(lambda local: x, (ROWS,), ROWS)(x)
    other = sw.init_device_mesh("cpu", (1, comm.world().size))
    with pytest.raises(MeshMismatchError, match="different meshes"):
        sw.local_map(torch.neg, (ROWS,), ROWS, mesh=other)(x)
    sizes = iter([3, 2])
    shrinking = sw.local_map(lambda local: local[: next(sizes)], (ROWS,), ROWS)
    shrinking(x)
    why = r"are \(2, 2\) on rank \d, and were \(3, 2\) .* from the arguments alone.* Pass what else .* as an argument"
    with pytest.raises(LocalTensorError, match=why):
        shrinking(x)


def test_what_does_not_fit_is_refused_with_the_fix() -> None:
    run_ranks(2, refusals)


def failing_on_one() -> tuple[str, float]:
    mesh = mesh_of_all()

    def thirds(x: Tensor) -> Tensor:
        if comm.rank() == 1:
            raise ValueError(f"{tuple(x.shape)} is no multiple of 3")
        return x * 3

    start = time.monotonic()
    with pytest.raises((ValueError, sw.errors.ShardwrightError)) as found:
        sw.local_map(thirds, [ROWS], ROWS)(sw.ones(8, 2, mesh=mesh, placements=ROWS))
    return str(found.value), time.monotonic() - start


def test_what_one_rank_raises_is_raised_on_all_of_them() -> None:
    for said, seconds in run_ranks(4, failing_on_one):
        assert "(2, 2) is no multiple of 3" in said
        assert seconds < 20


def test_pytorchs_name_of_the_mesh_is_taken() -> None:
    mesh = mesh_of_all()
    ones = sw.local_map(torch.ones, None, WHOLE, device_mesh=mesh)
    assert ones(2, 3).device_mesh is mesh
