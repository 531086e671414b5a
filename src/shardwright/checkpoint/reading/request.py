"""The arguments of one load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Mapping as MappingABC
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

from shardwright import comm
from shardwright.checkpoint.format.values import Codec
from shardwright.checkpoint.runtime.progress import ProgressCallback
from shardwright.interop.mapping import Mapping

__all__ = ["Cast", "LoadRequest", "OnMissing", "Rename"]

Rename: TypeAlias = MappingABC[str, str] | Callable[[str], str]
Cast: TypeAlias = bool | MappingABC[str, bool]
OnMissing: TypeAlias = Literal["raise", "keep"] | Callable[[str], Literal["raise", "keep"]]


@final
@dataclass(frozen=True)
class LoadRequest:
    """What to load (the selection arguments of `load`), on which ranks, and with which resources."""

    group: comm.Group
    strict: bool = True
    only: str | Sequence[str] | None = None
    rename: Rename | None = None
    cast: Cast = False
    on_missing: OnMissing = "raise"
    codecs: MappingABC[type, Codec] | None = None
    memory: int | None = None
    threads: int = 2
    progress: ProgressCallback | None = None
    mapping: Mapping | None = None
