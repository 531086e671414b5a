"""Find where boxes fail to tile a parent box exactly. Arrays in, arrays out.

Give each box +1 or -1 at each of its corners, with the sign alternating from corner to corner. These signed corners
determine the sum of the boxes' indicator functions, as a function is determined by its differences. So the boxes tile
the parent *if and only if* their signed corners add up to the parent's. Sorting the corners costs n log n in any number
of dimensions; comparing pairs would cost n². If they do not add up, the first remaining corner in row-major order is
the first point that is held twice (positive) or not at all (negative).
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Integers", "first_mismatch", "gap_end"]

Integers: TypeAlias = npt.NDArray[np.int64]


def first_mismatch(starts: Integers, stops: Integers, low: Integers, high: Integers) -> tuple[Integers, int] | None:
    """Return the first point in row-major order that is not held exactly once, and the excess count (-1 for a gap)."""
    full = (stops > starts).all(axis=1)
    sign = np.ones(int(full.sum()) + 1, np.int64)
    # Subtract the parent, so that whatever remains is a defect. An empty parent contributes nothing.
    sign[-1] = -1 if (high > low).all() else 0
    begin, end = np.vstack([starts[full], low]), np.vstack([stops[full], high])

    # Skip dimensions that every box spans entirely: they would only double the number of corners.
    split = np.flatnonzero((begin != low).any(axis=0) | (end != high).any(axis=0))
    points, signs = begin[:, split], sign
    for column, dim in enumerate(split):
        opposite = points.copy()
        opposite[:, column] = np.tile(end[:, dim], 2**column)
        points, signs = np.vstack([points, opposite]), np.concatenate([signs, -signs])

    order = np.lexsort(points.T[::-1]) if split.size else np.arange(len(points))
    points, signs = points[order], signs[order]
    new = np.flatnonzero(np.concatenate([[True], (points[1:] != points[:-1]).any(axis=1)]))
    left_over = np.add.reduceat(signs, new)
    nonzero = np.flatnonzero(left_over)
    if not nonzero.size:
        return None
    point = low.copy()
    point[split] = points[new[nonzero[0]]]
    return point, int(left_over[nonzero[0]])


def gap_end(point: Integers, starts: Integers, stops: Integers, high: Integers) -> Integers:
    """Return the end of the box of missing elements that starts at `point`, extended along the last dimension first."""
    end = point + 1
    for dim in reversed(range(len(point))):
        beside = ((starts < end) & (stops > point))[:, np.arange(len(point)) != dim].all(axis=1)
        blocking = starts[beside & (stops[:, dim] > starts[:, dim]) & (starts[:, dim] >= end[dim]), dim]
        end[dim] = min(int(high[dim]), int(blocking.min()) if blocking.size else int(high[dim]))
    return end
