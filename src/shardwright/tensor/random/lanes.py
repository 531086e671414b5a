"""Fill a region in cache-sized pieces, each element from its lane of random bits.

A region of a row-major tensor is a set of runs of equal length in the global order. Runs longer than a piece are
split; short ones are processed many at a time, as the rows of a matrix. Words come in whole blocks, so a row may have
extra lanes before and after its elements; `phases` is the number before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardwright.errors import RegionError
from shardwright.layout import Region
from shardwright.tensor.random.philox import WORDS_PER_BLOCK, Key, Numbers, words

__all__ = ["fill"]

_BITS = {torch.int32: 32, torch.int64: 64}
# Elements per piece: small enough for the L2 cache with their lanes, large enough to amortise the calls.
_CPU_PIECE, _DEVICE_PIECE = 1 << 17, 1 << 24


class Piece(NamedTuple):
    """Elements `start` to `stop` of the local tensor, as rows: each from lane `phases[row]` of block `firsts[row]`.

    If all rows have the same phase, `phases` has one entry.
    """

    start: int
    stop: int
    firsts: Numbers
    blocks: int
    phases: Numbers


def fill(
    out: Tensor,
    region: Region,
    shape: Sequence[int],
    key: Key,
    lane: torch.dtype,
    values: Callable[[Tensor], Tensor],
) -> Tensor:
    """Fill `out` with `values` of the lane of each element, an int32 or int64, and return it.

    `values` takes a matrix of lanes, which it may overwrite, and returns a matrix of the same size. Columns start at an
    even lane and their number is even, so it may work on pairs.

    >>> from shardwright.layout import Region
    >>> whole = fill(torch.empty(2, 5), Region.whole((2, 5)), (2, 5), Key(1, 0), torch.int32, lambda lanes: lanes % 10)
    >>> part = fill(torch.empty(2, 2), Region((0, 3), (2, 2)), (2, 5), Key(1, 0), torch.int32, lambda lanes: lanes % 10)
    >>> torch.equal(part, whole[:, 3:])
    True
    """
    if tuple(out.shape) != region.size:
        raise RegionError(
            f"a tensor of shape {tuple(out.shape)} cannot hold region {region}, of size {region.size}: "
            "pass a tensor of the region's size"
        )
    target = out.detach() if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device=out.device)
    flat = target.view(-1)
    for piece in _pieces(region, shape, lane, _CPU_PIECE if out.device.type == "cpu" else _DEVICE_PIECE):
        lanes = words(key, piece.firsts, piece.blocks, out.device).view(lane)
        rows = flat[piece.start : piece.stop].view(len(piece.firsts), -1)
        rows.copy_(_columns(values(lanes), piece.phases, rows.shape[1]))
    if not out.is_contiguous():
        out.detach().copy_(target)
    return out


def _pieces(region: Region, shape: Sequence[int], lane: torch.dtype, size: int) -> Iterator[Piece]:
    per_block = WORDS_PER_BLOCK * 64 // _BITS[lane]
    starts, length = _runs(region, shape)
    if length > size:
        for row, first in enumerate(starts):
            for begin in range(0, length, size):
                end = min(begin + size, length)
                yield _piece(row * length + begin, [first + begin], end - begin, per_block)
    elif length:
        rows = size // length
        for row in range(0, len(starts), rows):
            yield _piece(row * length, starts[row : row + rows], length, per_block)


def _runs(region: Region, shape: Sequence[int]) -> tuple[Numbers, int]:
    """Return where the runs of a region start in the global order, and their length."""
    if region.size == tuple(shape) and not any(region.offset):  # fast path for small tensors
        return [0], region.volume
    starts, length = region.byte_runs(shape, itemsize=1)
    return (starts.tolist() if len(starts) == 1 else starts), length


def _piece(start: int, runs: Numbers, length: int, per_block: int) -> Piece:
    if len(runs) == 1:
        first, phase = divmod(int(runs[0]), per_block)
        return Piece(start, start + length, [first], -(-(phase + length) // per_block), [phase])
    firsts, phases = np.divmod(np.asarray(runs), per_block)
    same = phases[:1] if (phases == phases[0]).all() else phases
    return Piece(start, start + len(runs) * length, firsts, -(-(int(phases.max()) + length) // per_block), same)


def _columns(matrix: Tensor, phases: Numbers, length: int) -> Tensor:
    """Return `length` columns of each row, starting at its phase."""
    if len(phases) == 1:
        return matrix[:, phases[0] : phases[0] + length]
    columns = torch.as_tensor(phases, device=matrix.device)[:, None] + torch.arange(length, device=matrix.device)
    return matrix.gather(1, columns)
