"""The four types a value has per mesh dimension, and the dual type of its gradient.

`S`, `R` and `P` are the placements users see. The fourth, `Entered`, lives inside an operator only: the same whole
value on every rank, about to be used differently by each, so that its gradient is partial.

    S ↔ S      R ↔ R      P ↔ Entered
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from shardwright.layout import Layout, Partial, Placement, Replicate

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
    return _exchanged(layout, "_dual", _DUAL)


def settled(layout: Layout) -> Layout:
    """The layout as users see it: what has entered is a replicate again."""
    return _exchanged(layout, "_settled", _SETTLED)


def _exchanged(layout: Layout, name: str, by: dict[type[Placement], Placement]) -> Layout:
    """The layout with some types of placements exchanged for others, remembered on it: `.grad` asks all the time."""
    try:
        known: Layout | None = layout.__dict__[name]
    except KeyError:
        known = None
        if any(type(placement) in by for placement in layout.placements):
            placements = [by.get(type(placement), placement) for placement in layout.placements]
            known = layout.replace(placements=placements, order=layout.order)
        layout.__dict__[name] = known
    return layout if known is None else known  # None: it is its own, and must not keep itself alive
