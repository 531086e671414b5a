"""The current checkpoint at a location: read its manifest, and read it again if it is replaced meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import msgspec

from shardwright import comm
from shardwright.checkpoint.format.manifest import KEY, MAX_BYTES, Manifest
from shardwright.checkpoint.format.other_formats import is_only_ours
from shardwright.checkpoint.reading.contents import Contents
from shardwright.checkpoint.reading.host_window import this_host
from shardwright.errors import CheckpointError, CorruptionError, MissingKeyError, NotACheckpointError, RankFailedError
from shardwright.interop.formats import read_foreign
from shardwright.layout.gc import gc_paused
from shardwright.listing import join_first
from shardwright.storage import LocalStorage, Storage

__all__ = ["Current", "read_contents", "read_current", "read_current_on_ranks", "read_manifest"]

T = TypeVar("T")

_MAX_TRIES = 100  # until all ranks see the same manifest
_MAX_PAUSE = 0.05  # seconds between tries
_MAX_LISTED = 16


class Current(NamedTuple):
    """The checkpoint that all ranks of a group read, and an identifier of each rank's host."""

    storage: Storage
    manifest: Contents
    hosts: tuple[str, ...]


class _View(NamedTuple):
    """The checkpoint that a rank sees: the save, the storage, its directory; and the rank's host."""

    save_id: str
    storage: str
    folder: str
    host: str


def read_manifest(storage: Storage) -> Manifest:
    """Read the manifest of the current checkpoint."""
    try:
        reader = storage.open(KEY)
    except MissingKeyError:
        raise NotACheckpointError(f"{storage!r} holds no checkpoint: there is no {KEY}") from None
    with reader:
        if reader.size > MAX_BYTES:
            raise CorruptionError(f"the manifest has {reader.size} bytes, but the maximum is {MAX_BYTES}")
        data = bytearray(reader.size)
        reader.read([memoryview(data)], 0)
    with gc_paused():
        return Manifest.decode(bytes(data))


def read_contents(storage: Storage) -> Contents:
    """Read what the current checkpoint contains, whatever its format."""
    if isinstance(storage, LocalStorage) and (storage.is_file() or not is_only_ours(storage.list_files())):
        contents = read_foreign(storage)
        if contents is not None:
            return contents
    return read_manifest(storage)


def read_current(storage: Storage, work: Callable[[Contents], T]) -> T:
    """Return `work(manifest)` of the current checkpoint; if it is replaced meanwhile, of the one that replaced it.

    A save removes the files of its predecessor, so a missing file may only mean that there is a newer manifest. Open
    files remain readable: `work` opens all it needs before it uses any.
    """
    manifest = read_contents(storage)
    while True:
        try:
            return work(manifest)
        except MissingKeyError as error:
            newer = read_contents(storage)
            if newer.save_id == manifest.save_id:
                raise CorruptionError(f"a file of the checkpoint is missing: {error}") from error
            manifest = newer


def read_current_on_ranks(locate: Callable[[], Storage], group: comm.Group, work: Callable[[Current], T]) -> T:
    """Run `read_current` on all ranks of a group, with the same checkpoint on all of them. `work` is collective.

    `locate` returns the storage; if it raises on any rank, all raise.
    """
    current = _same_on_ranks(locate, group)
    while True:
        try:
            return work(current)
        except RankFailedError as error:
            if not any(failure.kind == MissingKeyError.__name__ for failure in error.failures):
                raise
            newer = _same_on_ranks(locate, group)
            if newer.manifest.save_id == current.manifest.save_id:
                common = comm.common_error(error, group)
                if common is None:
                    raise
                raise CorruptionError(f"a file of the checkpoint is missing: {common}") from common
            current = newer


def _same_on_ranks(locate: Callable[[], Storage], group: comm.Group) -> Current:
    """Read the manifest, retrying until all ranks see the same save (it may be replaced concurrently)."""
    views: list[_View] = []
    host = this_host()

    def look_up() -> tuple[tuple[Storage, Contents], bytes]:
        storage = locate()
        folder = storage.path if isinstance(storage, LocalStorage) else ""
        manifest = read_contents(storage)
        return (storage, manifest), msgspec.json.encode(_View(manifest.save_id, repr(storage), folder, host))

    for attempt in range(_MAX_TRIES):
        (storage, manifest), gathered = comm.agree(look_up, what="load", group=group, gather=True)
        before, views = views, [msgspec.json.decode(view, type=_View) for view in gathered]
        if len({view.save_id for view in views}) == 1:
            return Current(storage, manifest, tuple(view.host for view in views))
        if len({view.folder for view in views}) > 1 and views == before:
            break  # different directories, and none of them is being replaced
        time.sleep(min(_MAX_PAUSE, 0.001 * 2 ** min(attempt, 10)))
    listed = [
        f"rank {rank} reads save {view.save_id} of {view.storage}"
        for rank, view in zip(group.ranks, views, strict=True)
    ]
    raise CheckpointError(
        f"ranks read different checkpoints, but load needs one: {join_first(listed, _MAX_LISTED, '; ')}. Give all "
        "ranks the same shared directory, or copies of one checkpoint"
    )
