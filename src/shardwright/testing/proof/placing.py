"""Which placements of an operator's inputs are tried."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from math import prod

from torch import Tensor

from shardwright.layout import Layout, Mesh, Partial, Placement, Ragged, Replicate, Shard

__all__ = ["combinations_of", "placements_of"]

EXHAUSTIVE = 3  # up to so many tensors, every combination; beyond, every pair


def placements_of(tensor: Tensor, ranks: int) -> list[Placement]:
    """Every placement of one tensor on one mesh dimension: whole, cut along each dimension evenly and not, partial."""
    found: list[Placement] = [Replicate()]
    mesh = Mesh((ranks,))
    for dim, size in enumerate(tensor.shape):
        found.append(Shard(dim))
        even = Layout(mesh, [Shard(dim)], tensor.shape)
        uneven = (size - min(1, size), *[0] * (ranks - 2), min(1, size)) if ranks > 1 else (size,)
        if uneven != tuple(even.local_shape(rank)[dim] for rank in range(ranks)):
            found.append(Ragged(dim, uneven))
    if tensor.dtype.is_floating_point:
        found += [Partial("sum"), Partial("avg"), Partial("max")]
    elif tensor.dtype.is_complex:
        found += [Partial("sum"), Partial("avg")]
    elif str(tensor.dtype) != "torch.bool":
        found += [Partial("sum"), Partial("max")]
    return found


def combinations_of(choices: Sequence[Sequence[Placement]]) -> tuple[list[tuple[Placement, ...]], int]:
    """The combinations to try, and how many are left out: all of few inputs; every pair, and all alike, of many."""
    total = prod(len(choice) for choice in choices)
    if len(choices) <= EXHAUSTIVE:
        return list(product(*choices)), 0
    tried = dict.fromkeys((*_pairs(choices), *_alike(choices)))
    return list(tried), total - len(tried)


def _pairs(choices: Sequence[Sequence[Placement]]) -> Iterator[tuple[Placement, ...]]:
    for first, second in combinations(range(len(choices)), 2):
        for here, there in product(choices[first], choices[second]):
            placements: list[Placement] = [Replicate()] * len(choices)
            placements[first], placements[second] = here, there
            yield tuple(placements)


def _alike(choices: Sequence[Sequence[Placement]]) -> Iterator[tuple[Placement, ...]]:
    """All inputs that can be placed so, placed so."""
    for placement in dict.fromkeys(placement for choice in choices for placement in choice):
        yield tuple(placement if placement in choice else Replicate() for choice in choices)
