"""Reading on all ranks: files are opened and checked on every one of them before any tensor is touched on any.

What several ranks of a host want is read once among them; see `plan.sharing` and `host_window`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch

from shardwright import comm
from shardwright.checkpoint.files import Files
from shardwright.checkpoint.host_window import SLOT, HostWindow, open_window, ranks_of_host
from shardwright.checkpoint.manifest import Manifest
from shardwright.checkpoint.match import Wanted
from shardwright.checkpoint.plan.sharing import Ask, Run, segments, shared
from shardwright.checkpoint.read import Destination
from shardwright.checkpoint.read_together import digest_of_asks, read_together
from shardwright.checkpoint.targets import Target, by_chunk, by_file, check_bools, targets_of
from shardwright.checkpoint.write import Progress
from shardwright.errors import CorruptionError
from shardwright.layout.collecting import not_collecting
from shardwright.storage import Storage

__all__ = ["read_alone", "read_on_ranks"]

_MOST_TOLD = 10


class _Plan(NamedTuple):
    """What this rank fills by itself, from which files, and what with the others of its host, in which segments."""

    alone: list[Target]
    by_file: dict[int, list[Destination]]
    ours: list[Target]
    parts: list[list[Run]]


def read_alone(
    storage: Storage, manifest: Manifest, targets: Sequence[Target], threads: int, progress: Progress | None
) -> None:
    """Fills the targets, by this process alone."""
    with not_collecting():
        wanted = by_file(targets, manifest.finder)
    with ExitStack() as opened, torch.no_grad():
        files = Files(storage, manifest, opened)
        files.open_all(wanted)
        _fill(files, targets, wanted, threads, progress)


def read_on_ranks(
    storage: Storage,
    manifest: Manifest,
    wanted: Sequence[Wanted],
    group: comm.Group,
    threads: int = 2,
    progress: Progress | None = None,
) -> None:
    """Fills what is wanted, on all ranks of the group. A failure on any of them is raised on all."""
    asks = [Ask(number, leaf.placing) for _, leaf, number in wanted]
    ranks = ranks_of_host(group, digest_of_asks(asks) if group.size > 1 else "")
    with ExitStack() as opened, torch.no_grad():
        files = Files(storage, manifest, opened)
        window = _window(group, ranks, asks, manifest)
        if window is not None:
            opened.callback(window.close)

        def check() -> _Plan:
            both = shared(asks, manifest.finder, ranks) if window is not None else [False] * len(asks)
            alone = targets_of([one for one, common in zip(wanted, both, strict=True) if not common], manifest)
            ours = targets_of([one for one, common in zip(wanted, both, strict=True) if common], manifest)
            together = [ask for ask, common in zip(asks, both, strict=True) if common]
            parts = segments(together, manifest.finder, ranks, SLOT)
            me = ranks.index(group.ranks[group.rank])
            wanted_alone = by_file(alone, manifest.finder)
            files.open_all({*wanted_alone, *(runs[0].rank for runs in parts[me :: len(ranks)])})
            return _Plan(alone, wanted_alone, ours, parts)

        with not_collecting():
            plan = comm.agree(check, what="load: opening its files", group=group)

        def read() -> None:
            _fill(files, plan.alone, plan.by_file, threads, progress)
            if window is not None:
                _fill_together(files, plan.ours, plan.parts, window, progress)

        comm.agree(_telling(read, window), what="load: reading", group=group)


def _window(group: comm.Group, ranks: Sequence[int], asks: Sequence[Ask], manifest: Manifest) -> HostWindow | None:
    """Shared memory for the ranks of this host, where any of the group's has something to read together."""
    if group.size == 1:
        return None
    some = comm.agree(lambda: any(shared(asks, manifest.finder, ranks)), what="load: planning", group=group)
    if not any(comm.gather_bytes(b"1" if some else b"", group, what="load: what is read together")):
        return None
    return open_window(group, ranks, comm.default_timeout())


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
    progress: Progress | None,
) -> None:
    """Fills the targets from files that are open, one file after the other."""
    begun: list[int] = []
    try:
        for rank, destinations in sorted(wanted.items()):
            begun.append(rank)
            files.open(rank).read(destinations, threads, progress)
        check_bools(targets)
    except CorruptionError as error:
        raise _with_what_was_written(error, targets, files.manifest, begun) from error


def _fill_together(
    files: Files, targets: Sequence[Target], parts: Sequence[list[Run]], window: HostWindow, progress: Progress | None
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
