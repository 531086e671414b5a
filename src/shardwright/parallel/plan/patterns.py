"""Patterns over dotted names of modules and parameters, and which of two is more specific."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TypeAlias

__all__ = ["Pattern", "Specificity"]

Specificity: TypeAlias = tuple[
    int, ...
]  # from the last part of a name: 2 literal, 1 by a glob, 0 by `**` or not at all

_ANY = "**"
_GLOB = frozenset("*?[")


@dataclass(frozen=True)
class Pattern:
    """A pattern such as `layers.*.mlp` or `**.bias`.

    `*`, `?` and `[...]` match within one part of a dotted name, `**` matches any number of parts. The empty pattern
    matches the model itself.

    >>> Pattern("layers.*.q_proj").matches("layers.3.q_proj"), Pattern("layers.*").matches("layers.3.q_proj")
    (True, False)
    >>> Pattern("**.bias").matches("bias"), Pattern("**.bias").matches("layers.0.bias")
    (True, True)
    """

    text: str

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """The parts between dots."""
        return tuple(self.text.split(".")) if self.text else ()

    def matches(self, name: str) -> bool:
        """Return whether the whole name matches."""
        return self.specificity(name) is not None

    def specificity(self, name: str) -> Specificity | None:
        """Return how each part of the name is matched, the last part first; None if the name does not match.

        Of two patterns, the one with the larger value is more specific.

        >>> Pattern("layers.*.up").specificity("layers.0.up"), Pattern("**.up").specificity("layers.0.up")
        ((2, 1, 2), (2, 0, 0))
        """
        return _match(self.parts, tuple(name.split(".")) if name else ())


def _match(parts: tuple[str, ...], names: tuple[str, ...]) -> Specificity | None:
    """Match from the end; of several ways in which `**` can match, return the most specific."""
    if not parts:
        return None if names else ()
    if parts[-1] == _ANY:
        rests = [(count, _match(parts[:-1], names[: len(names) - count])) for count in range(len(names) + 1)]
        return max(((0,) * count + rest for count, rest in rests if rest is not None), default=None)
    if not names or not fnmatchcase(names[-1], parts[-1]):
        return None
    rest = _match(parts[:-1], names[:-1])
    return None if rest is None else (1 if _GLOB & set(parts[-1]) else 2, *rest)
