"""Gather a few rows of every shard: the basis of scans, extremes and selections.

Every rank reduces its own shard to a few rows first (a total, its k largest). These are all-gathered, and the rest of
the computation is the same on every rank. The gather is an ordinary redistribution: the gradient of a row returns to
the shard it came from.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardwright import comm
from shardwright.layout import Layout, Placement, Shard
from shardwright.tensor.base import policy
from shardwright.tensor.base.gradient_types import ENTERED, REPLICATE, without_entered
from shardwright.tensor.base.layout_cache import cache_of
from shardwright.tensor.redistribute.autograd import redistribute_local
from shardwright.tensor.rules.shared.basic_index import sharded_over

__all__ = ["Shards", "flat_shards_of", "reduced", "shards_of"]


@dataclass(frozen=True, slots=True)
class Shards:
    """The shards of one dimension (or of a flattened tensor), in order; `mine` is the index of this rank's."""

    row_layout: Layout  # of a tensor with one row per shard along `dim`
    dim: int
    sizes: tuple[int, ...]
    mine: int
    start: int  # offset of this rank's shard along `dim`

    def gather(self, name: str, rows: Tensor, max_rows: int = 1, *, entered: bool = False) -> Tensor:
        """All-gather the rows of all shards, in order: min(max_rows, shard size) of each.

        `entered`: every rank uses them differently, so their gradient is summed over ranks.
        """
        counts = [min(max_rows, size) for size in self.sizes]
        return self._gather(name, rows, max_rows, counts, entered)

    def gather_uneven(self, name: str, rows: Tensor) -> tuple[Tensor, list[int]]:
        """All-gather rows whose number depends on the values; return them and the counts. Not differentiable."""
        counts = self.counts(name, rows.shape[self.dim], rows.device)
        return self._gather(name, rows, max(counts), counts, entered=False), counts

    def counts(self, name: str, mine: int, device: Any) -> list[int]:
        """All-gather one integer per shard; on meta tensors, return the shard sizes."""
        own = torch.tensor([mine], device=device)
        counts = self.flat()._gather(name, own, 1, [1] * len(self.sizes), entered=False)
        return list(self.sizes) if counts.is_meta else counts.tolist()

    def flat(self) -> Shards:
        """The same shards, of a 1-dimensional tensor."""
        placements = [Shard(0) if p.is_shard(self.dim) else REPLICATE for p in self.row_layout.placements]
        layout = Layout(self.row_layout.mesh, placements, (len(self.sizes),), self.row_layout.order)
        return Shards(layout, 0, self.sizes, self.mine, self.start)

    def before(self, max_rows: int = 1) -> int:
        """Return how many of the gathered rows precede this rank's."""
        return sum(min(max_rows, size) for size in self.sizes[: self.mine])

    def _gather(self, name: str, rows: Tensor, max_rows: int, counts: list[int], entered: bool) -> Tensor:
        dim, short = self.dim, max_rows - rows.shape[self.dim]
        if short:  # padded with zeros, as a function of the rows: every rank has the same graph
            shape = (*rows.shape[:dim], short, *rows.shape[dim + 1 :])
            rows = torch.cat([rows, rows.new_zeros(shape)], dim)
        base = self.row_layout
        shape = (*base.shape[:dim], base.shape[dim] * max_rows, *base.shape[dim + 1 :])
        source = base.replace(shape=shape)
        replicated = ENTERED if entered else REPLICATE
        target = source.replace(placements=[replicated if p.is_shard(dim) else p for p in source.placements])
        policy.check(name, [(source, without_entered(target))])
        everything = redistribute_local(rows, source, target)
        if all(count == max_rows for count in counts):
            return everything
        kept = [shard * max_rows + row for shard, count in enumerate(counts) for row in range(count)]
        return everything.index_select(dim, torch.tensor(kept, dtype=torch.long, device=rows.device))


def shards_of(layout: Layout, dim: Any) -> Shards | None:
    """Return the shards of a dimension split over several ranks; None if it is not sharded or does not exist."""
    if not isinstance(dim, int) or isinstance(dim, bool) or not -layout.ndim <= dim < layout.ndim:
        return None
    dim %= layout.ndim
    if not sharded_over(layout, dim) or comm.rank() not in layout.mesh:
        return None
    derived = cache_of(layout).derived
    known: Shards | None = derived.get((Shards, dim))
    if known is None:
        shape = (*layout.shape[:dim], prod(layout.mesh.shape[m] for m in layout.cut_by(dim)), *layout.shape[dim + 1 :])
        placements = [Shard(dim) if p.is_shard(dim) else p for p in layout.placements]
        row_layout = Layout(layout.mesh, placements, shape, layout.order)
        sizes = layout.table().sizes[:, dim]
        start = layout.region(comm.rank()).offset[dim]
        known = derived[Shards, dim] = _by_shard(row_layout, dim, sizes, start)
    return known


def flat_shards_of(layout: Layout) -> Shards | None:
    """Return the shards of a tensor as shards of its flattened form; None if it is not sharded."""
    sharding = [m for m, p in enumerate(layout.placements) if p.is_shard() and layout.mesh.shape[m] > 1]
    if not sharding or comm.rank() not in layout.mesh:
        return None
    placements: list[Placement] = [Shard(0) if m in sharding else REPLICATE for m in range(layout.mesh.ndim)]
    row_layout = Layout(layout.mesh, placements, (prod(layout.mesh.shape[m] for m in sharding),))
    return _by_shard(row_layout, 0, layout.table().sizes.prod(axis=1), 0)


def _by_shard(row_layout: Layout, dim: int, sizes: Any, start: int) -> Shards:
    """Build `Shards` from sizes per rank."""
    offsets = row_layout.table().offsets[:, dim]
    by_offset = dict(zip(offsets.tolist(), sizes.tolist(), strict=True))
    mine = row_layout.region(comm.rank()).offset[dim]
    return Shards(row_layout, dim, tuple(by_offset[offset] for offset in sorted(by_offset)), mine, start)


def reduced(layout: Layout, dim: int, keepdim: bool, size: int = 1) -> Layout:
    """Return the layout after a reduction along `dim`: dropped, or kept with `size` elements."""
    placements: list[Placement] = []
    for placement in layout.placements:
        if placement.is_shard(dim):
            placements.append(REPLICATE)
        elif placement.is_shard() and not keepdim and placement.dim > dim:  # type: ignore[attr-defined]  # shards have one
            placements.append(_moved_down(placement))
        else:
            placements.append(placement)
    shape = list(layout.shape)
    shape[dim : dim + 1] = [size] if keepdim else []
    return Layout(layout.mesh, placements, shape, layout.order)


def _moved_down(placement: Any) -> Placement:
    return (
        Shard(placement.dim - 1)
        if isinstance(placement, Shard)
        else type(placement)(placement.dim - 1, placement.sizes)
    )
