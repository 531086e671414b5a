"""Redistribution equals gathering everything and splitting it again, and receives no unnecessary byte.

The reference is plain torch on global tensors: `torch.chunk` and `torch.split`, never `Layout.region`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import combinations, product
from math import prod
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardwright import comm
from shardwright.layout import Layout, Mesh, Partial, Placement, Ragged, Replicate, Shard
from shardwright.tensor.redistribute import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    ReduceScatter,
    Scale,
    Slice,
    Step,
    ToPartial,
    execute,
    local_shape,
    plan,
    start,
)
from shardwright.tensor.redistribute.schedule import schedule
from shardwright.testing import run_ranks
from shardwright.testing.strategies import layouts, meshes, shapes

REDUCE: dict[str, Callable[[Tensor, int], Tensor]] = {
    "sum": lambda x, dim: x.sum(dim),
    "avg": lambda x, dim: x.mean(dim),
    "max": lambda x, dim: x.amax(dim),
    "min": lambda x, dim: x.amin(dim),
}


def split(whole: Tensor, layout: Layout, coordinate: tuple[int, ...]) -> Tensor:
    for mesh_dim in layout.order:
        placement, here = layout.placements[mesh_dim], coordinate[mesh_dim]
        if isinstance(placement, Ragged):
            whole = torch.split(whole, placement.sizes, placement.dim)[here]
        elif isinstance(placement, Shard):
            pieces = torch.chunk(whole, layout.mesh.shape[mesh_dim], placement.dim)
            empty = whole.narrow(placement.dim, 0, 0)
            whole = pieces[here] if here < len(pieces) else empty
    return whole


def partial_dims(layout: Layout) -> list[int]:
    return [m for m, placement in enumerate(layout.placements) if isinstance(placement, Partial)]


def reduce(partials: Tensor, layout: Layout) -> Tensor:
    """Reduce partial values stacked along one leading dimension per partial mesh dimension, the last one first."""
    for number, mesh_dim in reversed(list(enumerate(partial_dims(layout)))):
        partials = REDUCE[layout.placements[mesh_dim].op](partials, number)  # type: ignore[attr-defined]  # a Partial
    return partials


def partial_values_of(layout: Layout, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    shape = (*(layout.mesh.shape[m] for m in partial_dims(layout)), *layout.shape)
    numbers = torch.randint(-60, 60, shape, generator=torch.Generator().manual_seed(seed))
    return numbers.to(dtype)


def local_of(partials: Tensor, layout: Layout, rank: int) -> Tensor:
    if rank not in layout.mesh:
        return partials.new_empty((0,) * max(1, layout.ndim))
    coordinate = layout.mesh.coordinate(rank)
    return split(partials[tuple(coordinate[m] for m in partial_dims(layout))], layout, coordinate)


def assert_holds(value: Tensor, layout: Layout, locals_: dict[int, Tensor]) -> None:
    """Check that the local tensors of all ranks are their parts of the value, or reduce to them."""
    partial = partial_dims(layout)
    sizes = [layout.mesh.shape[m] for m in partial]
    for rank, local in locals_.items():
        if rank not in layout.mesh:
            assert local.shape == (0,) * max(1, layout.ndim)
            continue
        coordinate = list(layout.mesh.coordinate(rank))
        expected = split(value, layout, tuple(coordinate))
        assert local.shape == expected.shape, (rank, local.shape, expected.shape)
        stack = []
        for index in product(*map(range, sizes)):
            for mesh_dim, here in zip(partial, index, strict=True):
                coordinate[mesh_dim] = here
            stack.append(locals_[layout.mesh.rank_at(coordinate)])
        stacked = torch.stack(stack).view((*sizes, *expected.shape))
        torch.testing.assert_close(reduce(stacked, layout), expected, rtol=1e-12, atol=1e-9)


def elements(layout: Layout, rank: int) -> set[int]:
    """Return the flat indices of the elements that a rank holds."""
    if rank not in layout.mesh:
        return set()
    numbers = torch.arange(prod(layout.shape)).view(layout.shape)
    return set(split(numbers, layout, layout.mesh.coordinate(rank)).reshape(-1).tolist())


def reduces_nothing(source: Layout, target: Layout) -> bool:
    """Return whether the redistribution neither reduces partial values nor creates any."""
    ops = [
        {m: p.op for m, p in enumerate(layout.placements) if isinstance(p, Partial) and layout.mesh.shape[m] > 1}
        for layout in (source, target)
    ]
    same_mesh = source.mesh.shape == target.mesh.shape and source.mesh.ranks == target.mesh.ranks
    return ops[0] == ops[1] and (same_mesh or not ops[0])


# A simulator: run every step for all ranks in one process.


def simulate(steps: tuple[Step, ...], locals_: dict[int, Tensor]) -> dict[int, Tensor]:
    for step in steps:
        locals_ = {rank: run_step(step, locals_, rank) for rank in locals_}
    return locals_


def run_step(step: Step, locals_: dict[int, Tensor], rank: int) -> Tensor:
    local = locals_[rank]
    if rank not in step.before.mesh and rank not in step.after.mesh:
        return local
    out = torch.full(local_shape(step.after, rank), float("nan"), dtype=local.dtype)
    if rank not in step.after.mesh:
        return out
    mine = step.after.region(rank)
    match step:
        case Slice():
            return out if mine.is_empty else local[mine.slices(step.before.region(rank))]
        case Scale():
            return local * float(step.factor)
        case ToPartial():
            return to_partial(step, local, rank)
        case AllGather():
            for peer in peers(step.before.mesh, step.mesh_dims, rank):
                theirs = step.before.region(peer)
                if not theirs.is_empty:
                    out[theirs.slices(mine)] = locals_[peer]
            return out
        case ReduceScatter() | AllReduce():
            mesh_dims = (step.mesh_dim,) if isinstance(step, ReduceScatter) else step.mesh_dims
            everyone = torch.stack([locals_[peer] for peer in peers(step.before.mesh, mesh_dims, rank)])
            total = REDUCE[step.op](everyone, 0)
            return out if mine.is_empty else total[mine.slices(step.before.region(rank))]
        case AllToAll() | Exchange():
            return deliver(step, locals_, rank, out)
    raise AssertionError(step)


def deliver(step: Step, locals_: dict[int, Tensor], rank: int, out: Tensor) -> Tensor:
    part = schedule(step.before, step.after, rank)
    mine = step.after.region(rank)
    if part.kept is not None:
        out[part.kept.slices(mine)] = locals_[rank][part.kept.slices(step.before.region(rank))]
    for message in part.receives:
        # Both ends compute the same message without communication.
        [sent] = [m for m in schedule(step.before, step.after, message.peer).sends if m.peer == rank]
        assert sent.boxes == message.boxes
        for box in message.boxes:
            out[box.slices(mine)] = locals_[message.peer][box.slices(step.before.region(message.peer))]
    for message in part.sends:
        assert rank in [m.peer for m in schedule(step.before, step.after, message.peer).receives]
    return out


def to_partial(step: ToPartial, local: Tensor, rank: int) -> Tensor:
    ranks = step.before.mesh.shape[step.mesh_dim]
    identity = {"sum": 0.0, "avg": 0.0, "max": float("-inf"), "min": float("inf")}[step.op]
    if isinstance(step.before.placements[step.mesh_dim], Shard | Ragged):
        out = torch.full(step.after.local_shape(rank), identity, dtype=local.dtype)
        part = step.before.region(rank)
        if not part.is_empty:
            out[part.slices(step.after.region(rank))] = local * ranks if step.op == "avg" else local
        return out
    if step.op != "sum" or step.before.mesh.coordinate(rank)[step.mesh_dim] == 0:
        return local
    return torch.full_like(local, identity)


def peers(mesh: Mesh, mesh_dims: tuple[int, ...], rank: int) -> Iterator[int]:
    here = mesh.coordinate(rank)
    for there in product(*map(range, mesh.shape)):
        if all(m in mesh_dims or a == b for m, (a, b) in enumerate(zip(here, there, strict=True))):
            yield mesh.rank_at(there)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Layout, Layout]:
    shape = draw(shapes(max_dims=3, max_side=9).filter(lambda shape: prod(shape) < 500))
    mesh = draw(meshes(max_size=12))
    source = draw(layouts(st.just(shape), st.just(mesh)))
    other = draw(st.just(mesh) | meshes(size=mesh.size) | meshes(max_size=12))
    if draw(st.booleans()) and other is not mesh:
        shift = draw(st.integers(1, 6))
        other = Mesh(other.shape, other.names, [rank + shift for rank in other.ranks])
    return source, draw(layouts(st.just(shape), st.just(other)))


@given(pairs(), st.integers(1, 64))
def test_simulated_steps_equal_gather_then_split(pair: tuple[Layout, Layout], buffer: int) -> None:
    source, target = pair
    steps = plan(source, target, 8, buffer)
    partials = partial_values_of(source, seed=7)
    locals_ = {rank: local_of(partials, source, rank) for rank in steps.ranks}
    assert_holds(reduce(partials, source), target, simulate(steps.steps, locals_))


@given(pairs())
def test_ranks_receive_exactly_the_elements_they_lack(pair: tuple[Layout, Layout]) -> None:
    source, target = pair
    steps = plan(source, target, 8)
    for rank in steps.ranks:
        lacking = 8 * len(elements(target, rank) - elements(source, rank))
        if reduces_nothing(source, target):
            assert steps.received_bytes(rank) == lacking
        elif not any(isinstance(step, ReduceScatter | AllReduce) for step in steps.steps):
            assert steps.received_bytes(rank) <= lacking
    assert sum(map(steps.received_bytes, steps.ranks)) == sum(map(steps.sent_bytes, steps.ranks))


@given(pairs(), st.integers(1, 64))
def test_peak_memory_is_bounded_by_the_larger_shard_and_two_buffers(pair: tuple[Layout, Layout], buffer: int) -> None:
    source, target = pair
    steps = plan(source, target, 8, buffer)
    for rank in steps.ranks:
        largest = 8 * max(len(elements(source, rank)), len(elements(target, rank)))
        # Only reducing or creating partial values needs a tensor between two steps.
        between = 0
        if not reduces_nothing(source, target):
            between = 8 * max((len(elements(step.after, rank)) for step in steps.steps[:-1]), default=0)
        assert steps.peak_bytes(rank) <= largest + between + 2 * (buffer + 8)


# Real ranks.


class Case(NamedTuple):
    source: Layout
    target: Layout
    buffer: int
    dtype: torch.dtype
    seed: int


MESHES = [
    *(
        Mesh((4,)),
        Mesh((2, 2)),
        Mesh((2, 2), ("dp", "tp")),
        Mesh((1, 4)),
        Mesh((2, 1, 2)),
        Mesh((4,), None, (2, 0, 3, 1)),
    ),
    *(Mesh((2, 2), None, (3, 1, 0, 2)), Mesh((2,), None, (0, 1)), Mesh((2,), None, (2, 3)), Mesh((2,), None, (3, 0))),
    *(Mesh((3,), None, (0, 2, 3)), Mesh((1,), None, (2,))),
]
COPIED = [
    *(torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64),
    *(torch.complex128, torch.bool, torch.uint8, torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.int64),
]


def random_layout(rng: random.Random, mesh: Mesh, shape: tuple[int, ...], partial: bool) -> Layout:
    placements: list[Placement] = []
    cut: set[int] = set()
    for ranks in mesh.shape:
        kind = rng.choice(["shard", "shard", "ragged", "replicate"] + ["partial"] * 2 * partial)
        dim = rng.randrange(len(shape)) if shape else 0
        if kind == "partial":
            placements.append(Partial(rng.choice(["sum", "sum", "avg", "max", "min"])))
        elif not shape or kind == "replicate":
            placements.append(Replicate())
        elif kind == "ragged" and dim not in cut:
            marks = sorted(rng.randint(0, shape[dim]) for _ in range(ranks - 1))
            placements.append(Ragged(dim, [b - a for a, b in zip([0, *marks], [*marks, shape[dim]], strict=True)]))
        else:
            placements.append(Shard(dim))
        if placements[-1].is_shard():
            cut.add(dim)
    ragged = any(isinstance(placement, Ragged) for placement in placements)
    order = None if ragged else rng.sample(range(mesh.ndim), mesh.ndim)
    return Layout(mesh, placements, shape, order)


def random_cases(seed: int, count: int, dtypes: list[torch.dtype], partial: bool) -> list[Case]:
    rng = random.Random(seed)
    cases = []
    for number in range(count):
        shape = tuple(rng.choice([0, 1, 2, 3, 4, 5, 8, 9]) for _ in range(rng.choice([0, 1, 2, 2, 3])))
        mesh = rng.choice(MESHES)
        other = rng.choice([mesh, rng.choice(MESHES)])
        source, target = (random_layout(rng, m, shape, partial) for m in (mesh, other))
        cases.append(Case(source, target, rng.choice([1 << 26, 64, 24]), rng.choice(dtypes), seed + number))
    return cases


class PreparedGroups:
    """All groups of four ranks, created in advance: shows that a plan runs with any `Groups`."""

    def __init__(self) -> None:
        self.everyone = comm.world()
        self.rank = self.everyone.rank
        self.groups = {self.everyone.ranks: self.everyone}
        for ranks in [subset for count in (2, 3) for subset in combinations(range(4), count)]:
            process_group = dist.new_group(list(ranks))
            if self.rank in ranks:
                self.groups[ranks] = comm.Group.of(process_group)

    def group_along(self, mesh: Mesh, mesh_dim: int) -> comm.Group:
        return self.groups[tuple(sorted(mesh.peers(self.rank, mesh_dim)))]

    def group_of(self, ranks: tuple[int, ...]) -> comm.Group:
        return self.groups[ranks]


def raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def run_cases(cases: list[Case]) -> list[tuple[Tensor, int]]:
    """Return this rank's local tensor after each redistribution, and the bytes it received."""
    groups, results = PreparedGroups(), []
    rank = groups.rank
    for number, case in enumerate(cases):
        local = local_of(partial_values_of(case.source, case.seed, case.dtype), case.source, rank)
        before = local.clone()
        steps = plan(case.source, case.target, local.itemsize, case.buffer)
        with comm.count() as traffic:
            moved = execute(steps, local, groups) if number % 2 else start(steps, local, groups).wait()
        assert moved is local or moved.is_contiguous()
        assert moved is local or not moved.numel() or moved.untyped_storage()._cdata != local.untyped_storage()._cdata
        assert torch.equal(raw(local), raw(before))  # the input is not modified
        assert traffic.bytes == steps.received_bytes(rank), (case, traffic, str(steps))
        results.append((moved, traffic.bytes))
    return results


@pytest.mark.parametrize("seed", range(6))
def test_execution_on_ranks_equals_gather_then_split(seed: int) -> None:
    cases = random_cases(1000 * seed, 40, [torch.float64], partial=True)
    results = run_ranks(4, run_cases, cases)
    for number, case in enumerate(cases):
        value = reduce(partial_values_of(case.source, case.seed, case.dtype), case.source)
        locals_ = {rank: result[number][0] for rank, result in enumerate(results)}
        assert_holds(value, case.target, locals_)


def compare_bits(cases: list[Case]) -> None:
    """Compare on the rank itself: torch cannot pickle every dtype."""
    rank = comm.world().rank
    for case, (moved, received) in zip(cases, run_cases(cases), strict=True):
        expected = local_of(partial_values_of(case.source, case.seed, case.dtype), case.target, rank)
        assert moved.dtype == case.dtype
        assert moved.shape == expected.shape
        assert torch.equal(raw(moved), raw(expected))
        lacking = elements(case.target, rank) - elements(case.source, rank)
        assert received == case.dtype.itemsize * len(lacking)


@pytest.mark.parametrize("seed", range(2))
def test_every_dtype_is_transferred_bit_by_bit(seed: int) -> None:
    run_ranks(4, compare_bits, random_cases(77 + 1000 * seed, 40, COPIED, partial=False))


TWISTED = Layout(Mesh((2, 1, 2), None, (3, 1, 0, 2)), [Shard(0), Replicate(), Partial()], (6, 4))
TARGETS = [
    *((Replicate(), Shard(1), Partial()), (Shard(0), Replicate(), Replicate()), (Shard(1),) * 3),
    (Shard(0), Replicate(), Partial("avg")),
]


def default_groups() -> list[Tensor]:
    rank = comm.world().rank
    results: list[Tensor] = []
    for target in TARGETS:
        local = local_of(partial_values_of(TWISTED, 5), TWISTED, rank).t().contiguous().t()  # any strides are accepted
        results.append(execute(plan(TWISTED, TWISTED.replace(placements=target), 8), local))
        assert results[-1].is_contiguous()
    return results


def test_groups_are_created_from_the_world_by_default() -> None:
    results = run_ranks(4, default_groups)
    value = reduce(partial_values_of(TWISTED, 5), TWISTED)
    for number, target in enumerate(TARGETS):
        assert_holds(value, TWISTED.replace(placements=target), {rank: r[number] for rank, r in enumerate(results)})
