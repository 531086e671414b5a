"""How queries, keys and values are laid out for context-parallel attention."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from shardwright.layout import Layout, Mesh, Placement, Ragged, Replicate, Shard
from shardwright.parallel.plan.mesh_roles import CONTEXT
from shardwright.tensor.base.gradient_types import ENTERED

__all__ = ["AttentionLayouts", "attention_layouts", "context_dim"]

BATCH, HEADS, SEQUENCE = 0, 1, 2
_REPLICATE = Replicate()


@dataclass(frozen=True, slots=True)
class AttentionLayouts:
    """The layouts of query, key and value for this rank's computation, and what follows from them."""

    query: Layout
    key: Layout  # `Entered` where it is replicated and the query is not
    value: Layout
    out: Layout
    rows: tuple[Placement, ...]  # of a tensor with one value for each sample and position, at all positions
    query_positions: tuple[range, ...]  # of each rank along cp
    key_positions: tuple[range, ...]
    fewest_heads: int  # of queries, on any rank
    key_heads: tuple[int, ...] | None  # for each query head the local key head, if they do not form groups


def context_dim(mesh: Mesh) -> int | None:
    """Return the mesh dimension over which sequences are sharded; None if there is none of several ranks."""
    names = mesh.names or ()
    mesh_dim = names.index(CONTEXT) if CONTEXT in names else None
    return None if mesh_dim is None or mesh.shape[mesh_dim] == 1 else mesh_dim


@lru_cache(maxsize=256)
def attention_layouts(query: Layout, key: Layout, value: Layout, rank: int) -> AttentionLayouts | None:
    """Return the layouts for context-parallel attention; None if the queries are not sharded along the sequence.

    Over other mesh dimensions the query stays sharded over samples and heads, and keys and values follow it: their
    heads are replicated where the shards of the query would need others.
    """
    mesh = query.mesh
    over = context_dim(mesh)
    if over is None or not _shards(query.placements[over], SEQUENCE):
        return None
    if query.ndim != 4 or key.shape[:1] != query.shape[:1] or query.shape[1] % max(key.shape[1], 1):
        return None
    kept = [
        each if mesh_dim == over or _shards(each, BATCH) or _shards(each, HEADS) else _REPLICATE
        for mesh_dim, each in enumerate(query.placements)
    ]
    queries = query.replace(placements=kept, order=query.order)
    keys = _follow(queries, key, over, keep_heads=True)
    if not _has_needed_heads(queries, keys):
        keys = _follow(queries, key, over, keep_heads=False)
    values = Layout(mesh, keys.placements, value.shape, keys.order)
    own = queries.region(rank)
    return AttentionLayouts(
        queries,
        _entered(keys, queries),
        _entered(values, queries),
        Layout(mesh, queries.placements, (*query.shape[:3], value.shape[3]), queries.order),
        tuple(each if _shards(each, BATCH) else _REPLICATE for each in queries.placements),
        _positions(queries, over, rank),
        _positions(keys, over, rank),
        min(queries.region(each).size[HEADS] for each in mesh.ranks),
        _key_heads(
            range(own.offset[HEADS], own.offset[HEADS] + own.size[HEADS]),
            _heads(keys, rank),
            query.shape[1] // max(key.shape[1], 1),
        ),
    )


def _shards(placement: Placement, dim: int) -> bool:
    return isinstance(placement, Shard | Ragged) and placement.dim == dim


def _follow(queries: Layout, key: Layout, over: int, *, keep_heads: bool) -> Layout:
    """Return the layout of keys beside that of the queries."""
    placements: list[Placement] = []
    for mesh_dim, (wanted, own) in enumerate(zip(queries.placements, key.placements, strict=True)):
        if mesh_dim == over:
            same = key.shape[SEQUENCE] == queries.shape[SEQUENCE]
            placements.append(wanted if same else own if _shards(own, SEQUENCE) else Shard(SEQUENCE))
        elif _shards(wanted, BATCH):
            placements.append(wanted)
        else:
            placements.append(own if keep_heads and _shards(wanted, HEADS) and _shards(own, HEADS) else _REPLICATE)
    return Layout(queries.mesh, placements, key.shape, queries.order)


def _has_needed_heads(queries: Layout, keys: Layout) -> bool:
    """Return whether every rank has the key heads of its query heads."""
    group = queries.shape[HEADS] // max(keys.shape[HEADS], 1)
    for rank in queries.mesh.ranks:
        wanted, there = _heads(queries, rank), _heads(keys, rank)
        if wanted and not (there.start <= wanted.start // group and (wanted.stop - 1) // group < there.stop):
            return False
    return True


def _heads(layout: Layout, rank: int) -> range:
    region = layout.region(rank)
    return range(region.offset[HEADS], region.offset[HEADS] + region.size[HEADS])


def _key_heads(queries: range, keys: range, group: int) -> tuple[int, ...] | None:
    index = tuple(head // group - keys.start for head in queries)
    if keys and len(index) % len(keys) == 0:
        size = len(index) // len(keys)
        if index == tuple(place // size for place in range(len(index))):
            return None
    return index


def _entered(layout: Layout, queries: Layout) -> Layout:
    """Return the layout with `Entered` in place of `Replicate` where the queries differ between ranks."""
    placements = [
        ENTERED if own.is_replicate() and not wanted.is_replicate() else own
        for own, wanted in zip(layout.placements, queries.placements, strict=True)
    ]
    return layout.replace(placements=placements, order=layout.order)


def _positions(layout: Layout, over: int, rank: int) -> tuple[range, ...]:
    """Return the positions of each rank along cp, in the order of its group."""
    regions = [layout.region(peer) for peer in sorted(layout.mesh.peers(rank, over))]
    starts = [(region.offset[SEQUENCE], region.size[SEQUENCE]) for region in regions]
    return tuple(range(start, start + size) for start, size in starts)
