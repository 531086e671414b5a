"""Select names of a checkpoint: an exact name, everything under a prefix, or a pattern with `*`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from shardwright.errors import MissingNameError

__all__ = ["select", "select_all"]


def select(names: Iterable[str], wanted: str) -> list[str]:
    """Return the names that are `wanted`, are under it, or match it as a pattern.

    >>> select(["model.w", "model.b", "step"], "model"), select(["model.w", "model.b"], "*.w")
    (['model.w', 'model.b'], ['model.w'])
    """
    known = list(names)
    if wanted in known:
        return [wanted]
    found = [name for name in known if name.startswith(f"{wanted}.") or fnmatchcase(name, wanted)]
    if not found:
        close = get_close_matches(wanted, known[:20000], n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise MissingNameError(f"nothing is stored under {wanted!r}{hint}")
    return found


def select_all(names: Iterable[str], wanted: Sequence[str]) -> list[str]:
    """Return the names that any of `wanted` selects, in their own order; all of them if nothing is wanted."""
    known = list(names)
    if not wanted:
        return known
    chosen = {name for each in wanted for name in select(known, each)}
    return [name for name in known if name in chosen]
