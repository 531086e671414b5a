"""Ranks of one host reading together: every block that several of them want is read and verified once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from torch import Tensor

from shardwright.checkpoint.format.datafile import BLOCK, digest
from shardwright.checkpoint.format.manifest import Manifest, placing_to_json
from shardwright.checkpoint.plan.sharing import Ask, Run
from shardwright.checkpoint.read.file import Destination, copy_window
from shardwright.checkpoint.read.files import Files
from shardwright.checkpoint.read.host_window import HostWindow
from shardwright.checkpoint.write.file import Progress

__all__ = ["digest_of_asks", "read_together"]


def digest_of_asks(asks: Sequence[Ask]) -> str:
    """What ranks compare: those that ask for the same, under the same placings, can plan for each other."""
    known: dict[int, list[object]] = {}
    for ask in asks:
        if id(ask.placing) not in known:
            known[id(ask.placing)] = placing_to_json(ask.placing)
    return digest(msgspec.json.encode([[ask.number, known[id(ask.placing)]] for ask in asks]))


def read_together(
    window: HostWindow,
    files: Files,
    parts: Sequence[Sequence[Run]],
    destinations: Mapping[tuple[int, int], Sequence[Destination]],
    progress: Progress | None = None,
) -> None:
    """Fills the destinations, given by file and chunk. All ranks of the host call it, with the same segments.

    `progress` is told the bytes that were filled here.
    """

    def read(number: int, slot: Tensor) -> None:
        files.open(parts[number][0].rank).read_runs(parts[number], slot)

    def copy(number: int, slot: Tensor) -> None:
        filled = 0
        for run in parts[number]:
            nbytes = _nbytes(files.manifest, run)
            for destination in destinations.get((run.rank, run.chunk), ()):
                filled += copy_window(destination, slot[run.at : run.at + nbytes], run.first * BLOCK, nbytes)
        if progress is not None and filled:
            progress(filled)

    window.run(len(parts), read, copy)


def _nbytes(manifest: Manifest, run: Run) -> int:
    chunk = int(manifest.finder.file(run.rank).nbytes[run.chunk])
    return min(run.blocks * BLOCK, chunk - run.first * BLOCK)
