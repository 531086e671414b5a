"""The options `--mapping` and `--size`: rules in a file, or those of a well-known model."""

from __future__ import annotations

import os
from collections.abc import Sequence

from shardwright.errors import UsageError
from shardwright.interop.mapping import SHIPPED, Mapping

__all__ = ["read_mapping"]


def read_mapping(rules: str | None, sizes: Sequence[str]) -> Mapping | None:
    """Return the mapping that the options name: a file of rules, or one that is shipped; sizes are `AXIS=N`.

    >>> read_mapping("llama", ["r=64"]).sizes
    {'r': 64}
    """
    if rules is None:
        if sizes:
            raise UsageError("--size belongs to a mapping: name one with --mapping")
        return None
    lengths = dict(_axis_length(size) for size in sizes)
    if os.path.exists(rules):
        with open(rules, encoding="utf-8") as file:
            return Mapping(file.read(), **lengths)
    if rules.lower() in SHIPPED:
        return Mapping(SHIPPED[rules.lower()], **lengths)
    known = ", ".join(sorted(SHIPPED))
    raise UsageError(f"there is no file {rules!r}, and no mapping of that name; those shipped are {known}")


def _axis_length(text: str) -> tuple[str, int]:
    axis, _, length = text.partition("=")
    if not axis or not (length.isascii() and length.isdecimal()):
        raise UsageError(f"--size must be like d=128, got {text!r}")
    return axis, int(length)
