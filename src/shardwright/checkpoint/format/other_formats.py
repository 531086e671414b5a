"""The files that set checkpoints of other formats apart from ours. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from shardwright.checkpoint.format.manifest import KEY

__all__ = ["INDEX_SUFFIX", "RANK_METADATA", "is_only_ours", "other_format"]

RANK_METADATA = re.compile(r"__(\d{1,9})\.metadata")
INDEX_SUFFIX = ".safetensors.index.json"
_MARKS = (".metadata", "model.safetensors")


def other_format(names: Iterable[str]) -> str | None:
    """Return the name of a file that only checkpoints of other formats have, if any of these is one.

    >>> other_format(["manifest.json", ".metadata"])
    '.metadata'
    """
    marks = (name for name in names if name in _MARKS or RANK_METADATA.fullmatch(name) or name.endswith(INDEX_SUFFIX))
    return next(marks, None)


def is_only_ours(names: Iterable[str]) -> bool:
    """Return whether files of these names are a checkpoint of ours, and of no other format.

    >>> is_only_ours(["manifest.json", "5f3a9c-00000-0.safetensors"]), is_only_ours(["manifest.json", ".metadata"])
    (True, False)
    """
    names = list(names)
    return KEY in names and other_format(names) is None
