"""Overwriting tensors with partial values: one rank holds the new value, the others the identity of the reduction."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from shardwright.layout import Layout, Partial
from shardwright.tensor.base.gradient_types import REPLICATE
from shardwright.tensor.base.strategy import Operand, Strategy
from shardwright.tensor.redistribute.identity import IDEMPOTENT, identity_element

__all__ = ["as_partial_value", "overwrite_strategies"]


def overwrite_strategies(
    at: Callable[[int], list[Strategy]], target: Operand, inputs: int
) -> Callable[[int], list[Strategy]]:
    """Add a strategy that keeps a partial target partial; the target is the first of `inputs` inputs."""

    def strategies(mesh_dim: int) -> list[Strategy]:
        here = target.layout.placements[mesh_dim]
        if not isinstance(here, Partial):
            return at(mesh_dim)
        kept = Strategy((here, *[REPLICATE] * (inputs - 1)), (here,))
        return [kept, *(strategy for strategy in at(mesh_dim) if strategy != kept)]

    return strategies


def as_partial_value(local: Tensor, layout: Layout, rank: int) -> Tensor:
    """Turn the new value, the same on every rank, into this rank's partial value, in place."""
    coordinate = layout.mesh.coordinate(rank)
    for index, placement in zip(coordinate, layout.placements, strict=True):
        if isinstance(placement, Partial) and placement.op not in IDEMPOTENT and index:
            return local.fill_(identity_element(local.dtype, placement.op))
    return local
