"""`local_map`: values, gradients, sizes of results, and errors."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwright as sw
from shardwright import comm
from shardwright.errors import ArgumentTypeError, LocalTensorError, MeshMismatchError, TensorError
from shardwright.testing import run_ranks

ROWS, WHOLE, SUM = [sw.Shard(0)], [sw.Replicate()], [sw.Partial()]


def mesh_of_all() -> sw.DeviceMesh:
    return sw.init_device_mesh("cpu", (comm.world().size,))


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def product() -> None:
    """Uneven rows, a replicated operand, a partial sum over a sharded inner dimension."""
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
        mapped = sw.local_map(torch.mm, outs, ins)
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
def test_values_and_gradients_equal_those_of_global_tensors(ranks: int) -> None:
    run_ranks(ranks, product)


def two_dimensional() -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2))
    a, b = randn(5, 3).requires_grad_(), randn(3, 6).requires_grad_()
    (a @ b).sin().sum().backward()
    rows, columns = [sw.Shard(0), sw.Replicate()], [sw.Replicate(), sw.Shard(1)]
    x, w = (sw.distribute_tensor(v.detach(), mesh, p).requires_grad_() for v, p in ((a, rows), (b, columns)))
    y = sw.local_map(torch.mm, [sw.Shard(0), sw.Shard(1)], (rows, columns))(x, w)
    assert y.shape == (5, 6)
    y.sin().sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), a.grad)
    torch.testing.assert_close(w.grad.full_tensor(), b.grad)


def test_two_dimensional_mesh() -> None:
    run_ranks(4, two_dimensional)


def gradients_of_replicated_inputs() -> None:
    """Every rank uses its own part of a replicated input: the gradient is the sum over the ranks."""
    mesh, rank = mesh_of_all(), comm.rank()
    x = sw.distribute_tensor(randn(4, 2), mesh, WHOLE).requires_grad_()
    y = sw.local_map(lambda local: local[rank * 2 : rank * 2 + 2] * (rank + 1), ROWS, (WHOLE,))(x)
    y.sum().backward()
    assert x.grad.tolist() == [[1.0, 1.0], [1.0, 1.0], [2.0, 2.0], [2.0, 2.0]]
    # Overridden by in_grad_placements: the function completes its gradient itself.
    z = sw.local_map(lambda local: local * 2, SUM, (WHOLE,), in_grad_placements=(WHOLE,))(x)
    x.grad = None
    z.sum().backward()
    assert x.grad.tolist() == [[2.0, 2.0]] * 4


def test_gradients_of_replicated_inputs() -> None:
    run_ranks(2, gradients_of_replicated_inputs)


def nested() -> None:
    mesh = mesh_of_all()
    x = sw.distribute_tensor(randn(6, 2), mesh, ROWS)

    def function(pair: dict[str, Any], factor: float, *, plain: Tensor) -> dict[str, Any]:
        assert type(pair["x"]) is Tensor
        return {"y": pair["x"] * factor + plain, "same": pair["x"], "name": "z", "plain": plain}

    placements = (ROWS, WHOLE, None, None)
    mapped = sw.local_map(function, (ROWS, ROWS, None, None), placements, redistribute_inputs=True)
    result = mapped({"x": x, "w": x}, 2.0, plain=torch.ones(2))
    torch.testing.assert_close(result["y"].full_tensor(), x.full_tensor() * 2 + 1)
    assert result["same"].placements == x.placements
    assert result["same"] is not x
    assert result["name"] == "z"
    assert type(result["plain"]) is Tensor
    assert sw.local_map(lambda: torch.ones(2), ROWS, mesh=mesh)().shape == (2 * comm.world().size,)
    assert sw.local_map(torch.neg, ROWS)(x).placements == x.placements


def test_nested_arguments_and_results() -> None:
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
        """A callable without a signature, like functions written in C."""

        __signature__ = "none"
        __call__ = staticmethod(anything)

    for function in (by_name, positional, anything, Unsigned()):
        for gradients in (None, (ROWS, SUM)):
            mapped = sw.local_map(function, SUM, (ROWS, WHOLE), redistribute_inputs=True, in_grad_placements=gradients)
            for given in ({"a": a, "b": b}, {"b": b, "a": a}):
                a.grad = b.grad = None
                y = mapped(**given)
                torch.testing.assert_close(y.full_tensor(), expected)
                y.sum().backward()
                torch.testing.assert_close(a.grad.full_tensor(), torch.full_like(a.full_tensor(), 1.0))
                torch.testing.assert_close(b.grad.full_tensor(), torch.full_like(b.full_tensor(), 10.0))


def test_placements_follow_the_parameters_for_positional_and_keyword_arguments() -> None:
    run_ranks(2, keywords_in_any_order)


class Taking:
    """An object whose repr does not show its state."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __repr__(self) -> str:
        return "Taking()"


def sizes_by_arguments() -> None:
    mesh = mesh_of_all()
    x = sw.distribute_tensor(randn(6, 2), mesh, ROWS)
    ranks = comm.world().size
    by_object = sw.local_map(lambda local, taking: local[: taking.count], ROWS, (ROWS, None))
    by_type = sw.local_map(lambda local, n: local[: 1 if isinstance(n, str) else 2], ROWS, (ROWS, None))
    by_name = sw.local_map(lambda local, *, one=0, two=0: local[: one + 2 * two], ROWS, (ROWS, None))
    assert by_object(x, Taking(1)).shape == (ranks, 2)
    assert by_object(x, Taking(2)).shape == (2 * ranks, 2)
    assert by_type(x, "1").shape == (ranks, 2)
    assert by_type(x, 1).shape == (2 * ranks, 2)
    assert by_name(x, one=1).shape == (ranks, 2)
    assert by_name(x, two=1).shape == (2 * ranks, 2)
    with comm.count() as traffic:
        assert by_name(x, one=1).shape == (ranks, 2)
    assert not traffic.calls
    # Unsharded results need no communication about their size.
    sizes = iter([1, 2])
    unsharded = sw.local_map(lambda local: local[0, : next(sizes)], SUM, (ROWS,))
    assert [tuple(unsharded(x).shape) for _ in range(2)] == [(1,), (2,)]


def test_sizes_are_gathered_once_per_combination_of_arguments() -> None:
    run_ranks(2, sizes_by_arguments)


def changing_results() -> None:
    x = sw.distribute_tensor(randn(6, 2), mesh_of_all(), ROWS)
    answers = iter([(True, False), (True, True), (False,)])

    def function(local: Tensor) -> list[Tensor | None]:
        return [local if present else None for present in next(answers)]

    mapped = sw.local_map(function, ROWS, (ROWS,))
    assert mapped(x)[0].placements == x.placements
    with pytest.raises(LocalTensorError, match=r"are \(3, 2\), \(3, 2\) on rank \d, but were \(3, 2\), none"):
        mapped(x)
    with pytest.raises(LocalTensorError, match=r"are none on rank \d, but were \(3, 2\), none"):
        mapped(x)


def test_results_that_change_in_number_or_type_raise() -> None:
    run_ranks(2, changing_results)


def captured() -> None:
    mesh = mesh_of_all()
    x, w = sw.distribute_tensor(randn(7, 5), mesh, ROWS), sw.distribute_tensor(randn(5, 3), mesh, WHOLE)
    mapped = sw.local_map(torch.mm, ROWS, (ROWS, WHOLE))
    compiled = sw.compile(lambda x, w: mapped(x, w).relu())
    for _ in range(2):
        assert torch.equal(compiled(x, w).full_tensor(), mapped(x, w).relu().full_tensor())


def test_local_map_can_be_compiled() -> None:
    run_ranks(2, captured)


def invalid_calls() -> None:
    mesh = mesh_of_all()
    x = sw.distribute_tensor(randn(6, 2), mesh, ROWS)
    with pytest.raises(
        TensorError, match=r"neg: argument 0 is \[6, 2\] \(0: S\(0\)\), but in_placements require .*R.*redist"
    ):
        sw.local_map(torch.neg, WHOLE, (WHOLE,))(x)
    assert sw.local_map(torch.neg, WHOLE, (WHOLE,), redistribute_inputs=True)(x).placements == (sw.Replicate(),)
    with pytest.raises(TensorError, match="neg: in_placements has 2 entries for 1 arguments"):
        sw.local_map(torch.neg, ROWS, (ROWS, ROWS))(x)
    with pytest.raises(TensorError, match=r"add: argument 1 is a DTensor .* in_placements has None for it"):
        sw.local_map(torch.add, ROWS, (ROWS, None))(x, x)
    with pytest.raises(TensorError, match="out_placements has 2 entries for 1 results"):
        sw.local_map(torch.neg, (ROWS, ROWS), (ROWS,))(x)
    with pytest.raises(TensorError, match=r"result 0 has placements .* pass one per mesh dimension"):
        sw.local_map(torch.neg, [sw.Shard(0), sw.Shard(1)], (ROWS,))(x)
    with pytest.raises(TensorError, match="no argument is a DTensor"):
        sw.local_map(torch.neg, ROWS)(torch.ones(2))
    with pytest.raises(TensorError, match="result 0 is a DTensor"):
        sw.local_map(lambda local: x, ROWS, (ROWS,))(x)
    other = sw.init_device_mesh("cpu", (1, comm.world().size))
    with pytest.raises(MeshMismatchError, match="different meshes"):
        sw.local_map(torch.neg, ROWS, (ROWS,), mesh=other)(x)
    sizes = iter([3, 2])
    shrinking = sw.local_map(lambda local: local[: next(sizes)], ROWS, (ROWS,))
    shrinking(x)
    why = r"are \(2, 2\) on rank \d, but were \(3, 2\) .* on the arguments alone.* Pass what else .* as an argument"
    with pytest.raises(LocalTensorError, match=why):
        shrinking(x)


def test_invalid_calls_raise_with_the_remedy() -> None:
    run_ranks(2, invalid_calls)


def failing_on_one() -> tuple[str, float]:
    mesh = mesh_of_all()

    def thirds(x: Tensor) -> Tensor:
        if comm.rank() == 1:
            raise ValueError(f"{tuple(x.shape)} is not divisible by 3")
        return x * 3

    start = time.monotonic()
    with pytest.raises((ValueError, sw.errors.ShardwrightError)) as error:
        sw.local_map(thirds, ROWS, [ROWS])(sw.ones(8, 2, mesh=mesh, placements=ROWS))
    return str(error.value), time.monotonic() - start


def test_error_on_one_rank_raises_on_all() -> None:
    for message, seconds in run_ranks(4, failing_on_one):
        assert "(2, 2) is not divisible by 3" in message
        assert seconds < 20


def test_device_mesh_is_accepted_as_the_name_of_the_mesh() -> None:
    mesh = mesh_of_all()
    ones = sw.local_map(torch.ones, WHOLE, device_mesh=mesh)
    assert ones(2, 3).device_mesh is mesh


def written_for_torch(local_map: Any, lib: Any, mesh: sw.DeviceMesh) -> list[Tensor]:
    """Calls as in the documentation of torch.distributed.tensor.experimental.local_map, with positions and keywords."""
    columns, rows, whole = [lib.Shard(1)], [lib.Shard(0)], [lib.Replicate()]
    w, x = randn(12, 8), randn(8, 16)
    w_dt, x_dt = lib.distribute_tensor(w, mesh, columns), lib.distribute_tensor(x, mesh, rows)

    def mm_allreduce_forward(device_mesh: Any, w: Tensor, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return comm.all_reduce(torch.mm(w, x) * scale)

    by_name = local_map(
        mm_allreduce_forward, out_placements=whole, in_placements=[None, columns, rows], device_mesh=mesh
    )
    by_position = local_map(torch.mm, [lib.Partial()], (columns, rows), (columns, rows), mesh)

    @local_map(out_placements=(rows, None), in_placements=(rows, None), redistribute_inputs=True)
    def scaled(local: Tensor, by: float) -> tuple[Tensor, float]:
        """Scale by a number."""
        return local * by, by

    assert scaled(w_dt, 3.0)[1] == 3.0
    return [
        by_name(mesh, w_dt, x_dt).full_tensor(),
        by_name(mesh, w_dt, x_dt, scale=2.0).full_tensor(),  # in_placements are for the positional arguments
        by_position(w_dt, x_dt).full_tensor(),
        scaled(w_dt, 3.0)[0].full_tensor(),
    ]


def as_in_torch() -> None:
    import torch.distributed.tensor as theirs
    from torch.distributed.tensor.experimental import local_map

    mesh = mesh_of_all()
    w, x = randn(12, 8), randn(8, 16)
    for found in (written_for_torch(sw.local_map, sw, mesh), written_for_torch(local_map, theirs, mesh)):
        torch.testing.assert_close(found, [w @ x, 2 * (w @ x), w @ x, 3 * w])


def test_calls_written_for_torch_work_unchanged() -> None:
    run_ranks(2, as_in_torch)


def test_the_decorator_keeps_the_name_and_docstring() -> None:
    @sw.local_map(out_placements=ROWS)
    def double(x: Tensor) -> Tensor:
        """Return x + x."""
        return x + x

    assert (double.__name__, double.__doc__) == ("double", "Return x + x.")
    assert double(sw.ones(4, mesh=mesh_of_all(), placements=ROWS)).sum().item() == 8


ORDER = r"local_map\(func, out_placements, in_placements\), in this order"


def test_swapped_placement_lists_raise_with_the_order_of_the_arguments() -> None:
    x = sw.ones(4, 2, mesh=mesh_of_all(), placements=ROWS)
    with pytest.raises(TensorError, match=f"mul: out_placements has 2 entries for 1 results: .* {ORDER}"):
        sw.local_map(torch.mul, (ROWS, ROWS), ROWS)(x, x)
    with pytest.raises(TensorError, match=f"mul: in_placements has 1 entries for 2 arguments: .* {ORDER}"):
        sw.local_map(torch.mul, (ROWS, ROWS), (ROWS,))(x, x)
    with pytest.raises(
        TensorError, match=f"in_placements has placements for argument 1, which is .* float: .* {ORDER}"
    ):
        sw.local_map(torch.mul, (ROWS, None), (ROWS, ROWS))(x, 2.0)
    with pytest.raises(TensorError, match=f"out_placements has placements for result 1, which is .* int: .* {ORDER}"):
        sw.local_map(lambda x: (x, 1), (ROWS, ROWS), (ROWS,))(x)


def test_arguments_of_the_wrong_type_raise_where_local_map_is_called() -> None:
    mesh = mesh_of_all()
    with pytest.raises(
        ArgumentTypeError, match=f"in_placements must be a list of placements, .* DeviceMesh. .* {ORDER}"
    ):
        sw.local_map(torch.neg, ROWS, mesh)  # type: ignore[arg-type]  # what is tested
    with pytest.raises(ArgumentTypeError, match=r"out_placements mixes lists and placements \(Shard\(0\)\)"):
        sw.local_map(torch.neg, (ROWS, sw.Shard(0)))
    with pytest.raises(
        ArgumentTypeError, match=f"out_placements must be a list .* got builtin_function_or_method. .* {ORDER}"
    ):
        sw.local_map(ROWS, torch.neg)  # type: ignore[arg-type]  # what is tested
    with pytest.raises(ArgumentTypeError, match="func must be callable, got list"):
        sw.local_map(ROWS, ROWS)  # type: ignore[arg-type]  # what is tested


def test_a_tensor_result_without_out_placements_raises() -> None:
    x = sw.ones(4, mesh=mesh_of_all(), placements=ROWS)
    assert sw.local_map(lambda x: x.numel(), in_placements=(ROWS,))(x) == 4
    with pytest.raises(TensorError, match="neg: result 0 is a tensor, but local_map was called without out_placements"):
        sw.local_map(torch.neg)(x)


def test_giving_mesh_and_device_mesh_raises() -> None:
    mesh = mesh_of_all()
    with pytest.raises(ArgumentTypeError, match=r"local_map takes mesh or device_mesh, .* but got both"):
        sw.local_map(torch.neg, ROWS, mesh=mesh, device_mesh=mesh)
    with pytest.raises(ArgumentTypeError, match=r"takes mesh or device_mesh, .* but got both"):
        sw.zeros(2, mesh=mesh, device_mesh=mesh)
    assert sw.zeros(2, mesh=None, device_mesh=mesh).device_mesh is mesh
