"""Read together with the other ranks of the host: a block that several want is read and verified once."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from torch import Tensor

from shardwright.checkpoint.format.data_file import BLOCK, digest
from shardwright.checkpoint.format.locate import Part
from shardwright.checkpoint.format.manifest import sharding_to_json
from shardwright.checkpoint.reading.data_reader import Destination, copy_window
from shardwright.checkpoint.reading.host_sharing import ReadRequest
from shardwright.checkpoint.reading.host_window import HostWindow
from shardwright.checkpoint.reading.open_files import OpenFiles
from shardwright.checkpoint.reading.read_assignment import ReadAssignment, Segment
from shardwright.checkpoint.reading.targets import Target
from shardwright.checkpoint.runtime.progress import Progress

__all__ = ["digest_of_requests", "read_shared"]


def digest_of_requests(requests: Sequence[ReadRequest]) -> str:
    """Return a digest of the requests: ranks with equal requests and shardings can plan for each other."""
    encoded: dict[int, list[object]] = {}
    for request in requests:
        if id(request.sharding) not in encoded:
            encoded[id(request.sharding)] = sharding_to_json(request.sharding)
    return digest(msgspec.json.encode([[request.number, encoded[id(request.sharding)]] for request in requests]))


def read_shared(
    window: HostWindow,
    files: OpenFiles,
    assignment: ReadAssignment,
    targets: Sequence[Target],
    progress: Progress | None = None,
) -> None:
    """Fill the targets. All ranks of the host call it, with the same assignment.

    Every rank goes through the segments of all ranks; what a segment fills is computed when it is copied. `progress` is
    called with the bytes filled on this rank.
    """
    by_tensor: dict[int, list[Target]] = {}
    for target in targets:
        by_tensor.setdefault(target.number, []).append(target)
    segments = [assignment.segments(index) for index in range(assignment.size)]
    own: dict[int, Segment | None] = {}  # read, but not copied yet

    def read(number: int, slot: Tensor) -> None:
        segment = own[number] = next(segments[number % assignment.size], None)
        if segment is not None:
            files.open(segment.file.rank).read_runs(segment.runs, slot)

    def copy(number: int, slot: Tensor) -> None:
        segment = own.pop(number) if number in own else next(segments[number % assignment.size], None)
        if segment is not None:
            filled = _fill_from(segment, slot, by_tensor)
            if progress is not None and filled:
                progress(filled)

    window.run(assignment.rounds * assignment.size, read, copy)


def _fill_from(segment: Segment, slot: Tensor, by_tensor: dict[int, list[Target]]) -> int:
    """Copy what a segment has of the targets; return the number of bytes."""
    plan, filled = segment.file, 0
    for rank, chunk, first, blocks, at in segment.runs:
        region = plan.region(chunk)
        for target in by_tensor.get(int(plan.tensors[chunk]), ()):
            common = target.region.intersect(region)
            if common is not None:
                nbytes = min(blocks * BLOCK, int(plan.nbytes[chunk]) - first * BLOCK)
                part = Part(rank, chunk, common, region)
                destination = Destination(part, target.tensor, target.region, target.stored)
                filled += copy_window(destination, slot[at : at + nbytes], first * BLOCK, nbytes)
    return filled
