"""A few rows of every piece of what is cut, redistributed together: the means of scans, extremes and selections.

Every rank works on its own piece first and has a few rows to show for it (a total, its k largest). Those are gathered,
each rank gets them all, and what is left to do is the same everywhere. A movement like any other: its gradient goes
back to the piece each row came from.
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
from shardwright.tensor.base.gradient_types import ENTERED, REPLICATE, settled
from shardwright.tensor.base.layout_cache import cache_of
from shardwright.tensor.redistribute.autograd import redistribute_local
from shardwright.tensor.rules.shared.pick import cutting

__all__ = ["Pieces", "pieces_of", "pieces_of_all", "reduced"]


@dataclass(frozen=True, slots=True)
class Pieces:
    """The pieces of a dimension that is cut, or of a whole tensor, in order; `mine` is this rank's."""

    one_each: Layout  # of a tensor of which every piece has one row along `dim`
    dim: int
    sizes: tuple[int, ...]
    mine: int
    start: int  # of this rank's piece, along `dim`

    def gathered(self, name: str, rows: Tensor, most: int = 1, *, entered: bool = False) -> Tensor:
        """The rows of all pieces, one piece after another: of each as many as it has, at most `most`.

        `entered`: every rank goes on to use them differently, so their gradient is the sum over ranks.
        """
        counts = [min(most, size) for size in self.sizes]
        return self._gathered(name, rows, most, counts, entered)

    def gathered_as_found(self, name: str, rows: Tensor) -> tuple[Tensor, list[int]]:
        """The rows of all pieces, of each as many as its values say, and how many those are; without a gradient."""
        counts = self.counts(name, rows.shape[self.dim], rows.device)
        return self._gathered(name, rows, max(counts), counts, entered=False), counts

    def counts(self, name: str, mine: int, device: Any) -> list[int]:
        """A number of every piece; where there are no values, its size."""
        own = torch.tensor([mine], device=device)
        found = self.flat()._gathered(name, own, 1, [1] * len(self.sizes), entered=False)
        return list(self.sizes) if found.is_meta else found.tolist()

    def flat(self) -> Pieces:
        """The same pieces, of a tensor of one dimension."""
        placements = [Shard(0) if p.is_shard(self.dim) else REPLICATE for p in self.one_each.placements]
        layout = Layout(self.one_each.mesh, placements, (len(self.sizes),), self.one_each.order)
        return Pieces(layout, 0, self.sizes, self.mine, self.start)

    def before(self, most: int = 1) -> int:
        """How many of the gathered rows come from pieces before this rank's."""
        return sum(min(most, size) for size in self.sizes[: self.mine])

    def _gathered(self, name: str, rows: Tensor, most: int, counts: list[int], entered: bool) -> Tensor:
        dim, short = self.dim, most - rows.shape[self.dim]
        if short:  # still a function of the rows: every rank has the same graph
            shape = (*rows.shape[:dim], short, *rows.shape[dim + 1 :])
            rows = torch.cat([rows, rows.new_zeros(shape)], dim)
        one = self.one_each
        shape = (*one.shape[:dim], one.shape[dim] * most, *one.shape[dim + 1 :])
        source = one.replace(shape=shape)
        whole = ENTERED if entered else REPLICATE
        target = source.replace(placements=[whole if p.is_shard(dim) else p for p in source.placements])
        policy.check(name, [(source, settled(target))])
        everything = redistribute_local(rows, source, target)
        if all(count == most for count in counts):
            return everything
        kept = [piece * most + row for piece, count in enumerate(counts) for row in range(count)]
        return everything.index_select(dim, torch.tensor(kept, dtype=torch.long, device=rows.device))


def pieces_of(layout: Layout, dim: Any) -> Pieces | None:
    """The pieces of a dimension that is spread over several ranks; None where it is not, or there is none such."""
    if not isinstance(dim, int) or isinstance(dim, bool) or not -layout.ndim <= dim < layout.ndim:
        return None
    dim %= layout.ndim
    if not cutting(layout, dim) or comm.rank() not in layout.mesh:
        return None
    derived = cache_of(layout).derived
    known: Pieces | None = derived.get((Pieces, dim))
    if known is None:
        shape = (*layout.shape[:dim], prod(layout.mesh.shape[m] for m in layout.cut_by(dim)), *layout.shape[dim + 1 :])
        placements = [Shard(dim) if p.is_shard(dim) else p for p in layout.placements]
        one_each = Layout(layout.mesh, placements, shape, layout.order)
        sizes = layout.table().sizes[:, dim]
        start = layout.region(comm.rank()).offset[dim]
        known = derived[Pieces, dim] = _ordered(one_each, dim, sizes, start)
    return known


def pieces_of_all(layout: Layout) -> Pieces | None:
    """The pieces of a tensor, whatever is cut of it, as rows of a tensor of one dimension; None where nothing is."""
    cuts = [m for m, p in enumerate(layout.placements) if p.is_shard() and layout.mesh.shape[m] > 1]
    if not cuts or comm.rank() not in layout.mesh:
        return None
    placements: list[Placement] = [Shard(0) if m in cuts else REPLICATE for m in range(layout.mesh.ndim)]
    one_each = Layout(layout.mesh, placements, (prod(layout.mesh.shape[m] for m in cuts),))
    return _ordered(one_each, 0, layout.table().sizes.prod(axis=1), 0)


def _ordered(one_each: Layout, dim: int, sizes: Any, start: int) -> Pieces:
    """Sizes by rank as sizes by piece."""
    places = one_each.table().offsets[:, dim]
    by_piece = dict(zip(places.tolist(), sizes.tolist(), strict=True))
    mine = one_each.region(comm.rank()).offset[dim]
    return Pieces(one_each, dim, tuple(by_piece[place] for place in sorted(by_piece)), mine, start)


def reduced(layout: Layout, dim: int, keepdim: bool, size: int = 1) -> Layout:
    """The layout of a result that is whole along a dimension: gone, or kept with `size` elements."""
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
