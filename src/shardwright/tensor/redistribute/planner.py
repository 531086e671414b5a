"""Plan the steps between two layouts. Pure: needs no process group or communication, and works for any rank.

Partial values that end up sharded are reduce-scattered first, which leaves less to transfer. Then one step transfers
regions, including those of partial values still to be reduced. Then the rest is all-reduced. Last, values become
partial where the target is `Partial`.

| per mesh dimension | step |
|---|---|
| R → S | slice |
| S → R | all-gather (several mesh dimensions in one) |
| S(i) → S(j) | all-to-all |
| P → S | reduce-scatter |
| P → R | all-reduce |
| P(avg) ↔ P(sum) | scale |
| R → P, S → P | to partial |
| P(a) → P(b) | reduce-scatter, to partial |
| everything else: other meshes, other nesting, Ragged to Shard | exchange of exactly the missing regions |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from shardwright.errors import LayoutError
from shardwright.layout import Layout, Partial, Placement, Ragged, Replicate, Shard
from shardwright.tensor.redistribute.partial import commute, kept_partials, partial_ops, scale_factor
from shardwright.tensor.redistribute.plan import Plan
from shardwright.tensor.redistribute.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    ReduceScatter,
    Scale,
    Slice,
    Step,
    ToPartial,
)

__all__ = ["plan"]

BUFFER = 64 << 20


@lru_cache(maxsize=4096)
def plan(source: Layout, target: Layout, itemsize: int, buffer: int = BUFFER) -> Plan:
    """Return the steps from `source` to `target`, with their bytes, memory and time, for elements of `itemsize` bytes.

    Each rank receives exactly the bytes of its target region that it does not hold; if a `Partial` is reduced, those of
    a reduce-scatter, plus an all-gather if the result is replicated. A placement that is neither sharded nor partial
    counts as replicated. `buffer` bounds the bytes packed for sending, and those received, in one round.

    >>> from shardwright.layout import Mesh
    >>> rows = Layout(Mesh((4,), ("dp",)), [Shard(0)], (64, 128))
    >>> [str(step) for step in plan(rows, rows.replace(placements=[Replicate()]), itemsize=4).steps]
    ['all-gather over dp']
    >>> plan(rows, rows.replace(shape=(8, 8)), itemsize=4)
    Traceback (most recent call last):
    shardwright.errors.LayoutError: cannot redistribute [64, 128] (dp: S(0)) to [8, 8] (dp: S(0)): the shapes ...
    """
    if source.shape != target.shape:
        raise LayoutError(
            f"cannot redistribute {source} to {target}: the shapes {source.shape} and {target.shape} differ, "
            "and redistribution keeps the shape; reshape the tensor first"
        )
    if itemsize < 1 or buffer < 1:
        raise LayoutError(f"itemsize and buffer must be at least 1 byte, got itemsize={itemsize}, buffer={buffer}")
    return Plan(source, target, itemsize, buffer, _steps(_plain(source), _plain(_on_mesh_of(target, source))))


def _steps(source: Layout, target: Layout) -> tuple[Step, ...]:
    if source is target:
        return ()
    kept = kept_partials(source, target) if source.mesh is target.mesh else frozenset()
    steps: list[Step] = []
    now, late = _reduce(source, target, kept, steps)
    goal = _before_partials(now, target, kept | late)
    steps += _transfer(now, goal)
    steps += _reduce_late(goal, late)
    now = steps[-1].after if late else goal
    factor = scale_factor(source, target, kept)
    if factor != 1:
        scaled = _changed(now, {m: target.placements[m] for m in kept})
        steps.append(Scale(now, scaled, factor))
        now = scaled
    # Outermost reduction first: an inner identity element replaces the outer one.
    for mesh_dim, op in partial_ops(target).items():
        if mesh_dim not in kept:
            partial = _changed(now, {mesh_dim: Partial(op)})
            steps.append(ToPartial(now, partial, mesh_dim, op))
            now = partial
    return tuple(steps)


def _reduce(source: Layout, target: Layout, kept: frozenset[int], steps: list[Step]) -> tuple[Layout, frozenset[int]]:
    """Append the early reductions to `steps`; return the layout after them and the mesh dimensions left to reduce."""
    ops = {m: op for m, op in partial_ops(source).items() if m not in kept}
    same = source.mesh is target.mesh
    scatter_dims = {m: _scatter_dim(source, target, m) if same else _longest(source) for m in ops}
    order = sorted(ops, key=lambda m: target.order.index(m) if same else m)
    late = frozenset(m for m in ops if scatter_dims[m] is None and same)
    if not all(commute(ops[a], ops[b]) for a in ops for b in ops):
        order, late = sorted(ops, reverse=True), frozenset()  # innermost first
    now = source
    for m in order:
        dim = scatter_dims[m]
        if m in late:
            continue
        if dim is None:
            after = _changed(now, {m: Replicate()})
            steps.append(AllReduce(now, after, (m,), ops[m]))
        else:
            wanted = target.placements[m] if same else None
            placement = wanted if isinstance(wanted, Ragged) and not now.cut_by(dim) else Shard(dim)
            after = _changed(now, {m: placement}, {dim: (*now.cut_by(dim), m)})
            steps.append(ReduceScatter(now, after, m, ops[m]))
        now = after
    return now, late


def _scatter_dim(source: Layout, target: Layout, mesh_dim: int) -> int | None:
    """Return the tensor dimension along which a reduction is scattered; None if every rank needs the full result."""
    wanted = target.placements[mesh_dim]
    if isinstance(wanted, Shard | Ragged):
        return wanted.dim
    return _longest(source) if isinstance(wanted, Partial) else None


def _longest(layout: Layout) -> int | None:
    """Return the tensor dimension that is longest on the first rank, which balances best; None for a scalar."""
    sizes = layout.local_shape(layout.mesh.ranks[0])
    return int(np.argmax(sizes)) if sizes else None


def _reduce_late(goal: Layout, late: frozenset[int]) -> list[Step]:
    """Return the all-reduces after the transfer, one for all mesh dimensions with the same reduction."""
    steps: list[Step] = []
    ops = partial_ops(goal)
    for op in sorted({ops[m] for m in late}):
        mesh_dims = tuple(sorted(m for m in late if ops[m] == op))
        after = _changed(goal, dict.fromkeys(mesh_dims, Replicate()))
        steps.append(AllReduce(goal, after, mesh_dims, op))
        goal = after
    return steps


def _before_partials(now: Layout, target: Layout, untouched: frozenset[int]) -> Layout:
    """Return the target with its new `Partial` placements as input of `ToPartial`: sharded if so now, else replicated.

    On another mesh they are sharded, so that nothing is sent only to be replaced by the identity element.
    """
    same = now.mesh is target.mesh
    changes: dict[int, Placement] = {m: now.placements[m] for m in untouched}
    nesting: dict[int, tuple[int, ...]] = {}
    # ToPartial pads the outermost mesh dimension first, so that one must shard last.
    for m in sorted(partial_ops(target).keys() - untouched, reverse=True):
        has = now.placements[m] if same else Replicate()
        dim = has.dim if isinstance(has, Shard | Ragged) else None if same else _longest(target)
        if dim is None:
            changes[m] = Replicate()
            continue
        before = nesting.get(dim, target.cut_by(dim))
        changes[m] = has if isinstance(has, Ragged) and not before else Shard(dim)
        nesting[dim] = (*before, m)
    return _changed(target, changes, nesting)


def _transfer(now: Layout, goal: Layout) -> list[Step]:
    """Return the steps that transfer regions: at most a slice and one collective."""
    if now.mesh is not goal.mesh:
        return _exchange(now, goal)
    sharded_now, sharded_goal = _sharding(now), _sharding(goal)
    if sharded_now == sharded_goal:
        return []
    sliced: set[int] = set()
    gathered: set[int] = set()
    for dim, (has, wants) in enumerate(zip(sharded_now, sharded_goal, strict=True)):
        both = min(len(has), len(wants))
        if has[:both] != wants[:both]:
            return _exchange(now, goal)  # other shard sizes or another nesting order
        sliced.update(m for m, _ in sharded_goal[dim][both:])
        gathered.update(m for m, _ in sharded_now[dim][both:])
    if not sliced & gathered:
        return _slice_and_gather(now, goal, sliced, gathered)
    if sliced == gathered and len(sliced) == 1:
        return [AllToAll(now, goal, sliced.pop())]
    return _exchange(now, goal)


def _slice_and_gather(now: Layout, goal: Layout, sliced: set[int], gathered: set[int]) -> list[Step]:
    steps: list[Step] = []
    if sliced:
        # A tensor dimension is either sliced further or gathered, so sliced ones already have the goal's order.
        nesting = {dim: goal.cut_by(dim) for dim in range(now.ndim) if len(goal.cut_by(dim)) > len(now.cut_by(dim))}
        part = goal if not gathered else _changed(now, {m: goal.placements[m] for m in sliced}, nesting)
        steps.append(Slice(now, part))
        now = part
    if gathered:
        steps.append(AllGather(now, goal, tuple(sorted(gathered))))
    return steps


def _exchange(now: Layout, goal: Layout) -> list[Step]:
    """Return an exchange; a slice, or nothing, if every rank already holds its target region."""
    have, want = now.table(), goal.table()
    row_of = {rank: row for row, rank in enumerate(have.ranks.tolist())}
    rows = np.array([row_of.get(rank, -1) for rank in want.ranks.tolist()])
    empty = (want.sizes == 0).any(axis=1)
    if not (empty | (rows >= 0)).all():
        return [Exchange(now, goal)]
    offsets, sizes = have.offsets[rows], have.sizes[rows]
    inside = (offsets <= want.offsets) & (want.offsets + want.sizes <= offsets + sizes)
    if not (empty | inside.all(axis=1)).all():
        return [Exchange(now, goal)]
    unchanged = now.mesh.size == goal.mesh.size and (rows >= 0).all()
    if unchanged and (offsets == want.offsets).all() and (sizes == want.sizes).all():
        return []
    return [Slice(now, goal)]


def _sharding(layout: Layout) -> list[tuple[tuple[int, Placement], ...]]:
    """Return the mesh dimensions and placements that shard each tensor dimension, outermost first."""
    return [tuple((m, layout.placements[m]) for m in layout.cut_by(dim)) for dim in range(layout.ndim)]


def _changed(
    layout: Layout, changes: Mapping[int, Placement], nesting: Mapping[int, Sequence[int]] | None = None
) -> Layout:
    """Return the layout with other placements in some mesh dimensions, and other nestings in some tensor dimensions."""
    if not changes:
        return layout
    placements = [changes.get(m, placement) for m, placement in enumerate(layout.placements)]
    order: list[int] = []
    for dim in range(layout.ndim):
        given = nesting.get(dim) if nesting else None
        order += layout.cut_by(dim) if given is None else given
    order = [m for m in order if isinstance(placements[m], Shard | Ragged)]
    order += [m for m in range(layout.mesh.ndim) if m not in order]
    return Layout(layout.mesh, placements, layout.shape, order)


def _plain(layout: Layout) -> Layout:
    """Return the same regions, with size-1 mesh dimensions normalised to Replicate."""
    changes: dict[int, Placement] = {
        m: Replicate()
        for m, (ranks, placement) in enumerate(zip(layout.mesh.shape, layout.placements, strict=True))
        if ranks == 1 and isinstance(placement, Shard | Ragged | Partial)
    }
    return _changed(layout, changes)


def _on_mesh_of(layout: Layout, other: Layout) -> Layout:
    """Return the layout on the other's mesh if the meshes differ only in dimension names."""
    mesh = other.mesh
    if layout.mesh is mesh or layout.mesh.shape != mesh.shape or layout.mesh.ranks != mesh.ranks:
        return layout
    return Layout(mesh, layout.placements, layout.shape, layout.order)
