"""Plans: the collective for each pattern, bytes and memory, printing, and bounded caches."""

from __future__ import annotations

import gc

import pytest
import torch

from shardwright.comm.rounds import split_region
from shardwright.errors import ArgumentTypeError, LayoutError
from shardwright.layout import Layout, Mesh, Partial, Placement, Ragged, Region, Replicate, Shard
from shardwright.tensor.redistribute import Plan, execute, plan
from shardwright.tensor.redistribute import schedule as schedule_module
from shardwright.tensor.redistribute.identity import identity_element
from shardwright.tensor.redistribute.schedule import schedule

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
SHAPE = (8, 12)


def plan_between(mesh: Mesh, source: list[Placement], target: list[Placement], shape: tuple[int, ...] = SHAPE) -> Plan:
    return plan(Layout(mesh, source, shape), Layout(mesh, target, shape), 4)


def kinds(steps: Plan) -> list[str]:
    return [step.kind for step in steps.steps]


ONE, TWO = Mesh((4,)), Mesh((2, 2))


@pytest.mark.parametrize(
    ("mesh", "source", "target", "expected"),
    [
        (ONE, [S0], [S0], []),
        (ONE, [R], [S0], ["slice"]),
        (ONE, [S0], [R], ["all-gather"]),
        (ONE, [S0], [S1], ["all-to-all"]),
        (ONE, [P], [S1], ["reduce-scatter"]),
        (ONE, [P], [R], ["all-reduce"]),
        (ONE, [P], [Ragged(0, (1, 0, 5, 2))], ["reduce-scatter"]),
        (ONE, [Partial("avg")], [P], ["scale"]),
        (ONE, [R], [P], ["to partial"]),
        (ONE, [S0], [P], ["to partial"]),
        (ONE, [Partial("max")], [P], ["reduce-scatter", "to partial"]),
        (ONE, [Ragged(0, (1, 0, 5, 2))], [R], ["all-gather"]),
        (ONE, [Ragged(0, (1, 0, 5, 2))], [S0], ["exchange"]),
        (TWO, [S0, S0], [R, R], ["all-gather"]),
        (TWO, [S0, S1], [R, R], ["all-gather"]),
        (TWO, [P, P], [R, R], ["all-reduce"]),
        (TWO, [P, P], [S0, S0], ["reduce-scatter", "reduce-scatter"]),
        (TWO, [P, P], [S0, R], ["reduce-scatter", "all-reduce"]),
        (TWO, [P, S0], [P, R], ["all-gather"]),
        (TWO, [S0, R], [R, S1], ["slice", "all-gather"]),
        (TWO, [P, S0], [R, S1], ["all-to-all", "all-reduce"]),
        (TWO, [S0, R], [R, S0], ["exchange"]),
        (TWO, [S0, S1], [S1, S0], ["exchange"]),
        (Mesh((1, 4)), [P, S0], [S1, S0], []),
    ],
    ids=str,
)
def test_plan_uses_the_collective_of_each_pattern(
    mesh: Mesh, source: list[Placement], target: list[Placement], expected: list[str]
) -> None:
    assert kinds(plan_between(mesh, source, target)) == expected


@pytest.mark.parametrize("ranks", [2, 4, 5])
def test_reduction_receives_the_bytes_of_a_reduce_scatter(ranks: int) -> None:
    mesh, shape = Mesh((ranks,)), (11, 3)
    rows = [len(piece) for piece in torch.arange(11).chunk(ranks)] + [0] * ranks
    flat = [len(piece) for piece in torch.arange(33).chunk(ranks)] + [0] * ranks
    for rank in range(ranks):
        assert plan_between(mesh, [P], [S0], shape).received_bytes(rank) == 4 * (ranks - 1) * rows[rank] * 3
        assert plan_between(mesh, [P], [R], shape).received_bytes(rank) == 4 * ((ranks - 2) * flat[rank] + 33)


def test_reduction_over_two_mesh_dimensions_costs_one_all_reduce() -> None:
    assert plan_between(TWO, [P, P], [R, R]).received_bytes(0) == 2 * 3 * (8 * 12 * 4) // 4


@pytest.mark.parametrize("order", [None, ("tp", "dp")], ids=str)
@pytest.mark.parametrize("shape", [(1024, 8192), (8192, 8192), (28672, 8192), (128256, 8192)], ids=str)
def test_reduction_into_nested_shards_is_one_reduce_scatter_and_at_most_two_messages_per_rank(
    shape: tuple[int, int], order: tuple[str, str] | None
) -> None:
    mesh = Mesh((64, 8), ("dp", "tp"))
    gradient, sharded = (Layout(mesh, placements, shape, order) for placements in ([P, S0], [S0, S0]))
    first, *rest = plan(gradient, sharded, 4).steps
    assert first.kind == "reduce-scatter"
    assert [step.kind for step in rest] == ([] if order else ["exchange"])
    most = 1 if shape[0] % 512 == 0 else 2  # unaligned shards overlap two ranks
    for step in rest:
        for rank in (0, 1, 7, 100, 511):
            messages = schedule(step.before, step.after, rank)
            assert len(messages.sends) <= most
            assert len(messages.receives) <= most


@pytest.mark.parametrize("order", [None, ("dp", "tp")], ids=str)
def test_partial_over_tp_to_rows_sharded_over_dp_and_tp_is_one_reduce_scatter(
    order: tuple[str, str] | None,
) -> None:
    mesh = Mesh((64, 8), ("dp", "tp"))
    partial, rows = (Layout(mesh, placements, (65536, 8192), order) for placements in ([S0, P], [S0, S0]))
    assert kinds(plan(partial, rows, 2)) == ["reduce-scatter"]


def test_meshes_that_differ_only_in_names_are_treated_as_the_same() -> None:
    source = Layout(Mesh((4,)), [S0], SHAPE)
    assert kinds(plan(source, Layout(Mesh((4,), ("dp",)), [R], SHAPE), 4)) == ["all-gather"]


def test_same_regions_on_a_mesh_of_another_shape_need_no_step() -> None:
    assert kinds(plan(Layout(ONE, [S0], SHAPE), Layout(TWO, [S0, S0], SHAPE), 4)) == []


def test_replicas_send_equally_many_messages() -> None:
    source = Layout(Mesh((4,)), [R], SHAPE)
    target = Layout(Mesh((8,), None, range(4, 12)), [S0], SHAPE)
    assert [len(schedule(source, target, rank).sends) for rank in range(4)] == [2, 2, 2, 2]


def test_str_of_a_plan_shows_steps_bytes_memory_and_time() -> None:
    mesh = Mesh((2, 4), ("dp", "tp"))
    source = Layout(mesh, [P, S0], (1024, 512))
    assert str(plan(source, source.replace(placements=[S0, S1]), 4)) == (
        "[1024, 512] (dp: P(sum), tp: S(0)) → [1024, 512] (dp: S(0), tp: S(1)), 4 bytes per element\n"
        "step                             becomes                     received    time\n"
        "1  reduce-scatter(sum) over dp   (dp: S(0)@1, tp: S(0)@0)   256.0 KiB   46 µs\n"
        "2  exchange                      (dp: S(0), tp: S(1))       256.0 KiB   46 µs\n"
        "per rank at most: 512.0 KiB received, 1.0 MiB of extra memory; about 92 µs"
    )
    assert str(plan(source, source, 4)).endswith("\nnothing to do")


def test_plan_for_many_ranks_examines_few_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = Mesh((8, 16, 8))
    source = Layout(mesh, [S0, R, S1], (4096, 4096))
    target = Layout(Mesh((1024,)), [S1], (4096, 4096))
    examined: list[int] = []

    def counting(layout: Layout, rank: int) -> Region | None:
        examined.append(rank)
        return held(layout, rank)

    held = schedule_module.held
    monkeypatch.setattr(schedule_module, "held", counting)
    steps = plan(source, target, 4)
    assert kinds(steps) == ["exchange"]
    assert not examined
    assert steps.received_bytes(77) == 4 * (4096 * 4 - 512 * 4 * (77 % 8 == 0))
    assert steps.sent_bytes(77) > 0
    # A rank examines only its receivers, never pairs of other ranks.
    assert len(examined) < 4 * 1024
    assert len(str(steps).splitlines()) == 4


def test_caches_are_bounded_for_many_shapes() -> None:
    mesh = Mesh((4,))
    for rows in range(10_000):
        steps = plan(Layout(mesh, [S0], (rows, 2)), Layout(mesh, [Ragged(0, (rows, 0, 0, 0))], (rows, 2)), 4)
        assert steps.sent_bytes(1) + steps.peak_bytes(1) >= 0
    gc.collect()
    alive = [type(value) for value in gc.get_objects()]
    assert alive.count(Plan) <= 4096 + 100
    assert alive.count(Layout) <= 4 * 4096


def test_plans_are_cached() -> None:
    assert plan_between(ONE, [S0], [R]) is plan_between(ONE, [S0], [R])


@pytest.mark.parametrize("count", [1, 2, 3, 7, 100])
def test_split_region_tiles_the_box_with_parts_within_their_share(count: int) -> None:
    box = Region((3, 1, 2), (4, 3, 5))
    parts = split_region(box, count)
    assert box.covers(parts)
    assert max(part.volume for part in parts) <= max(1, 60 // count)


def test_different_shapes_raise() -> None:
    with pytest.raises(LayoutError, match=r"the shapes \(8, 12\) and \(8, 13\) differ.*reshape the tensor first"):
        plan(Layout(ONE, [S0], (8, 12)), Layout(ONE, [S0], (8, 13)), 4)


def test_local_tensor_of_another_shape_or_itemsize_raises() -> None:
    layout = Layout(Mesh((1,)), [S0], (4,))
    steps = plan(layout, layout.replace(placements=[R]), 4)
    with pytest.raises(LayoutError, match=r"rank 0 has shape \(3,\), but \[4\] \(0: S\(0\)\) gives it \(4,\)"):
        execute(steps, torch.ones(3))
    with pytest.raises(ArgumentTypeError, match=r"torch.float64, 8 bytes per element.*plan with itemsize=8"):
        execute(steps, torch.ones(4, dtype=torch.float64))


def test_execute_returns_the_input_if_nothing_changes() -> None:
    layout = Layout(Mesh((1,)), [P], (4,))
    local = torch.ones(4)
    assert execute(plan(layout, layout.replace(placements=[S0]), 4), local) is local


@pytest.mark.parametrize(
    ("dtype", "op", "expected"),
    [
        (torch.float8_e4m3fn, "max", -448.0),
        (torch.bfloat16, "min", float("inf")),
        (torch.int16, "min", 32767),
        (torch.uint16, "band", 65535),
        (torch.int16, "band", -1),
        (torch.bool, "product", True),
        (torch.bool, "sum", False),
        (torch.complex64, "product", 1),
    ],
)
def test_identity_element_of_each_dtype_and_reduction(dtype: torch.dtype, op: str, expected: float) -> None:
    assert identity_element(dtype, op) == expected
    torch.full((2,), identity_element(dtype, op), dtype=dtype)


def test_dtype_without_an_identity_element_raises() -> None:
    with pytest.raises(ArgumentTypeError, match="float8_e8m0fnu has no identity element for 'sum'"):
        identity_element(torch.float8_e8m0fnu, "sum")
