"""What this layer keeps with a layout: equal layouts are one object, so it is found again, and dies with the layout."""

from __future__ import annotations

from typing import Any

from shardwright import comm
from shardwright.layout import Layout
from shardwright.layout.layout import attach, detach_all

__all__ = ["LayoutCache", "cache_of", "forget_caches"]


class LayoutCache(dict[Any, dict[Any, Any]]):
    """The tables of one layout, attached to it. As a mapping it is the dispatcher's shortest path, by function.

    `dispatch.cache` reads and writes the mapping and `plans`; `gradient_types` the two layouts, which are unset until
    they are asked for, and None where the layout is its own.
    """

    __slots__ = ("derived", "dual", "plans", "settled")

    dual: Layout | None
    settled: Layout | None

    def __init__(self) -> None:
        super().__init__()
        self.plans: dict[tuple[Any, ...], Any] = {}  # of calls whose first operand is laid out like this
        self.derived: dict[tuple[Any, int], Any] = {}  # of the layout alone: (what it is, a dimension or rank)


def cache_of(layout: Layout) -> LayoutCache:
    """Return the tables of a layout, made where there are none yet."""
    cache: LayoutCache = layout.attached
    if type(cache) is not LayoutCache:
        cache = LayoutCache()
        attach(layout, cache)
    return cache


def forget_caches() -> None:
    """Drop all tables: rules have changed, or this process has become another rank, which plans know."""
    detach_all()


comm.on_forget(forget_caches)
