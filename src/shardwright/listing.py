"""Lists in messages: the first few items, then how many more there are."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["join_first"]


def join_first(items: Sequence[object], limit: int, separator: str = ", ", *, total: int | None = None) -> str:
    """Join the first `limit` items; if there are more (of `total`, if given), end with "and N more".

    >>> join_first([0, 1, 2], 8)
    '0, 1, 2'
    >>> join_first(["a", "b", "c"], 2, "; ")
    'a; b; and 1 more'
    """
    shown = [str(item) for item in items[:limit]]
    more = (len(items) if total is None else total) - len(shown)
    if more > 0:
        shown.append(f"and {more} more")
    return separator.join(shown)
