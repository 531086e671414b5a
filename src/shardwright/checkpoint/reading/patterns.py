"""Name patterns such as `"model.*"`, for the `only` argument of `load`. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from shardwright.errors import ArgumentTypeError

__all__ = ["fits", "patterns_of"]


def patterns_of(only: str | Sequence[str] | None) -> list[str] | None:
    """Return the patterns of `only` as a list; None means all names."""
    if only is None:
        return None
    patterns = [only] if isinstance(only, str) else list(only) if isinstance(only, Iterable) else [only]
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ArgumentTypeError(f"only must be a pattern of names or a list of them, got {pattern!r}")
    return patterns


def fits(name: str, patterns: Iterable[str]) -> bool:
    """Return True if a name matches any of these patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)
