"""The four types a value has per mesh dimension, and the dual type of its gradient.

`S`, `R` and `P` are the placements users see. The fourth, `Entered`, lives inside an operator only: the same whole
value on every rank, about to be used differently by each, so that its gradient is partial.

    S ↔ S      R ↔ R      P ↔ Entered
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from shardwright.layout import Layout, Partial, Placement, Replicate
from shardwright.tensor.base.layout_cache import cache_of

__all__ = ["ENTERED", "REPLICATE", "SUM", "Entered", "dual", "settled"]


@final
@dataclass(frozen=True, slots=True, repr=False)
class Entered(Placement):
    """Whole on every rank, as `Replicate` is, with a gradient that differs from rank to rank."""

    def __str__(self) -> str:
        return "Re"

    def __repr__(self) -> str:
        return "Entered()"


ENTERED, REPLICATE, SUM = Entered(), Replicate(), Partial("sum")


_DUAL: dict[type[Placement], Placement] = {Partial: ENTERED, Entered: SUM}
_SETTLED: dict[type[Placement], Placement] = {Entered: REPLICATE}


def dual(layout: Layout) -> Layout:
    """The layout of the gradient of a value laid out like this."""
    try:
        known: Layout | None = layout.attached.dual  # remembered: `.grad` asks all the time
    except AttributeError:
        known = cache_of(layout).dual = _exchanged(layout, _DUAL)
    return layout if known is None else known  # None: it is its own, and must not keep itself alive


def settled(layout: Layout) -> Layout:
    """The layout as users see it: what has entered is a replicate again."""
    try:
        known: Layout | None = layout.attached.settled
    except AttributeError:
        known = cache_of(layout).settled = _exchanged(layout, _SETTLED)
    return layout if known is None else known


def _exchanged(layout: Layout, by: dict[type[Placement], Placement]) -> Layout | None:
    """The layout with some types of placements exchanged for others; None where it has none of them."""
    if not any(type(placement) in by for placement in layout.placements):
        return None
    placements = [by.get(type(placement), placement) for placement in layout.placements]
    return layout.replace(placements=placements, order=layout.order)
