"""Reading on all ranks: files are opened and checked on every one of them before any tensor is touched on any.

What several ranks of a host want is read once among them; see `plan.sharing` and `host_window`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import msgspec
import torch

from shardwright import comm
from shardwright.checkpoint.format.datafile import BLOCK
from shardwright.checkpoint.format.manifest import Manifest
from shardwright.checkpoint.plan.sharing import Ask, Run, segments, shared
from shardwright.checkpoint.read.file import Destination
from shardwright.checkpoint.read.files import Files
from shardwright.checkpoint.read.host_window import SLOT, HostWindow, open_window, ranks_of_host
from shardwright.checkpoint.read.match import Wanted
from shardwright.checkpoint.read.targets import Target, by_chunk, by_file, check_bools, targets_of
from shardwright.checkpoint.read.together import digest_of_asks, read_together
from shardwright.checkpoint.work.progress import Report, reporting
from shardwright.checkpoint.write.file import Progress
from shardwright.errors import CorruptionError
from shardwright.layout.collecting import not_collecting
from shardwright.storage import Storage

__all__ = ["read_alone", "read_on_ranks"]

_MOST_TOLD = 10
_SLOWEST = 5 << 20  # bytes a second below which a rank that reads counts as stuck


class _Limits(NamedTuple):
    """What the ranks of a group know of each other before they read: whether any shares, the most, the least."""

    shares: bool
    nbytes: int  # that a rank fills
    slot: int  # bytes of a slot of the window, 0 for none

    @property
    def patience(self) -> float:
        """Seconds to wait for a rank that reads: the usual, and what twice its part takes on a slow disk.

        A rank that dies is noticed at once, however long this is.
        """
        return comm.default_timeout() + 2 * self.nbytes / _SLOWEST


class _Plan(NamedTuple):
    """What this rank fills by itself, from which files, and what with the others of its host, in which segments."""

    alone: list[Target]
    by_file: dict[int, list[Destination]]
    ours: list[Target]
    parts: list[list[Run]]


def read_alone(
    storage: Storage,
    manifest: Manifest,
    targets: Sequence[Target],
    threads: int,
    progress: Report | None,
    memory: int | None = None,
) -> None:
    """Fills the targets, by this process alone."""
    with not_collecting():
        wanted = by_file(targets, manifest.finder)
    with ExitStack() as opened, torch.no_grad():
        files = Files(storage, manifest, opened)
        files.open_all(wanted)
        with reporting("loading", _nbytes(targets), progress, comm.world()) as meter:
            _fill(files, targets, wanted, threads, meter, memory)


def read_on_ranks(
    storage: Storage,
    manifest: Manifest,
    wanted: Sequence[Wanted],
    group: comm.Group,
    threads: int = 2,
    progress: Report | None = None,
    memory: int | None = None,
) -> None:
    """Fills what is wanted, on all ranks of the group. A failure on any of them is raised on all.

    `memory` bounds what is read aside: where ranks read together, half of it is this rank's slots of the window.
    """
    asks = [Ask(number, leaf.placing) for _, leaf, number in wanted]
    ranks = ranks_of_host(group, digest_of_asks(asks) if group.size > 1 else "")
    with ExitStack() as opened, torch.no_grad():
        files = Files(storage, manifest, opened)
        limits = _limits(group, ranks, asks, wanted, manifest, memory)
        window = open_window(group, ranks, limits.patience, limits.slot) if limits.shares and limits.slot else None
        if window is not None:
            opened.callback(window.close)

        def check() -> _Plan:
            both = shared(asks, manifest.finder, ranks) if window is not None else [False] * len(asks)
            alone = targets_of([one for one, common in zip(wanted, both, strict=True) if not common], manifest)
            ours = targets_of([one for one, common in zip(wanted, both, strict=True) if common], manifest)
            together = [ask for ask, common in zip(asks, both, strict=True) if common]
            parts = segments(together, manifest.finder, ranks, limits.slot) if together else []
            me = ranks.index(group.ranks[group.rank])
            wanted_alone = by_file(alone, manifest.finder)
            files.open_all({*wanted_alone, *(runs[0].rank for runs in parts[me :: len(ranks)])})
            return _Plan(alone, wanted_alone, ours, parts)

        with not_collecting():
            plan = comm.agree(check, what="load: opening its files", group=group)

        def read() -> None:
            aside = memory if memory is None or window is None else memory // 2
            with reporting("loading", _nbytes([*plan.alone, *plan.ours]), progress, group) as meter:
                _fill(files, plan.alone, plan.by_file, threads, meter, aside)
                if window is not None:
                    _fill_together(files, plan.ours, plan.parts, window, meter)

        comm.agree(_telling(read, window), what="load: reading", group=group, timeout=limits.patience)


def _limits(
    group: comm.Group,
    ranks: Sequence[int],
    asks: Sequence[Ask],
    wanted: Sequence[Wanted],
    manifest: Manifest,
    memory: int | None,
) -> _Limits:
    """Whether any rank has something to read with others of its host, and what all of them keep to."""
    if group.size == 1:
        return _Limits(False, 0, 0)
    some = comm.agree(lambda: any(shared(asks, manifest.finder, ranks)), what="load: planning", group=group)
    slot = SLOT if memory is None else min(SLOT, memory // 4 // BLOCK * BLOCK)
    own = _Limits(some, _nbytes(targets_of(wanted, manifest)), slot)
    said = comm.gather_bytes(msgspec.json.encode(own), group, what="load: what is read together")
    all_of = [msgspec.json.decode(one, type=_Limits) for one in said]
    return _Limits(
        any(one.shares for one in all_of), max(one.nbytes for one in all_of), min(one.slot for one in all_of)
    )


def _nbytes(targets: Sequence[Target]) -> int:
    """The stored bytes that fill these targets."""
    return sum(target.region.volume * target.stored.itemsize for target in targets)


def _telling(work: Callable[[], None], window: HostWindow | None) -> Callable[[], None]:
    """The work; where it fails, the others of the host are told, who would wait for this rank's part."""

    def told() -> None:
        try:
            work()
        except BaseException:
            if window is not None:
                window.fail()
            raise

    return told


def _fill(
    files: Files,
    targets: Sequence[Target],
    wanted: Mapping[int, Sequence[Destination]],
    threads: int,
    progress: Progress,
    memory: int | None,
) -> None:
    """Fills the targets from files that are open, one file after the other."""
    begun: list[int] = []
    try:
        for rank, destinations in sorted(wanted.items()):
            begun.append(rank)
            files.open(rank).read(destinations, threads, progress, memory)
        check_bools(targets)
    except CorruptionError as error:
        raise _with_what_was_written(error, targets, files.manifest, begun) from error


def _fill_together(
    files: Files, targets: Sequence[Target], parts: Sequence[list[Run]], window: HostWindow, progress: Progress
) -> None:
    try:
        read_together(window, files, parts, by_chunk(targets, files.manifest.finder), progress)
        check_bools(targets)
    except CorruptionError as error:
        raise _with_what_was_written(error, targets, files.manifest, {runs[0].rank for runs in parts}) from error


def _with_what_was_written(
    error: CorruptionError, targets: Sequence[Target], manifest: Manifest, begun: Collection[int]
) -> CorruptionError:
    """The error, with the names of the caller's tensors that may hold new values by now."""
    names = dict.fromkeys(
        target.name
        for target in targets
        if any(part.rank in begun for part in manifest.finder.parts(target.number, target.region))
    )
    told = ", ".join(map(repr, list(names)[:_MOST_TOLD]))
    more = f" and {len(names) - _MOST_TOLD} more" if len(names) > _MOST_TOLD else ""
    return CorruptionError(f"{error}; written already, in whole or in part: {told}{more}")
