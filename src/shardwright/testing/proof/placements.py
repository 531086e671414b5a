"""Enumerate the placements of an operator's inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from math import prod

from torch import Tensor

from shardwright.layout import Layout, Mesh, Partial, Placement, Ragged, Replicate, Shard

__all__ = ["combinations_of", "placements_of"]

EXHAUSTIVE = 3  # the largest number of tensors for which every combination is tried; beyond, every pair


def placements_of(tensor: Tensor, ranks: int) -> list[Placement]:
    """Return every placement of a tensor on one mesh dimension: replicated, sharded evenly and unevenly, partial."""
    placements: list[Placement] = [Replicate()]
    mesh = Mesh((ranks,))
    for dim, size in enumerate(tensor.shape):
        placements.append(Shard(dim))
        even = Layout(mesh, [Shard(dim)], tensor.shape)
        uneven = (size - min(1, size), *[0] * (ranks - 2), min(1, size)) if ranks > 1 else (size,)
        if uneven != tuple(even.local_shape(rank)[dim] for rank in range(ranks)):
            placements.append(Ragged(dim, uneven))
    if tensor.dtype.is_floating_point:
        placements += [Partial("sum"), Partial("avg"), Partial("max")]
    elif tensor.dtype.is_complex:
        placements += [Partial("sum"), Partial("avg")]
    elif str(tensor.dtype) != "torch.bool":
        placements += [Partial("sum"), Partial("max")]
    return placements


def combinations_of(choices: Sequence[Sequence[Placement]]) -> tuple[list[tuple[Placement, ...]], int]:
    """Return the combinations to try and the number left out: all, or every pair and all equal for many inputs."""
    total = prod(len(choice) for choice in choices)
    if len(choices) <= EXHAUSTIVE:
        return list(product(*choices)), 0
    tried = dict.fromkeys((*_pairs(choices), *_equal(choices)))
    return list(tried), total - len(tried)


def _pairs(choices: Sequence[Sequence[Placement]]) -> Iterator[tuple[Placement, ...]]:
    for first, second in combinations(range(len(choices)), 2):
        for first_placement, second_placement in product(choices[first], choices[second]):
            placements: list[Placement] = [Replicate()] * len(choices)
            placements[first], placements[second] = first_placement, second_placement
            yield tuple(placements)


def _equal(choices: Sequence[Sequence[Placement]]) -> Iterator[tuple[Placement, ...]]:
    """Yield, for each placement, the combination in which every input that can have it has it."""
    for placement in dict.fromkeys(placement for choice in choices for placement in choice):
        yield tuple(placement if placement in choice else Replicate() for choice in choices)
