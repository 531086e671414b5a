"""Caches attached to layouts: equal layouts are one object, so a cache is found again and freed with its layout."""

from __future__ import annotations

from typing import Any

from shardwright.layout import Layout
from shardwright.layout.layout import attach, detach_all

__all__ = ["LayoutCache", "cache_of", "forget_caches"]


class LayoutCache(dict[Any, dict[Any, Any]]):
    """The caches of one layout. The mapping itself is the dispatcher's fast path, by function.

    `dispatch.cache` reads and writes the mapping and `plans`; `gradient_types` the two layouts, which are unset until
    first used, and None if they equal the layout itself.
    """

    __slots__ = ("derived", "dual", "plans", "without_entered")

    dual: Layout | None
    without_entered: Layout | None

    def __init__(self) -> None:
        super().__init__()
        self.plans: dict[tuple[Any, ...], Any] = {}  # of calls whose first operand has this layout
        self.derived: dict[tuple[Any, int], Any] = {}  # by function, and dimension or rank


def cache_of(layout: Layout) -> LayoutCache:
    """Return the cache of a layout; create it on first use."""
    cache: LayoutCache = layout.attached
    if type(cache) is not LayoutCache:
        cache = LayoutCache()
        attach(layout, cache)
    return cache


def forget_caches() -> None:
    """Drop all caches, because rules changed or this process has a new rank, which plans depend on."""
    detach_all()
