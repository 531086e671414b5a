"""Reading on all ranks: files are opened and checked on every one of them before any tensor is touched on any.

What several ranks of a host want is read once among them; see `plan.sharing` and `host_window`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple, TypeVar, final

import torch

from shardwright import comm
from shardwright.checkpoint.format.data_file import BLOCK
from shardwright.checkpoint.format.manifest import Manifest
from shardwright.checkpoint.reading.data_reader import Destination
from shardwright.checkpoint.reading.host_sharing import ReadRequest, shared
from shardwright.checkpoint.reading.host_window import SLOT, HostWindow, open_window
from shardwright.checkpoint.reading.match import TensorMatch
from shardwright.checkpoint.reading.open_files import OpenFiles
from shardwright.checkpoint.reading.read_assignment import ReadAssignment
from shardwright.checkpoint.reading.read_shared import digest_of_requests, read_shared
from shardwright.checkpoint.reading.targets import Target, by_file, check_bools, targets_of
from shardwright.checkpoint.runtime.progress import Progress, ProgressCallback, reporting
from shardwright.errors import CorruptionError, StorageError
from shardwright.storage import Storage

__all__ = ["CollectiveRead", "ReadSummary", "read_alone"]

T = TypeVar("T")

_MAX_LISTED = 10
_MIN_BYTES_PER_SECOND = 5 << 20  # bytes a second below which a rank that reads counts as stuck


class ReadSummary(NamedTuple):
    """What a rank tells the others of its reading, before any of them reads."""

    requests: str  # a digest: ranks that ask for the same can plan for each other
    shares: bool  # whether it wants blocks that others of its host want, too, if all of those ask for the same
    is_open: bool  # whether its files are open and checked, all of them; not yet, where it shares
    nbytes: int  # that it fills
    slot: int  # bytes of a slot of the window, 0 for none


class _Plan(NamedTuple):
    """What this rank fills by itself, from which files, and what with the others of its host."""

    alone: list[Target]
    by_file: dict[int, list[Destination]]
    ours: list[Target]
    assignment: ReadAssignment | None


def read_alone(
    storage: Storage,
    manifest: Manifest,
    targets: Sequence[Target],
    threads: int,
    progress: ProgressCallback | None,
    memory: int | None = None,
) -> None:
    """Fills the targets, by this process alone."""
    wanted = by_file(targets, manifest.locator)
    with ExitStack() as opened, torch.no_grad():
        files = OpenFiles(storage, manifest, opened)
        files.open_all(wanted)
        with reporting("loading", _nbytes(targets), progress, comm.world()) as meter:
            _fill(files, targets, wanted, threads, meter, memory)


@final
class CollectiveRead:
    """What is read on all ranks of a group, as this one sees it.

    `hosts` tell where each of them runs. `memory` bounds what is read aside: where ranks read together, half of it is
    this rank's slots of the window.
    """

    def __init__(
        self,
        files: OpenFiles,
        wanted: Sequence[TensorMatch],
        group: comm.Group,
        hosts: Sequence[str],
        memory: int | None,
    ) -> None:
        self._files, self._wanted, self._group, self._hosts, self._memory = files, wanted, group, hosts, memory
        # Who is alone has nobody to share with.
        self._requests = [ReadRequest(number, leaf.sharding) for _, leaf, number in wanted] if group.size > 1 else []
        self._plan = _Plan([], {}, [], None)

    def prepare(self) -> ReadSummary:
        """Plans for this rank alone and opens its files, unless it shares: that depends on the others."""
        group, manifest, memory = self._group, self._files.manifest, self._memory
        neighbours = [rank for rank, host in zip(group.ranks, self._hosts, strict=True) if host == self._own_host]
        shares = any(shared(self._requests, manifest.locator, neighbours))
        targets = targets_of(self._wanted, manifest)
        is_open = False
        if not shares:
            self._plan = _Plan(targets, by_file(targets, manifest.locator), [], None)
            try:
                self._files.open_all(self._plan.by_file)
                is_open = True
            except (StorageError, CorruptionError):
                pass  # they are opened again once all else is known to fit: then it is raised, on all ranks
        slot = SLOT if memory is None else min(SLOT, memory // 4 // BLOCK * BLOCK)
        requests = digest_of_requests(self._requests) if group.size > 1 else ""
        return ReadSummary(requests, shares, is_open, _nbytes(targets), slot)

    def read(
        self, said: Sequence[ReadSummary], threads: int, progress: ProgressCallback | None, finish: Callable[[], T]
    ) -> T:
        """Fills what is wanted, on all ranks, and gives what `finish` makes of it. All of them call it.

        `said` are the needs of all. A failure on any rank, in reading or in `finish`, is raised on all.
        """
        group = self._group
        # A rank that dies is noticed at once, however long this is: the usual, and twice its part from a slow disk.
        patience = comm.default_timeout() + 2 * max(one.nbytes for one in said) / _MIN_BYTES_PER_SECOND
        slot = min(one.slot for one in said)
        alike = zip(group.ranks, self._hosts, (one.requests for one in said), strict=True)
        peers = [
            rank for rank, host, requests in alike if (host, requests) == (self._own_host, said[group.rank].requests)
        ]
        shares = self._any_shares(said, peers)
        with ExitStack() as closing:
            window = open_window(group, peers, patience, slot) if shares and slot else None
            if window is not None:
                closing.callback(window.close)
            if shares or not all(one.is_open for one in said):
                self._plan = comm.agree(
                    lambda: self._plan_and_open(peers, window), what="load: opening its files", group=group
                )

            def read_and_finish() -> T:
                with torch.no_grad():
                    _telling(lambda: self._fill(window, said[group.rank].nbytes, threads, progress), window)
                return finish()

            return comm.agree(read_and_finish, what="load: reading", group=group, timeout=patience)

    @property
    def _own_host(self) -> str:
        return self._hosts[self._group.rank]

    def _any_shares(self, said: Sequence[ReadSummary], peers: Sequence[int]) -> bool:
        """Whether any rank of the group reads with others: it has told so, if all of its host ask for the same."""
        requests = {(host, one.requests) for host, one in zip(self._hosts, said, strict=True)}
        if len(requests) == len(set(self._hosts)):
            return any(one.shares for one in said)
        locator = self._files.manifest.locator

        def look() -> tuple[None, bytes]:
            return None, b"1" if any(shared(self._requests, locator, peers)) else b""

        return any(comm.agree_telling(look, what="load: planning", group=self._group)[1])

    def _plan_and_open(self, peers: Sequence[int], window: HostWindow | None) -> _Plan:
        """What is read alone and what together, its files open and checked."""
        requests, wanted, manifest = self._requests, self._wanted, self._files.manifest
        both = shared(requests, manifest.locator, peers) if window is not None else [False] * len(wanted)
        alone = targets_of([one for one, common in zip(wanted, both, strict=True) if not common], manifest)
        ours = targets_of([one for one, common in zip(wanted, both, strict=True) if common], manifest)
        assignment = None
        if window is not None and any(both):
            together = [ask for ask, common in zip(requests, both, strict=True) if common]
            assignment = ReadAssignment(together, manifest.locator, peers, window.slot)
        me = peers.index(self._group.ranks[self._group.rank])
        wanted_alone = by_file(alone, manifest.locator)
        self._files.open_all({*wanted_alone, *(assignment.files_of(me) if assignment is not None else ())})
        return _Plan(alone, wanted_alone, ours, assignment)

    def _fill(self, window: HostWindow | None, nbytes: int, threads: int, progress: ProgressCallback | None) -> None:
        plan, memory = self._plan, self._memory
        aside = memory if memory is None or window is None else memory // 2
        with reporting("loading", nbytes, progress, self._group) as meter:
            _fill(self._files, plan.alone, plan.by_file, threads, meter, aside)
            if window is not None and plan.assignment is not None:
                _fill_together(self._files, plan.ours, plan.assignment, window, meter)


def _nbytes(targets: Sequence[Target]) -> int:
    """The stored bytes that fill these targets."""
    return sum(target.region.volume * target.stored.itemsize for target in targets)


def _telling(work: Callable[[], None], window: HostWindow | None) -> None:
    """Does the work; where it fails, the others of the host are told, who would wait for this rank's part."""
    try:
        work()
    except BaseException:
        if window is not None:
            window.fail()
        raise


def _fill(
    files: OpenFiles,
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
    except (CorruptionError, StorageError) as error:
        raise _with_what_was_written(error, targets, files.manifest, begun) from error


def _fill_together(
    files: OpenFiles, targets: Sequence[Target], assignment: ReadAssignment, window: HostWindow, progress: Progress
) -> None:
    try:
        read_shared(window, files, assignment, targets, progress)
        check_bools(targets)
    except (CorruptionError, StorageError) as error:
        raise _with_what_was_written(error, targets, files.manifest, assignment.files) from error


def _with_what_was_written(
    error: CorruptionError | StorageError, targets: Sequence[Target], manifest: Manifest, begun: Collection[int]
) -> CorruptionError | StorageError:
    """Return the error with the names of the caller's tensors that may hold new values by now."""
    names = dict.fromkeys(
        target.name
        for target in targets
        if any(part.rank in begun for part in manifest.locator.parts(target.number, target.region))
    )
    told = ", ".join(map(repr, list(names)[:_MAX_LISTED]))
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    kind = CorruptionError if isinstance(error, CorruptionError) else StorageError
    return kind(f"{error}; written already, in whole or in part: {told}{more}")
