"""`fingerprint`: a digest of what tensors hold, whatever their layout, their format and the order of their names.

The digest of a tensor is BLAKE2b (32 bytes) of the line `dtype[size,size,...]`, with a line feed, and of the elements
in row-major order, little-endian. The fingerprint is BLAKE2b (32 bytes) of a line for each name, sorted by their UTF-8:
the tensor's digest in hexadecimal digits, a space, the name as a JSON string in ASCII, and a line feed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardwright.checkpoint import LazyTensor
from shardwright.cli.blocks import read_blocks
from shardwright.cli.exit_codes import FOUND, OK
from shardwright.cli.opening import open_checkpoint
from shardwright.cli.progress import Advance, progress_bar
from shardwright.cli.report import Report
from shardwright.cli.selection import select_all
from shardwright.cli.text import printable
from shardwright.errors import UsageError
from shardwright.interop.mapping import Mapping

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["Fingerprint", "fingerprint_checkpoint"]

_DIGITS = 64


@dataclass(frozen=True)
class Fingerprint(Report):
    """The fingerprint of a checkpoint, and the digest of each of its tensors."""

    path: str
    fingerprint: str
    tensors: dict[str, str]
    expected: str | None = None
    list_tensors: bool = False

    @property
    def exit_code(self) -> int:
        """1 if it is not the one that was expected."""
        return OK if self.expected in (None, self.fingerprint) else FOUND

    def render(self) -> Iterator[RenderableType]:
        """Yield the fingerprint and the path; before it, the digests of the tensors if they were asked for."""
        if self.list_tensors:
            yield from (f"{digest}  {printable(name)}" for name, digest in self.tensors.items())
        yield f"{self.fingerprint}  {printable(self.path)}"
        if self.exit_code:
            yield f"expected {self.expected}"


def fingerprint_checkpoint(
    path: str,
    only: Sequence[str] = (),
    *,
    mapping: Mapping | None = None,
    expected: str | None = None,
    list_tensors: bool = False,
) -> Fingerprint:
    """Return the fingerprint of a checkpoint's tensors, or of those that are selected; through a mapping if given."""
    if expected is not None and (len(expected) != _DIGITS or set(expected.lower()) - set("0123456789abcdef")):
        raise UsageError(f"--expect needs a fingerprint of {_DIGITS} hexadecimal digits, got {expected!r}")
    with open_checkpoint(path, mapping) as opened:
        chosen = {name: opened[name] for name in sorted(select_all(opened, only), key=str.encode)}
        distinct = {tensor.stored_name: tensor for tensor in chosen.values()}  # one with several names is read once
        with progress_bar("reading", sum(tensor.nbytes for tensor in distinct.values())) as advance:
            digests = {name: _digest(tensor, advance) for name, tensor in distinct.items()}
        tensors = {name: digests[tensor.stored_name] for name, tensor in chosen.items()}
    lines = "".join(f"{digest} {json.dumps(name)}\n" for name, digest in tensors.items())
    total = hashlib.blake2b(lines.encode(), digest_size=32).hexdigest()
    return Fingerprint(path, total, tensors, None if expected is None else expected.lower(), list_tensors)


def _digest(tensor: LazyTensor[Tensor], advance: Advance) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    digest = hashlib.blake2b(f"{dtype}[{','.join(map(str, tensor.shape))}]\n".encode(), digest_size=32)
    for _, block in read_blocks(tensor):
        digest.update(block.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        advance(block.nbytes)
    return digest.hexdigest()
