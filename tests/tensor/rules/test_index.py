"""Indexing matches torch for every layout; writes reach the original or raise."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwright as sw
from shardwright.errors import InPlaceError
from shardwright.testing import on_ranks, run_ranks


def real(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_()


def count(*shape: int, high: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(high))


BASIC = [
    0, -1, slice(1, 3), slice(None, None, 2), slice(1, -1, 3), slice(4, 2), (slice(None), 1), (2, 0),
    (slice(3, None), None, -1), Ellipsis, (Ellipsis, slice(1, 2)), (None, 1, Ellipsis, slice(None, 1)), (),
    (slice(0, 1), slice(None)), slice(-2, None),
]  # fmt: skip


def test_basic_indexing_matches_torch_for_every_layout(against_torch: Callable[..., None]) -> None:
    cases = [(f"x[{index}]", lambda x, index=index: x[index], [real(5, 2)]) for index in BASIC]
    cases += [(f"x[{index}] of one row", lambda x, index=index: x[index], [real(1, 4)]) for index in (0, slice(0, 1))]
    against_torch((3,), cases)
    against_torch((2, 2), cases, max_combinations=9)


def test_slices_of_uneven_slices_match_torch(against_torch: Callable[..., None]) -> None:
    against_torch(
        (3,),
        [
            ("x[2:][1:4]", lambda x: x[2:][1:4] * 2, [real(9, 2)]),
            ("x[2:][::2][1]", lambda x: x[2:][::2][1], [real(9, 2)]),
            ("x[5:] + x[:4]", lambda x: x[5:] + x[:4], [real(9, 2)]),
            ("x[1:4] * y[2:5]", lambda x, y: x[1:4] * y[2:5], [real(6), real(6)]),
        ],
    )


def test_advanced_indexing_matches_torch_for_every_layout(against_torch: Callable[..., None]) -> None:
    against_torch(
        (3,),
        [
            ("x[i]", lambda x, i: x[i], [real(5, 2), count(4, high=5)]),
            ("x[i, j]", lambda x, i, j: x[i, j], [real(5, 4), count(3, 1, high=5), count(2, high=4)]),
            ("x[:, i]", lambda x, i: x[:, i], [real(2, 4), count(2, 2, high=4)]),
            ("x[1, :, i]", lambda x, i: x[1, :, i], [real(4, 2, 3), count(4, high=3)]),
            ("x[i, :, j]", lambda x, i, j: x[i, :, j], [real(4, 2, 3), count(4, high=4), count(4, high=3)]),
            ("x[1:3, None, i]", lambda x, i: x[1:3, None, i], [real(4, 3), count(2, high=3)]),
            ("x[..., [0, 2]]", lambda x: x[..., [0, 2]], [real(4, 3)]),
            ("x[[2, 0], [1, 1]]", lambda x: x[[2, 0], [1, 1]], [real(4, 3)]),
            ("x[mask]", lambda x: x[x.detach() > 0], [real(4, 3)]),
            ("x[mask, 1]", lambda x: x[x.detach()[:, 0] > 0, 1], [real(4, 3)]),
            ("x[a 0-dim tensor]", lambda x, i: x[i], [real(4, 3), torch.tensor(2)]),
            ("x[: a 0-dim tensor]", lambda x, i: x[:i], [real(4, 3), torch.tensor(2)]),
            ("x[numpy]", lambda x: x[torch.tensor([1, 2]).numpy()], [real(4, 3)]),
        ],
    )


def test_indexing_functions_match_torch(against_torch: Callable[..., None]) -> None:
    against_torch(
        (3,),
        [
            ("narrow", lambda x: x.narrow(0, 1, 3), [real(5, 2)]),
            ("narrow from the end", lambda x: torch.narrow(x, -1, -2, 1), [real(5, 2)]),
            ("select", lambda x: torch.select(x, dim=1, index=-1), [real(5, 2)]),
            ("index_select", lambda x, i: x.index_select(1, i), [real(2, 4), count(5, high=4)]),
            ("gather", lambda x, i: x.gather(0, i), [real(4, 2), count(3, 2, high=4)]),
            ("gather from fewer", lambda x, i: x.gather(1, i), [real(4, 3), count(2, 3, high=3)]),
            ("take_along_dim", lambda x, i: torch.take_along_dim(x, i, 1), [real(4, 3), count(1, 2, high=3)]),
            ("take", lambda x, i: x.take(i), [real(4, 2), count(2, 3, high=8)]),
            ("unbind", lambda x: x.unbind(0), [real(4, 2)]),
            ("iteration", lambda x: list(x), [real(2, 4)]),
            ("masked_select", lambda x: x.masked_select(x.detach() > 0), [real(4, 2)]),
            ("nonzero", lambda x: (x.detach() > 0).nonzero(), [real(4, 2)]),
            ("where of one argument", lambda x: torch.where(x.detach() > 0), [real(4, 2)]),
            ("argwhere", lambda x: torch.argwhere(x.detach() > 0), [real(4, 2)]),
        ],
    )


def test_integer_indexing_of_int_and_bool_tensors_matches_torch() -> None:
    def check() -> None:
        mesh = sw.init_device_mesh("cpu", (3,))
        for dtype in (torch.int64, torch.bool, torch.uint8, torch.float16):
            whole = (torch.arange(5) - 1).clamp(min=0).to(dtype)
            x = sw.distribute_tensor(whole, mesh, [sw.Shard(0)])
            for index in range(-5, 5):
                assert x[index].dtype == whole.dtype
                assert x[index].item() == whole[index].item()

    run_ranks(3, check)


def test_invalid_indices_raise_on_every_rank() -> None:
    def check() -> None:
        x = sw.ones(4, 2, mesh=sw.init_device_mesh("cpu", (3,)), placements=[sw.Shard(0)])
        for bad in (4, -5, (0, 0, 0), (slice(None), 2)):
            with pytest.raises(IndexError):
                x[bad]
            with pytest.raises(IndexError):
                x[bad] = 1
        with pytest.raises(ValueError, match="step must be greater than zero"):
            x[::-1]
        with pytest.raises(RuntimeError):
            x.narrow(0, 3, 2)
        with pytest.raises(RuntimeError):
            x[1:3] = sw.ones(3, 2, mesh=x.sharding.mesh)

    run_ranks(3, check)


def test_slicing_a_sharded_dimension_does_not_communicate() -> None:
    def check() -> None:
        mesh = sw.init_device_mesh("cpu", (3,))
        x = sw.distribute_tensor(torch.arange(24.0).reshape(8, 3), mesh, [sw.Shard(0)])
        with sw.communication("explicit"):
            assert str(x[2:7].sharding) == "[5, 3] (0: S(0: 1+3+1))"
            assert str(x[:, 1].sharding) == "[8] (0: S(0))"
            assert str(x[4].sharding) == "[3] (0: P(sum))"
            assert str(x[::3].sharding) == "[3, 3] (0: S(0))"
            assert str(x.split(5)[1].sharding) == "[3, 3] (0: S(0: 0+1+2))"
            assert str(x.chunk(2)[0].sharding) == "[4, 3] (0: S(0: 3+1+0))"
            x[1:5] += 1
            x[7] = 3
        x[0:2, 1:] = x[6:8, :2]

    run_ranks(3, check)


WRITES: list[tuple[str, Callable[..., Any]]] = [
    ("x[1:3] = 5", lambda x, v: x.__setitem__(slice(1, 3), 5)),
    ("x[2] = 5", lambda x, v: x.__setitem__(2, 5.5)),
    ("x[-1, 1:] = 5", lambda x, v: x.__setitem__((-1, slice(1, None)), 5)),
    ("x[:, 1] = 5", lambda x, v: x.__setitem__((slice(None), 1), 5)),
    ("x[0, 1] = 5", lambda x, v: x.__setitem__((0, 1), 5)),
    ("x[...] = 5", lambda x, v: x.__setitem__(Ellipsis, 5)),
    ("x[2] = v[0]", lambda x, v: x.__setitem__(2, v[0])),
    ("x[1:3] = v", lambda x, v: x.__setitem__(slice(1, 3), v)),
    ("x[1:3] = v[:1]", lambda x, v: x.__setitem__(slice(1, 3), v[:1])),
    ("x[3] = v[:1]", lambda x, v: x.__setitem__(3, v[:1])),
    ("x[::3, 1:] = v[:, :2]", lambda x, v: x.__setitem__((slice(None, None, 3), slice(1, None)), v[:, :2])),
    ("x[:, 0] = v[0, 0]", lambda x, v: x.__setitem__((slice(None), 0), v[0, 0])),
    ("x[None, 2:4] = v", lambda x, v: x.__setitem__((None, slice(2, 4)), v)),
    ("x[mask] = 5", lambda x, v: x.__setitem__(x.detach() > 0, 5)),
    ("x[rows] = 5", lambda x, v: x.__setitem__(x.detach()[:, 0] > 0, 5)),
    ("x[mask] = one of v", lambda x, v: x.__setitem__(x.detach() > 0, v[0, 0])),
    ("x[mask] = several", lambda x, v: x.__setitem__(v.detach().sum(0, keepdim=True).expand(5, 3) > 99, v[0, :0])),
    ("x[mask] *= 2", lambda x, v: x.__setitem__(x.detach() > 0, x[x.detach() > 0] * 2)),
    ("x[[0, 3]] = v", lambda x, v: x.__setitem__([0, 3], v)),
    ("x[[0, 3]] = 5", lambda x, v: x.__setitem__([0, 3], 5)),
    ("x[:, [0, 2]] = v[0, :2]", lambda x, v: x.__setitem__((slice(None), [0, 2]), v[0, :2])),
    ("x[1:3, [2, 0]] = v[:, :2]", lambda x, v: x.__setitem__((slice(1, 3), [2, 0]), v[:, :2])),
    ("x[1, [2, 0]] = v[0, :2]", lambda x, v: x.__setitem__((1, [2, 0]), v[0, :2])),
    ("x[1:3] += v", lambda x, v: x.__setitem__(slice(1, 3), x[1:3].add_(v))),
    ("x[1:3].mul_(v)", lambda x, v: x[1:3].mul_(v)),
    ("x[1:4][1:].zero_()", lambda x, v: x[1:4][1:].zero_()),
    ("x.narrow(0, 2, 3).fill_(7)", lambda x, v: x.narrow(0, 2, 3).fill_(7)),
    ("x.index_fill_(1, [1], 3)", lambda x, v: x.index_fill_(1, x.new_ones(1, dtype=torch.long), 3)),
]  # fmt: skip


def test_indexed_assignment_writes_to_the_original_and_propagates_gradients(against_torch: Callable[..., None]) -> None:
    def written(write: Callable[..., Any], linear: bool) -> Callable[..., Any]:
        def call(x: Any, v: Any) -> Any:
            target = x * 1
            if isinstance(x, sw.DTensor) and x.sharding.is_partial and not linear:
                target = target.redistribute(placements=[sw.Replicate()] * len(x.placements))
            write(target, v)
            return target

        return call

    cases = [(name, written(write, "] = v" in name), [real(5, 3), real(2, 3)]) for name, write in WRITES]
    against_torch((3,), cases, max_combinations=9)
    against_torch(
        (2, 2), [case for case in cases if case[0].startswith("x[") and "=" in case[0]][::2], max_combinations=9
    )


def test_writes_to_partial_sums_are_correct_or_raise() -> None:
    def check() -> None:
        mesh = sw.init_device_mesh("cpu", (3,))
        rank = sw.comm.rank()
        partial_value = torch.arange(8.0).reshape(4, 2) * (rank + 1) - rank
        whole = sw.DTensor.from_local(partial_value, mesh, [sw.Partial()]).full_tensor()
        value = torch.tensor([[5.0, 6.0]])
        x = sw.DTensor.from_local(partial_value.clone(), mesh, [sw.Partial()])
        x[1:3] = 5
        whole[1:3] = 5
        torch.testing.assert_close(x.full_tensor(), whole)
        x[1:3] = 0
        x[3] = sw.distribute_tensor(value[0], mesh, [sw.Shard(0)])
        whole[1:3], whole[3] = 0, value[0]
        torch.testing.assert_close(x.full_tensor(), whole)
        x[[0, 2]] = sw.distribute_tensor(value, mesh)
        whole[[0, 2]] = value
        torch.testing.assert_close(x.full_tensor(), whole)

    run_ranks(3, check)


def test_sharding_over_a_mesh_dimension_of_one_rank_keeps_views() -> None:
    def check(shape: tuple[int, ...]) -> None:
        mesh = sw.init_device_mesh("cpu", shape)
        x = sw.distribute_tensor(torch.arange(10.0).reshape(5, 2), mesh, [sw.Shard(0), sw.Shard(0)][: len(shape)])
        assert x[1:4].full_tensor().tolist() == [[2, 3], [4, 5], [6, 7]]
        assert x[3].tolist() == [6, 7]
        x[1:3] *= 10
        x[4] = 1
        if mesh.size == 1:
            x[0] += 1
            x[3, 1].mul_(2)
            assert x.tolist() == [[1, 2], [20, 30], [40, 50], [6, 14], [1, 1]]
        else:
            assert x.tolist() == [[0, 1], [20, 30], [40, 50], [6, 7], [1, 1]]

    run_ranks(1, check, (1,))
    run_ranks(3, check, (1, 3))
    run_ranks(3, check, (3, 1))


def test_writing_to_a_leaf_that_requires_grad_raises() -> None:
    def check() -> None:
        x = sw.ones(4, mesh=sw.init_device_mesh("cpu", (3,)), placements=[sw.Shard(0)]).requires_grad_()
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
            x[0:2] = 1
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
            x[3] = 1
        with torch.no_grad():
            x[3] = 7
        assert x.tolist() == [1, 1, 1, 7]

    run_ranks(3, check)


def test_writing_to_a_copy_that_looks_like_a_view_raises() -> None:
    def check() -> None:
        mesh = sw.init_device_mesh("cpu", (3,))
        x = sw.distribute_tensor(torch.arange(12.0).reshape(6, 2), mesh, [sw.Shard(0)])
        writes: list[Callable[[], Any]] = [
            lambda: x.unfold(0, 2, 1).mul_(2),
            lambda: x.as_strided((2,), (1,)).mul_(2),
            lambda: torch.add(x[:3], x[:3], out=x.view(2, 3, 2)[1]),
        ]
        for write in writes:
            with pytest.raises(InPlaceError, match="looks like a view but is a copy"):
                write()
        x[1].clone().mul_(2)  # a clone may be written to
        assert torch.equal(x.full_tensor(), torch.arange(12.0).reshape(6, 2))
        rows = [
            row.mul_(2) for row in x.redistribute(placements=[sw.Shard(1)])
        ]  # not sharded along this dimension: true views
        assert len(rows) == 6

    run_ranks(3, check)


@on_ranks(3)
def test_writes_to_an_indexed_element_reach_the_original() -> None:
    mesh = sw.init_device_mesh("cpu", (3,))
    whole = torch.arange(12.0).reshape(6, 2)
    for x in (whole, sw.distribute_tensor(whole, mesh, [sw.Shard(0)])):
        x.unbind(0)[1].mul_(2)
        next(iter(x)).add_(7)
        x.select(0, 4).zero_()
        torch.add(x[0], x[0], out=x[3])
        found = x
    assert torch.equal(found.full_tensor(), whole)


@on_ranks(2)
def test_out_argument_with_several_results_keeps_their_names() -> None:
    mesh = sw.init_device_mesh("cpu", (2,))
    x = sw.distribute_tensor(torch.arange(6.0).reshape(3, 2), mesh, [sw.Shard(0)])
    out = (sw.zeros(2, mesh=mesh), sw.zeros(2, mesh=mesh, dtype=torch.long))
    found = torch.max(x, 0, out=out)
    assert found.values is out[0]
    assert found.indices.tolist() == [2, 2]


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)])
@on_ranks(4)
def test_zero_dimensional_tensors_index_like_ints(mesh_shape: tuple[int, ...]) -> None:
    mesh = sw.init_device_mesh("cpu", mesh_shape)
    whole = torch.arange(60.0).reshape(5, 4, 3)

    def spread(numbers: Any) -> Any:
        return sw.distribute_tensor(torch.tensor(numbers), mesh)

    indices: list[Callable[[Any], Any]] = [
        lambda t: t(2),
        lambda t: (t(2), t([1, 2])),
        lambda t: (t(2), slice(None), t([1, 2])),
        lambda t: (t([0, 1]), t(1)),
        lambda t: (slice(1, 3), t(2)),
        lambda t: (t(-1), t(0), t(2)),
    ]
    for dims in itertools.product((0, 1, 2), repeat=len(mesh_shape)):
        for index in indices:
            plain, ours = whole.clone(), sw.distribute_tensor(whole, mesh, [sw.Shard(dim) for dim in dims])
            assert torch.equal(ours[index(spread)].full_tensor(), plain[index(torch.tensor)])
            row = plain[index(torch.tensor)] * 2
            for written, value in ((plain, row), (ours, sw.distribute_tensor(row, mesh))):
                make = torch.tensor if written is plain else spread
                written[index(make)] = value
                written[index(make)] += 1
            assert torch.equal(ours.full_tensor(), plain), (dims, index(list))


@on_ranks(2)
def test_comparison_with_none_gives_a_bool() -> None:
    mesh = sw.init_device_mesh("cpu", (2,))
    for placement in (sw.Replicate(), sw.Shard(0), sw.Partial()):
        x = sw.DTensor.from_local(torch.ones(2), mesh, [placement])
        assert (x == None) is False  # noqa: E711  # what torch answers
        assert (x != None) is True  # noqa: E711  # likewise


INDEXED_BY_NUMBERS: list[Callable[[Any, Callable[..., Any]], Any]] = [
    lambda x, t: x[t(1), 1:3, t([0, 1])],
    lambda x, t: x[t(True)],
    lambda x, t: x[t(False)],
    lambda x, t: x[t(1), t([True, False, True, True])],
    lambda x, t: x[:, t(True)],
    lambda x, t: x[t(0) : t(2)],
    lambda x, t: (x.__setitem__((t(1), slice(1, 3)), t(5.0)), x)[1],
    lambda x, t: (x.__setitem__((t(1), slice(None), t(2)), t([1.0, 2, 3, 4])), x)[1],
    lambda x, t: (x.__setitem__(t(True), t(5.0)), x)[1],
    lambda x, t: (x.__setitem__((..., t(1)), x[..., t(0)]), x)[1],
    lambda x, t: x.index_put((t(1),), t(5.0)),
    lambda x, t: x.index_put((t(1), t(2), t(3)), t(5.0)),
    lambda x, t: x.index_put((t(1), t([0, 1])), t(5.0)),
    lambda x, t: x.index_put((t(1), t(0)), t([1.0, 2, 3, 4, 5, 6]), accumulate=True),
    lambda x, t: x.index_put_((t(1), t(2), t(3)), t(5.0)),
    lambda x, t: x.index_put((t(-1), t(-1)), t(5.0)),
    lambda x, t: x.index_select(1, t(2)),
    lambda x, t: x.take(t(-1)),
    lambda x, t: torch.take_along_dim(x, t(13)),
    lambda x, t: x.index_fill(1, t(3), 9.0),
    lambda x, t: x.flatten().index_copy(0, t(3), t(2.0)),
    lambda x, t: x.flatten().gather(0, t(3)),
    lambda x, t: x.flatten().scatter(0, t(3), t(2.0)),
    lambda x, t: x.put(t(3), t(2.0)),
    lambda x, t: x.narrow(1, t(1), 2),
]


@pytest.mark.parametrize("plain", [True, False])
@on_ranks(4)
def test_zero_dimensional_indices_match_torch(plain: bool) -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2))
    whole = torch.arange(48.0).reshape(2, 4, 6)

    def spread(value: Any) -> Any:
        number = torch.tensor(value)
        return number if plain and not number.ndim else sw.distribute_tensor(number, mesh)

    for dims in ((0, 1), (2, 1), (1, 1)):
        for number, program in enumerate(INDEXED_BY_NUMBERS):
            x = sw.distribute_tensor(whole, mesh, [sw.Shard(dim) for dim in dims])
            found = program(x, spread).full_tensor()
            assert torch.equal(found, program(whole.clone(), torch.tensor)), (dims, number)


@pytest.mark.parametrize("mesh_shape", [(2,), (2, 1), (1, 2)])
@on_ranks(2)
def test_assignment_reads_its_source_before_writing(mesh_shape: tuple[int, ...]) -> None:
    mesh = sw.init_device_mesh("cpu", mesh_shape)
    whole = torch.arange(12.0).reshape(4, 3)

    def rows(x: Any) -> None:
        x[:] = x[2]

    def columns(x: Any) -> None:
        x[:, :] = x[:, 1:2]

    def itself(x: Any) -> None:
        x[1:3] += 1
        x[1] += x[2]

    for dim, write in itertools.product((0, 1), (rows, columns, itself)):
        for order in itertools.permutations(range(len(mesh_shape))):
            x, plain = sw.distribute_tensor(whole, mesh, [sw.Shard(dim)] * len(mesh_shape), order=order), whole.clone()
            write(x)
            write(plain)
            assert torch.equal(x.full_tensor(), plain), (dim, order)


@on_ranks(2)
def test_squeeze_in_place_drops_dimensions_of_global_size_one() -> None:
    mesh = sw.init_device_mesh("cpu", (2,))
    for args in ((), (0,), (-1,), ((0, 3),), (1,)):
        for placement in (sw.Shard(1), sw.Shard(2), sw.Replicate()):
            plain = torch.arange(8.0).reshape(1, 2, 4, 1)
            x = sw.distribute_tensor(plain, mesh, [placement])
            assert x.squeeze_(*args) is x
            assert torch.equal(x.full_tensor(), plain.squeeze_(*args)), (args, placement)
            assert x.to_local().shape == x.sharding.local_shape(torch.distributed.get_rank())
