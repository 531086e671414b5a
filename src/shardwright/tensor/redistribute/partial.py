"""The algebra of `Partial`: which mesh dimensions stay partial, which are reduced, and in what order. Pure.

If several mesh dimensions are partial, the value is the reduction over the first of the reduction over the next, and
so on, like nested sums: the last mesh dimension is reduced first. The order matters only if the reductions differ;
`sum` and `avg` commute, and so does any reduction with itself.
"""

from __future__ import annotations

from fractions import Fraction

from shardwright.layout import Layout, Partial

__all__ = ["commute", "kept_partials", "partial_ops", "scale_factor"]

_LINEAR = frozenset(("sum", "avg"))
_HOMOGENEOUS = frozenset(("sum", "avg", "max", "min"))  # scaling every partial value scales the result


def commute(first: str, second: str) -> bool:
    """Return whether two reductions over two mesh dimensions commute.

    >>> commute("sum", "avg"), commute("max", "max"), commute("sum", "max")
    (True, True, False)
    """
    return first == second or {first, second} <= _LINEAR


def partial_ops(layout: Layout) -> dict[int, str]:
    """Return the reduction of each partial mesh dimension.

    >>> from shardwright.layout import Mesh, Replicate
    >>> partial_ops(Layout(Mesh((2, 2)), [Replicate(), Partial("max")], (4,)))
    {1: 'max'}
    """
    return {m: placement.op for m, placement in enumerate(layout.placements) if isinstance(placement, Partial)}


def kept_partials(source: Layout, target: Layout) -> frozenset[int]:
    """Return the mesh dimensions that stay partial, for two layouts on one mesh.

    A dimension stays partial if both layouts have the same reduction there, or `sum` and `avg`, which differ by a
    factor; unless an earlier dimension changes whose reduction does not commute with its own.

    >>> from shardwright.layout import Mesh, Replicate
    >>> partial = Layout(Mesh((2, 2)), [Partial("max"), Partial("sum")], (4,))
    >>> sorted(kept_partials(partial, partial.replace(placements=[Partial("max"), Replicate()])))
    [0]
    >>> sorted(kept_partials(partial, partial.replace(placements=[Replicate(), Partial("sum")])))
    []
    """
    have, want = partial_ops(source), partial_ops(target)
    scalable = _HOMOGENEOUS.issuperset(have.values())
    kept = {m for m in have.keys() & want.keys() if have[m] == want[m] or (scalable and commute(have[m], want[m]))}
    while True:
        changed = [(m, op) for ops in (have, want) for m, op in ops.items() if m not in kept]
        blocked = {k for k in kept if any(m < k and not commute(op, have[k]) for m, op in changed)}
        if not blocked:
            return frozenset(kept)
        kept -= blocked


def scale_factor(source: Layout, target: Layout, kept: frozenset[int]) -> Fraction:
    """Return the factor for kept partial values when an average becomes a sum or the reverse.

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
