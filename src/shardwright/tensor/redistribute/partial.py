"""The algebra of `Partial`: which mesh dimensions keep their addends, which are reduced, and in what order. Pure.

Where several mesh dimensions hold addends, the value is the reduction over the first of the reduction over the next,
and so on, as nested sums are written: the last mesh dimension is reduced first. That matters only where the
reductions differ; `sum` and `avg` may change places, and any reduction with itself.
"""

from __future__ import annotations

from fractions import Fraction

from shardwright.layout import Layout, Partial

__all__ = ["commute", "kept_addends", "partial_ops", "scale_factor"]

_LINEAR = frozenset(("sum", "avg"))
_SCALES_WITH_ITS_ADDENDS = frozenset(("sum", "avg", "max", "min"))


def commute(first: str, second: str) -> bool:
    """Whether two reductions over two mesh dimensions may change places.

    >>> commute("sum", "avg"), commute("max", "max"), commute("sum", "max")
    (True, True, False)
    """
    return first == second or {first, second} <= _LINEAR


def partial_ops(layout: Layout) -> dict[int, str]:
    """The reduction of each mesh dimension that holds addends.

    >>> from shardwright.layout import Mesh, Replicate
    >>> partial_ops(Layout(Mesh((2, 2)), [Replicate(), Partial("max")], (4,)))
    {1: 'max'}
    """
    return {m: placement.op for m, placement in enumerate(layout.placements) if isinstance(placement, Partial)}


def kept_addends(source: Layout, target: Layout) -> frozenset[int]:
    """The mesh dimensions whose addends stay addends; the layouts share their mesh.

    A dimension keeps them where both layouts want the same reduction, or `sum` and `avg`, which differ by a factor;
    unless a dimension before it changes by a reduction that does not commute with its own.

    >>> from shardwright.layout import Mesh, Replicate
    >>> addends = Layout(Mesh((2, 2)), [Partial("max"), Partial("sum")], (4,))
    >>> sorted(kept_addends(addends, addends.replace(placements=[Partial("max"), Replicate()])))
    [0]
    >>> sorted(kept_addends(addends, addends.replace(placements=[Replicate(), Partial("sum")])))
    []
    """
    have, want = partial_ops(source), partial_ops(target)
    scalable = _SCALES_WITH_ITS_ADDENDS.issuperset(have.values())
    kept = {m for m in have.keys() & want.keys() if have[m] == want[m] or (scalable and commute(have[m], want[m]))}
    while True:
        changed = [(m, op) for ops in (have, want) for m, op in ops.items() if m not in kept]
        blocked = {k for k in kept if any(m < k and not commute(op, have[k]) for m, op in changed)}
        if not blocked:
            return frozenset(kept)
        kept -= blocked


def scale_factor(source: Layout, target: Layout, kept: frozenset[int]) -> Fraction:
    """By how much the kept addends are multiplied where an average becomes a sum or a sum an average.

    >>> from shardwright.layout import Mesh
    >>> average, total = (Layout(Mesh((4,)), [Partial(op)], (8,)) for op in ("avg", "sum"))
    >>> scale_factor(average, total, frozenset([0]))
    Fraction(1, 4)
    """
    have, want = partial_ops(source), partial_ops(target)
    factor = Fraction(1)
    for m in kept:
        if have[m] != want[m]:
            factor *= Fraction(1, source.mesh.shape[m]) if have[m] == "avg" else source.mesh.shape[m]
    return factor
