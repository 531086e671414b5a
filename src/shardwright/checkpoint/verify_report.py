"""The result of `verify`: what was read, and what is corrupted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from shardwright.layout import Region
from shardwright.listing import join_first

__all__ = ["Corruption", "VerifyReport"]

_MAX_LISTED = 20
_INDENT = "\n  "


@final
@dataclass(frozen=True)
class Corruption:
    """One corruption: its file, and for a corrupted block, its bytes, and the tensor and region that it belongs to.

    The bytes are `first` to `end` (exclusive) of the file.

    >>> print(Corruption("5f3a9c-00000-0.safetensors", "is missing"))
    5f3a9c-00000-0.safetensors is missing
    """

    file: str
    problem: str
    tensor: str | None = None
    region: Region | None = None
    block: int | None = None
    first: int | None = None
    end: int | None = None

    def __str__(self) -> str:
        if self.tensor is None:
            return f"{self.file} {self.problem}"
        if self.block is None:
            where = "" if self.first is None else f", bytes {self.first} to {self.end} of the file,"
            return f"{self.file}: {self.region} of tensor {self.tensor!r}{where} {self.problem}"
        return f"{self.file}: block {self.block} of {self.region} of tensor {self.tensor!r} {self.problem}"


@final
@dataclass(frozen=True)
class VerifyReport:
    """The result of `verify`: true if every byte is as it was written. `stray` files are harmless, and listed.

    `unchecked` is the number of bytes of tensors that have no checksum, as in safetensors files that others wrote:
    their sizes and offsets were checked, and that they can be read.

    >>> bool(VerifyReport("here", files=1, nbytes=4096))
    True
    >>> bool(VerifyReport("here", corruptions=(Corruption("a", "is missing"),)))
    False
    """

    location: str
    save_id: str | None = None
    files: int = 0
    nbytes: int = 0
    corruptions: tuple[Corruption, ...] = ()
    stray: tuple[str, ...] = field(default=())
    unchecked: int = 0

    def __bool__(self) -> bool:
        return not self.corruptions

    def __str__(self) -> str:
        checked = f"{self.files} {'file' if self.files == 1 else 'files'}, {self.nbytes} bytes"
        if self:
            lines = [f"{self.location} is intact: {checked}"]
        else:
            count = len(self.corruptions)
            lines = [f"{self.location} is corrupted in {count} {'place' if count == 1 else 'places'} ({checked} read)"]
            lines.append(f"  {join_first(self.corruptions, _MAX_LISTED, _INDENT)}")
        if self.unchecked:
            lines.append(f"  {self.unchecked} bytes have no checksum in this format: only their structure was checked")
        lines += [f"  {name} is not part of the checkpoint" for name in self.stray[:_MAX_LISTED]]
        return "\n".join(lines)
