"""Parse `NAME[slice]`: the name of a tensor, and Python's notation for a part of it; cut that part into boxes. Pure."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass
from math import prod
from types import EllipsisType

from shardwright.cli.text import shape_text
from shardwright.errors import UsageError
from shardwright.layout import Region

__all__ = ["Index", "Selection", "parse_index", "split_name"]

Index = tuple[int | slice | EllipsisType | None, ...]

_NUMBER = r"\s*([+-]?\d{1,18})?\s*"
_PART = re.compile(rf"{_NUMBER}(?:(:){_NUMBER}(?::{_NUMBER})?)?", re.ASCII)


def split_name(text: str, names: Container[str]) -> tuple[str, Index]:
    """Return the name and the index that `NAME[slice]` means; a name that is stored as it is has no index.

    >>> split_name("w[0:2, -1]", {"w"})
    ('w', (slice(0, 2, None), -1))
    >>> split_name("w[0]", {"w[0]"})
    ('w[0]', ())
    """
    if text in names or not text.endswith("]"):
        return text, ()
    name, _, index = text.rpartition("[")
    return name, parse_index(index[:-1], text) if name in names else ()


def parse_index(text: str, shown: str) -> Index:
    """Parse what is between the brackets.

    >>> parse_index("..., ::2, None", "w[..., ::2, None]")
    (Ellipsis, slice(None, None, 2), None)
    """
    return tuple(_part(part, shown) for part in text.split(",")) if text.strip() else ()


def _part(text: str, shown: str) -> int | slice | EllipsisType | None:
    if text.strip() == "...":
        return ...
    if text.strip() == "None":
        return None
    match = _PART.fullmatch(text)
    if match is None or not text.strip():
        raise UsageError(
            f"{shown}: {text.strip()!r} is not an index; write integers and slices as in Python, such as w[0:2, :, -1]"
        )
    first, colon, end, step = match.groups()
    if not colon:
        return int(first)
    if step and int(step) == 0:
        raise UsageError(f"{shown}: the step of a slice must not be 0")
    return slice(*(int(number) if number else None for number in (first, end, step)))


@dataclass(frozen=True)
class Selection:
    """A part of a tensor: for each entry of an index, an integer, the range of a slice, or None for a new dimension.

    >>> selection = Selection.of((slice(1, None), -1), (4, 6), "w[1:, -1]")
    >>> selection.shape, selection.index(Region((1,), (2,)))
    ((3,), (slice(2, 4, 1), 5))
    """

    entries: tuple[int | range | None, ...]

    @classmethod
    def of(cls, index: Index, shape: Sequence[int], shown: str) -> Selection:
        """Return what an index selects of a tensor of this shape."""
        used = sum(entry is not None and entry is not ... for entry in index)
        if used > len(shape) or sum(entry is ... for entry in index) > 1:
            raise UsageError(f"{shown}: too many indices for a tensor of shape {shape_text(shape)}")
        rest = (slice(None),) * (len(shape) - used)
        position = index.index(...) if ... in index else len(index)
        full = (*index[:position], *rest, *index[position + 1 :])
        entries: list[int | range | None] = []
        dims = iter(shape)
        for entry in full:
            if entry is None:
                entries.append(None)
                continue
            extent = next(dims)
            if isinstance(entry, slice):
                entries.append(range(*entry.indices(extent)))
                continue
            assert isinstance(entry, int)  # the ellipsis has been replaced
            if not -extent <= entry < extent:
                raise UsageError(f"{shown}: index {entry} is out of range for shape {shape_text(shape)}")
            entries.append(entry % extent)
        return cls(tuple(entries))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the part."""
        return tuple(1 if entry is None else len(entry) for entry in self.entries if not isinstance(entry, int))

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    def index(self, box: Region | None = None) -> Index:
        """Return the index of the part, or of a box of it, into the tensor."""
        box = Region.whole(self.shape) if box is None else box
        dims = iter(zip(box.offset, box.end, strict=True))
        index: list[int | slice | EllipsisType | None] = []
        for entry in self.entries:
            if isinstance(entry, int):
                index.append(entry)
                continue
            first, end = next(dims)
            index.append(None if entry is None else _as_slice(entry[first:end]))
        return tuple(index)


def _as_slice(part: range) -> slice:
    return slice(part.start, part.stop if part.stop >= 0 else None, part.step)
