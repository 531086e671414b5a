"""What overwrites a tensor overwrites partial sums too: one addend becomes the new value, the others nothing."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from shardwright.layout import Layout, Partial
from shardwright.tensor.base.gradient_types import REPLICATE
from shardwright.tensor.base.strategy import Operand, Strategy
from shardwright.tensor.redistribute.identity import IDEMPOTENT, identity_element

__all__ = ["as_addend", "overwriting"]


def overwriting(at: Callable[[int], list[Strategy]], target: Operand, inputs: int) -> Callable[[int], list[Strategy]]:
    """The strategies of an operator, and where its target, the first of so many inputs, is partial: to leave it so."""

    def strategies(mesh_dim: int) -> list[Strategy]:
        here = target.layout.placements[mesh_dim]
        if not isinstance(here, Partial):
            return at(mesh_dim)
        kept = Strategy((here, *[REPLICATE] * (inputs - 1)), (here,))
        return [kept, *(strategy for strategy in at(mesh_dim) if strategy != kept)]

    return strategies


def as_addend(local: Tensor, layout: Layout, rank: int) -> Tensor:
    """The new value, the same on every rank, as a rank's addend of it: in place, where it must be nothing."""
    here = layout.mesh.coordinate(rank)
    for place, placement in zip(here, layout.placements, strict=True):
        if isinstance(placement, Partial) and placement.op not in IDEMPOTENT and place:
            return local.fill_(identity_element(local.dtype, placement.op))
    return local
