"""Patterns of names, as `load` takes them: `"model.*"`. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from shardwright.errors import ArgumentTypeError

__all__ = ["fits", "patterns_of"]


def patterns_of(only: str | Sequence[str] | None) -> list[str] | None:
    """The patterns that `only` is; None for all names."""
    if only is None:
        return None
    patterns = [only] if isinstance(only, str) else list(only) if isinstance(only, Iterable) else [only]
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ArgumentTypeError(f"only={only!r}: give a pattern of names, or several; {pattern!r} is no text")
    return patterns


def fits(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name fits one of these patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)
