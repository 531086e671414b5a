"""Fold names that differ in numbers only: `layers.0.w`, `layers.1.w` … become `layers.{0-31}.w`. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from shardwright.cli.text import number_ranges

__all__ = ["fold_names"]

Key = TypeVar("Key")


def fold_names(names: Iterable[tuple[str, Key]]) -> list[tuple[str, list[str], Key]]:
    """Group names that differ in their numbers only and have equal keys; return each pattern, its names, and the key.

    >>> fold_names([("layers.0.w", 1), ("layers.1.w", 1), ("layers.2.w", 1), ("norm", 2)])
    [('layers.{0-2}.w', ['layers.0.w', 'layers.1.w', 'layers.2.w'], 1), ('norm', ['norm'], 2)]
    """
    groups: dict[tuple[tuple[str | None, ...], Key], list[str]] = {}
    for name, key in names:
        parts = tuple(None if _is_number(part) else part for part in name.split("."))
        groups.setdefault((parts, key), []).append(name)
    return [(_pattern(members), members, key) for (_, key), members in groups.items()]


def _is_number(part: str) -> bool:
    return part.isascii() and part.isdigit() and len(part) < 10


def _pattern(names: list[str]) -> str:
    if len(names) == 1:
        return names[0]
    columns = zip(*(name.split(".") for name in names), strict=True)
    return ".".join(
        f"{{{number_ranges(map(int, column))}}}" if len(set(column)) > 1 else column[0] for column in columns
    )
