"""The four types a value has per mesh dimension, and the dual type of its gradient.

`S`, `R` and `P` are the placements users see. The fourth, `Entered`, exists only inside an operator: a replicated value
that each rank uses differently, so that its gradient is partial. JAX's `shard_map` calls such a value *varying* with an
*unreduced* cotangent; in Megatron-LM it is the output of the *f* operator (`copy_to_tensor_model_parallel_region`).

    S ↔ S      R ↔ R      P ↔ Entered
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from shardwright.layout import Layout, Partial, Placement, Replicate
from shardwright.tensor.base.layout_cache import cache_of

__all__ = ["ENTERED", "REPLICATE", "SUM", "Entered", "dual", "without_entered"]


@final
@dataclass(frozen=True, slots=True, repr=False)
class Entered(Placement):
    """Replicated, with a partial gradient: JAX's varying value with an unreduced cotangent, Megatron's *f* operator."""

    def __str__(self) -> str:
        return "Re"

    def __repr__(self) -> str:
        return "Entered()"


ENTERED, REPLICATE, SUM = Entered(), Replicate(), Partial("sum")


_DUAL: dict[type[Placement], Placement] = {Partial: ENTERED, Entered: SUM}
_WITHOUT_ENTERED: dict[type[Placement], Placement] = {Entered: REPLICATE}


def dual(layout: Layout) -> Layout:
    """Return the layout of the gradient of a value with this layout."""
    try:
        known: Layout | None = layout.attached.dual  # cached: every `.grad` needs it
    except AttributeError:
        known = cache_of(layout).dual = _replaced(layout, _DUAL)
    return layout if known is None else known  # None: the layout itself, which must not keep itself alive


def without_entered(layout: Layout) -> Layout:
    """Return the layout as users see it, with `Replicate` for `Entered`."""
    try:
        known: Layout | None = layout.attached.without_entered
    except AttributeError:
        known = cache_of(layout).without_entered = _replaced(layout, _WITHOUT_ENTERED)
    return layout if known is None else known


def _replaced(layout: Layout, by: dict[type[Placement], Placement]) -> Layout | None:
    """Return the layout with placements of some types replaced by others; None if it has none of them."""
    if not any(type(placement) in by for placement in layout.placements):
        return None
    placements = [by.get(type(placement), placement) for placement in layout.placements]
    return layout.replace(placements=placements, order=layout.order)
