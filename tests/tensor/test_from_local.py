"""`from_local`: the global shape follows from local tensors, and those that do not fit raise on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardwright as sw
from shardwright import comm
from shardwright.comm import coordinate
from shardwright.errors import CaptureError
from shardwright.testing import outcomes, run_ranks

FOUR = sw.Mesh((4,))
SQUARE = sw.Mesh((2, 2), ("dp", "tp"))


def rows(*sizes: int) -> torch.Tensor:
    """Return a local tensor with this rank's number of rows; its values are their global row indices."""
    start = sum(sizes[: comm.rank()])
    return torch.arange(float(2 * start), float(2 * (start + sizes[comm.rank()]))).reshape(-1, 2)


@pytest.mark.parametrize(
    ("sizes", "placement"),
    [
        ((3, 3, 3, 3), sw.Shard(0)),
        ((3, 3, 3, 1), sw.Shard(0)),
        ((2, 2, 1, 0), sw.Shard(0)),
        ((0, 0, 0, 0), sw.Shard(0)),
        ((3, 3, 5, 3), sw.Ragged(0, (3, 3, 5, 3))),
        ((0, 4, 0, 1), sw.Ragged(0, (0, 4, 0, 1))),
    ],
)
@pytest.mark.parametrize("run_check", [None, True])
def test_uneven_local_sizes_give_the_matching_layout(sizes: Any, placement: Any, run_check: bool | None) -> None:
    def work() -> None:
        local = rows(*sizes)
        x = sw.DTensor.from_local(local, FOUR, [sw.Shard(0)], run_check=run_check)
        assert x.placements == (placement,)
        expected = torch.arange(2.0 * sum(sizes)).reshape(-1, 2)
        assert torch.equal(x.full_tensor(), expected)
        assert x.sum().item() == expected.sum().item()

    run_ranks(4, work)


def test_layout_of_uneven_nested_shards_is_deduced() -> None:
    def work() -> None:
        x = sw.DTensor.from_local(rows(2, 1, 2, 1), SQUARE, [sw.Shard(0), sw.Shard(0)])
        assert x.placements == (sw.Shard(0), sw.Shard(0))
        assert torch.equal(x.full_tensor(), torch.arange(12.0).reshape(6, 2))
        y = sw.DTensor.from_local(rows(1, 1, 3, 2), SQUARE, [sw.Shard(0), sw.Shard(0)])
        assert y.placements == (sw.Ragged(0, (2, 5)), sw.Shard(0))
        assert torch.equal(y.full_tensor(), torch.arange(14.0).reshape(7, 2))
        z = sw.DTensor.from_local(
            torch.ones(2 + comm.rank() // 2, 3 - comm.rank() % 2), SQUARE, [sw.Shard(0), sw.Shard(1)]
        )
        assert z.placements == (sw.Ragged(0, (2, 3)), sw.Shard(1))
        assert z.shape == (5, 5)

    run_ranks(4, work)


REFUSED: dict[str, Callable[[], object]] = {
    "are not shards of one tensor placed as (S(0), S(0))": lambda: sw.DTensor.from_local(
        rows(1, 2, 1, 2), SQUARE, [sw.Shard(0), sw.Shard(0)]
    ),
    "are not shards of one tensor placed as (S(0))": lambda: sw.DTensor.from_local(
        torch.ones(3, 2 + comm.rank() % 2), FOUR, [sw.Shard(0)]
    ),
    "different numbers of dimensions: 1, 2, 2, 2": lambda: sw.DTensor.from_local(
        torch.ones((2,) if comm.rank() == 0 else (2, 2)), FOUR, [sw.Shard(0)]
    ),
    "different dtypes: torch.float32, torch.float32, torch.float64, torch.float32": lambda: sw.DTensor.from_local(
        torch.ones(2, dtype=torch.float64 if comm.rank() == 2 else torch.float32), FOUR, [sw.Shard(0)]
    ),
    "different values of requires_grad: False, True, True, True": lambda: sw.DTensor.from_local(
        torch.ones(2, requires_grad=comm.rank() != 0), FOUR, [sw.Shard(0)]
    ),
    "different dtypes: torch.float32, torch.float64": lambda: sw.DTensor.from_local(
        torch.ones(2, dtype=torch.float64 if comm.rank() % 2 else torch.float32),
        FOUR,
        [sw.Shard(0)],
        shape=(8,),
        run_check=True,
    ),
    "different values of requires_grad": lambda: sw.DTensor.from_local(
        torch.ones(2, requires_grad=comm.rank() != 3), FOUR, [sw.Replicate()], run_check=True
    ),
    "different strides (rank 0: (3, 1); rank 1: (1, 2)": lambda: sw.DTensor.from_local(
        torch.ones(2, 3) if comm.rank() != 1 else torch.ones(3, 2).t(), FOUR, [sw.Shard(0)], run_check=True
    ),
    "ranks 0 and 3 hold replicas of one part of [2] (0: R), but their values differ": lambda: sw.DTensor.from_local(
        torch.tensor([1.0, float(comm.rank() == 3)]), FOUR, [sw.Replicate()], run_check=True
    ),
    "rank 2 has a local tensor of shape (3,), but its part of [8] (0: S(0)) has shape (2,)": lambda: (
        sw.DTensor.from_local(torch.ones(2 + comm.rank() // 2 % 2), FOUR, [sw.Shard(0)], shape=(8,), run_check=True)
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_local_tensors_that_do_not_fit_together_raise_on_every_rank(message: str) -> None:
    for outcome in outcomes(4, REFUSED[message]):
        assert outcome.kind == "LocalTensorError"
        assert message in outcome.message


def test_strides_that_differ_only_by_local_sizes_pass_the_check() -> None:
    def work() -> None:
        local = torch.ones(3, 2 if comm.rank() == 0 else 1)
        assert sw.DTensor.from_local(local, FOUR, [sw.Shard(1)], run_check=True).shape == (3, 5)
        turned = torch.ones(2 if comm.rank() == 0 else 1, 3).t()
        assert sw.DTensor.from_local(turned, FOUR, [sw.Shard(1)], run_check=True).shape == (3, 5)

    run_ranks(4, work)


def test_one_message_along_sharding_dimensions_and_none_if_nothing_can_differ() -> None:
    def work() -> None:
        sent: list[tuple[int, ...]] = []
        original = coordinate.Channel.round

        def counted(channel: Any, *args: Any) -> Any:
            sent.append(channel._group.ranks)
            return original(channel, *args)

        coordinate.Channel.round = counted  # type: ignore[method-assign]  # restored below
        try:
            with comm.count() as traffic:
                local = torch.ones(2, 2)
                for placements, how, expected in (
                    ([sw.Shard(0), sw.Replicate()], {}, [tuple(SQUARE.array[:, comm.rank() % 2].tolist())]),
                    ([sw.Partial(), sw.Shard(1)], {}, [tuple(SQUARE.array[comm.rank() // 2].tolist())]),
                    ([sw.Shard(0), sw.Shard(1)], {}, [(0, 1, 2, 3)]),
                    ([sw.Replicate(), sw.Partial()], {}, []),
                    ([sw.Shard(0), sw.Shard(1)], {"shape": (4, 4)}, []),
                    ([sw.Shard(0), sw.Shard(1)], {"run_check": False}, []),
                    ([sw.Ragged(0, (2, 2)), sw.Replicate()], {}, []),
                ):
                    sw.DTensor.from_local(local, SQUARE, placements, **how)
                    assert sent == expected, (placements, how)
                    sent.clear()
                sw.DTensor.from_local(local.to("meta"), SQUARE, [sw.Shard(0), sw.Shard(1)])
            assert not sent
            assert not traffic.calls
        finally:
            coordinate.Channel.round = original  # type: ignore[method-assign]  # likewise

    run_ranks(4, work)


def test_without_a_check_all_shards_are_assumed_to_have_one_size() -> None:
    def work() -> tuple[int, ...]:
        return tuple(sw.DTensor.from_local(torch.ones(3, 2), FOUR, [sw.Shard(0)], run_check=False).shape)

    assert run_ranks(4, work) == [(12, 2)] * 4


def test_training_on_an_uneven_last_batch_equals_one_process() -> None:
    def work() -> None:
        torch.manual_seed(0)
        data, weight = torch.randn(11, 3), torch.randn(3, 2)
        mine = data[:7] if comm.rank() == 0 else data[7:]
        w = sw.distribute_tensor(weight, sw.Mesh((2,)), [sw.Replicate()]).requires_grad_()
        local = mine.clone().requires_grad_()
        x = sw.DTensor.from_local(local, sw.Mesh((2,)), [sw.Shard(0)])
        (x @ w).tanh().mean().backward()
        plain_w, plain_x = weight.clone().requires_grad_(), data.clone().requires_grad_()
        (plain_x @ plain_w).tanh().mean().backward()
        torch.testing.assert_close(w.grad.full_tensor(), plain_w.grad)
        torch.testing.assert_close(local.grad, plain_x.grad[:7] if comm.rank() == 0 else plain_x.grad[7:])

    run_ranks(2, work)


def test_grad_placements_place_the_gradient_of_the_local_tensor() -> None:
    def work() -> None:
        mesh = sw.Mesh((2,))
        local = torch.ones(2, 2, requires_grad=True)
        x = sw.DTensor.from_local(local, mesh, [sw.Replicate()], grad_placements=[sw.Partial()])
        (x * 3).sum().backward()
        total = comm.all_reduce(local.grad)
        assert torch.equal(total, torch.full((2, 2), 3.0))

    run_ranks(2, work)


def test_gathering_sizes_inside_a_captured_program_raises() -> None:
    def work() -> None:
        def step(local: Any) -> Any:
            return sw.DTensor.from_local(local, sw.Mesh((2,)), [sw.Shard(0)]).sum()

        with pytest.raises(CaptureError, match="pass shape=, or run_check=False"):
            sw.compile(step)(torch.ones(2))

    run_ranks(2, work)


def test_device_mesh_returns_the_given_mesh_and_its_groups_are_used() -> None:
    def work() -> None:
        from torch.distributed.device_mesh import init_device_mesh  # torch's own, created without this library

        comm.forget()
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        x = sw.DTensor.from_local(torch.ones(2, 2), mesh, [sw.Partial()])
        assert x.redistribute(placements=[sw.Replicate()]).device_mesh is mesh
        assert (x + x).device_mesh is mesh
        assert comm.group_along(x.sharding.mesh, 0).process_group is mesh.get_group(0)
        comm.forget()
        assert sw.zeros(4, mesh=mesh, placements=[sw.Shard(0)]).device_mesh is mesh
        comm.forget()
        assert sw.distribute_tensor(torch.ones(2), mesh).device_mesh is mesh
        again = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        assert sw.zeros(4, mesh=again).device_mesh is again
        assert sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)) is comm.device_mesh_of(sw.Mesh((2,), ("tp",)))

    run_ranks(2, work)
