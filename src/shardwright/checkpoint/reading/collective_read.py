"""Read on all ranks: every rank opens and checks its files before any tensor is changed on any rank.

Blocks that several ranks of a host want are read once among them; see `host_sharing` and `host_window`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple, TypeVar, final

import torch

from shardwright import comm
from shardwright.checkpoint.format.data_file import BLOCK
from shardwright.checkpoint.reading.check_together import check_together
from shardwright.checkpoint.reading.contents import Contents, format_of
from shardwright.checkpoint.reading.data_reader import Destination
from shardwright.checkpoint.reading.host_sharing import ReadRequest, shared
from shardwright.checkpoint.reading.host_window import SLOT, HostWindow, open_window
from shardwright.checkpoint.reading.mapped_reads import MappedReads
from shardwright.checkpoint.reading.match import TensorMatch
from shardwright.checkpoint.reading.open_files import OpenFiles
from shardwright.checkpoint.reading.read_assignment import ReadAssignment
from shardwright.checkpoint.reading.read_shared import digest_of_requests, read_shared
from shardwright.checkpoint.reading.request import LoadRequest
from shardwright.checkpoint.reading.targets import Target, by_file, check_bools, targets_of
from shardwright.checkpoint.runtime.progress import Progress, ProgressCallback, reporting
from shardwright.errors import CorruptionError, StorageError
from shardwright.listing import join_first
from shardwright.storage import Storage

__all__ = ["CollectiveRead", "ReadSummary", "read_alone"]

T = TypeVar("T")

_MAX_LISTED = 10
_MIN_BYTES_PER_SECOND = 5 << 20  # a rank that reads more slowly than this counts as stuck


class ReadSummary(NamedTuple):
    """What a rank reports about its reads before any rank starts reading."""

    requests: str  # digest of its requests: ranks with equal requests can plan for each other
    shares: bool  # True if it wants blocks that other ranks of its host want, given that all have equal requests
    is_open: bool  # True if all its files are open and checked; False if it shares reads
    nbytes: int  # to be filled on this rank
    slot: int  # size of a slot of the shared window in bytes, 0 for none


class _Plan(NamedTuple):
    """The targets that this rank fills alone, with their files, and those it fills together with its host."""

    alone: list[Target]
    by_file: dict[int, list[Destination]]
    shared: list[Target]
    assignment: ReadAssignment | None


def read_alone(
    storage: Storage,
    manifest: Contents,
    targets: Sequence[Target],
    threads: int,
    progress: ProgressCallback | None,
    memory: int | None = None,
) -> None:
    """Fill the targets in this process alone."""
    destinations = by_file(targets, manifest.locator)
    with ExitStack() as opened, torch.no_grad():
        files = OpenFiles(storage, manifest, opened)
        files.open_all(destinations)
        with reporting("loading", _nbytes(targets), progress, comm.world()) as meter:
            _fill(files, targets, destinations, threads, meter, memory)


@final
class CollectiveRead:
    """The reads of a load on this rank; `hosts` identifies the host of each rank of the group.

    `request.memory` bounds the buffers; when ranks of a host read together, half of it is this rank's slots of the
    shared window. `mapped` has the reads of tensors that are made of others: each rank reads them alone.
    """

    def __init__(
        self,
        files: OpenFiles,
        matches: Sequence[TensorMatch],
        request: LoadRequest,
        hosts: Sequence[str],
        mapped: MappedReads | None = None,
    ) -> None:
        self._files, self._matches, self._request, self._hosts = files, matches, request, hosts
        self._group = request.group
        self._mapped = MappedReads() if mapped is None else mapped
        # A single rank shares with no other.
        self._requests = (
            [ReadRequest(number, leaf.sharding) for _, leaf, number in matches] if self._group.size > 1 else []
        )
        self._plan = _Plan([], {}, [], None)

    def prepare(self) -> ReadSummary:
        """Plan for this rank alone and open its files, unless it shares reads: that depends on the other ranks."""
        group, manifest, memory = self._group, self._files.manifest, self._request.memory
        host_ranks = [rank for rank, host in zip(group.ranks, self._hosts, strict=True) if host == self._own_host]
        shares = any(shared(self._requests, manifest.locator, host_ranks))
        targets = [*targets_of(self._matches, manifest), *self._mapped.direct]
        is_open = False
        if not shares:
            self._plan = _Plan(targets, by_file(targets, manifest.locator), [], None)
            try:
                self._files.open_all({*self._plan.by_file, *self._mapped.files(manifest.locator)})
                is_open = True
            except (StorageError, CorruptionError):
                pass  # raised on all ranks when the files are opened again, after all mismatches are known
        slot = SLOT if memory is None else min(SLOT, memory // 4 // BLOCK * BLOCK)
        requests = digest_of_requests(self._requests) if group.size > 1 else ""
        return ReadSummary(requests, shares, is_open, _nbytes(targets) + self._mapped.nbytes, slot)

    def run(self, summaries: Sequence[ReadSummary], finish: Callable[[], T]) -> T:
        """Fill the targets on all ranks and return the result of `finish`. Collective.

        `summaries` are those of all ranks. A failure on any rank, in reading or in `finish`, is raised on all.
        """
        group = self._group
        own_summary = summaries[group.rank]
        # The default plus twice the time a slow disk needs. A rank that dies is noticed at once, however long this is.
        timeout = comm.default_timeout() + 2 * max(summary.nbytes for summary in summaries) / _MIN_BYTES_PER_SECOND
        slot = min(summary.slot for summary in summaries)
        candidates = zip(group.ranks, self._hosts, (summary.requests for summary in summaries), strict=True)
        peers = [
            rank for rank, host, requests in candidates if (host, requests) == (self._own_host, own_summary.requests)
        ]
        shares = self._any_shares(summaries, peers)
        with ExitStack() as closing:
            window = open_window(group, peers, timeout, slot) if shares and slot else None
            if window is not None:
                closing.callback(window.close)
            if shares or not all(summary.is_open for summary in summaries):
                self._plan = comm.agree(
                    lambda: self._plan_and_open(peers, window), what="load: opening its files", group=group
                )

            def read() -> None:
                with torch.no_grad():
                    _fail_window_on_error(lambda: self._fill(window, own_summary.nbytes), window)

            def read_and_finish() -> T:
                read()
                return finish()

            if group.size > 1 and format_of(self._files.manifest) != "shardwright":
                check_together(self._files, read, group, timeout)
                return comm.agree(finish, what="load: filling the state", group=group)

            return comm.agree(read_and_finish, what="load: reading", group=group, timeout=timeout)

    @property
    def _own_host(self) -> str:
        return self._hosts[self._group.rank]

    def _any_shares(self, summaries: Sequence[ReadSummary], peers: Sequence[int]) -> bool:
        """Return True if any rank of the group shares reads.

        The summaries are exact if all ranks of each host have equal requests; otherwise the ranks report once more.
        """
        requests = {(host, summary.requests) for host, summary in zip(self._hosts, summaries, strict=True)}
        if len(requests) == len(set(self._hosts)):
            return any(summary.shares for summary in summaries)
        locator = self._files.manifest.locator

        def plan() -> tuple[None, bytes]:
            return None, b"1" if any(shared(self._requests, locator, peers)) else b""

        return any(comm.agree(plan, what="load: planning", group=self._group, gather=True)[1])

    def _plan_and_open(self, peers: Sequence[int], window: HostWindow | None) -> _Plan:
        """Plan what to read alone and what together; open and check the files."""
        requests, matches, manifest = self._requests, self._matches, self._files.manifest
        is_shared = shared(requests, manifest.locator, peers) if window is not None else [False] * len(matches)
        alone = targets_of(
            [item for item, is_common in zip(matches, is_shared, strict=True) if not is_common], manifest
        )
        alone += self._mapped.direct
        together = targets_of([item for item, is_common in zip(matches, is_shared, strict=True) if is_common], manifest)
        assignment = None
        if window is not None and any(is_shared):
            common_requests = [item for item, is_common in zip(requests, is_shared, strict=True) if is_common]
            assignment = ReadAssignment(common_requests, manifest.locator, peers, window.slot)
        index = peers.index(self._group.global_rank)
        destinations = by_file(alone, manifest.locator)
        shared_files = assignment.files_of(index) if assignment is not None else ()
        self._files.open_all({*destinations, *shared_files, *self._mapped.files(manifest.locator)})
        return _Plan(alone, destinations, together, assignment)

    def _fill(self, window: HostWindow | None, nbytes: int) -> None:
        plan, memory, threads = self._plan, self._request.memory, self._request.threads
        own_memory = memory if memory is None or window is None else memory // 2
        with reporting("loading", nbytes, self._request.progress, self._group) as meter:
            _fill(self._files, plan.alone, plan.by_file, threads, meter, own_memory)
            if window is not None and plan.assignment is not None:
                _fill_shared(self._files, plan.shared, plan.assignment, window, meter)

            def fill_buffers(targets: Sequence[Target]) -> None:
                destinations = by_file(targets, self._files.manifest.locator)
                _fill(self._files, targets, destinations, threads, meter, own_memory)

            self._mapped.fill(fill_buffers, own_memory)


def _nbytes(targets: Sequence[Target]) -> int:
    """Return the number of stored bytes that fill these targets."""
    return sum(target.region.volume * target.stored.itemsize for target in targets)


def _fail_window_on_error(work: Callable[[], None], window: HostWindow | None) -> None:
    """Run `work`; if it raises, mark this rank as failed in the window, so that the host's ranks do not wait for it."""
    try:
        work()
    except BaseException:
        if window is not None:
            window.fail()
        raise


def _fill(
    files: OpenFiles,
    targets: Sequence[Target],
    destinations: Mapping[int, Sequence[Destination]],
    threads: int,
    progress: Progress,
    memory: int | None,
) -> None:
    """Fill the targets from open files, one file after the other."""
    started: list[int] = []
    try:
        for rank, parts in sorted(destinations.items()):
            started.append(rank)
            files.open(rank).read(parts, threads, progress, memory)
        check_bools(targets)
    except (CorruptionError, StorageError) as error:
        raise _with_changed_names(error, targets, files.manifest, started) from error


def _fill_shared(
    files: OpenFiles,
    targets: Sequence[Target],
    assignment: ReadAssignment,
    window: HostWindow,
    progress: Progress,
) -> None:
    try:
        read_shared(window, files, assignment, targets, progress)
        check_bools(targets)
    except (CorruptionError, StorageError) as error:
        raise _with_changed_names(error, targets, files.manifest, assignment.files) from error


def _with_changed_names(
    error: CorruptionError | StorageError, targets: Sequence[Target], manifest: Contents, started: Collection[int]
) -> CorruptionError | StorageError:
    """Return the error with the names of the caller's tensors that may already hold new values."""
    names = dict.fromkeys(
        repr(target.name)
        for target in targets
        if any(part.rank in started for part in manifest.locator.parts(target.number, target.region))
    )
    kind = CorruptionError if isinstance(error, CorruptionError) else StorageError
    return kind(f"{error}; already changed, in whole or in part: {join_first(list(names), _MAX_LISTED)}")
