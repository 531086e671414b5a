"""Numbers and names as text for people: sizes, ages, sets of numbers; names of tensors without control characters.

Names come from files: what a terminal would act on, or draw in another place, is escaped. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["age", "count", "number_ranges", "plural", "printable", "shape_text", "size"]

_THOUSANDS = ("", "k", "M", "G", "T", "P")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def size(nbytes: int) -> str:
    """Return a number of bytes in the unit that fits.

    >>> size(512), size(4096), size(15_000_000_000)
    ('512 B', '4.0 KiB', '14.0 GiB')
    """
    value, unit = float(nbytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{nbytes} B" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"


def count(number: int) -> str:
    """Return a number of elements, shortened.

    >>> count(999), count(7_000_000), count(1_235_000_000)
    ('999', '7.00 M', '1.24 G')
    """
    value, unit = float(number), 0
    while value >= 1000 and unit < len(_THOUSANDS) - 1:
        value, unit = value / 1000, unit + 1
    return str(number) if unit == 0 else f"{value:.2f} {_THOUSANDS[unit]}"


def age(seconds: float) -> str:
    """Return a duration in its largest unit.

    >>> age(5), age(200), age(100_000)
    ('5 s', '3 min', '1 d')
    """
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return f"{max(0, int(seconds))} s"


def plural(number: int, noun: str) -> str:
    """Return a number with its noun.

    >>> plural(1, "tensor"), plural(3, "tensor")
    ('1 tensor', '3 tensors')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


def number_ranges(numbers: Iterable[int]) -> str:
    """Return a set of numbers as ranges.

    >>> number_ranges([0, 1, 2, 3, 5, 8, 9])
    '0-3,5,8-9'
    """
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def shape_text(shape: Iterable[int]) -> str:
    """Return a shape.

    >>> shape_text((4096, 1024)), shape_text(())
    ('[4096, 1024]', '[]')
    """
    return f"[{', '.join(map(str, shape))}]"


def printable(text: str) -> str:
    """Return text with everything escaped that is not a printable character.

    >>> print(printable("w\\x1b[31m"), printable("ö"))
    w\\x1b[31m ö
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
