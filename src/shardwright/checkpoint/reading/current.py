"""The checkpoint that is there: its manifest, read and checked, and read anew where it is replaced meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import msgspec

from shardwright import comm
from shardwright.checkpoint.format.manifest import KEY, MAX_BYTES, Manifest
from shardwright.checkpoint.reading.host_window import this_host
from shardwright.errors import CheckpointError, CorruptionError, MissingKeyError, NotACheckpointError, RankFailedError
from shardwright.layout.gc import gc_paused
from shardwright.listing import join_first
from shardwright.storage import LocalStorage, Storage

__all__ = ["Current", "check_sizes", "read_current", "read_current_on_ranks", "read_manifest"]

T = TypeVar("T")

_MAX_TRIES = 100  # for ranks to see one manifest
_MAX_PAUSE = 0.05  # seconds between them
_MAX_LISTED = 16


class Current(NamedTuple):
    """The checkpoint that is there, the same on all ranks of a group, and what tells the host of each of them."""

    storage: Storage
    manifest: Manifest
    hosts: tuple[str, ...]


class _Sight(NamedTuple):
    """What a rank sees: which save, of which storage, in which folder, from which host."""

    save_id: str
    where: str
    folder: str
    host: str


def read_manifest(storage: Storage) -> Manifest:
    """The manifest of the checkpoint that is there now."""
    try:
        reader = storage.open(KEY)
    except MissingKeyError:
        raise NotACheckpointError(f"{storage!r} holds no checkpoint: there is no {KEY}") from None
    with reader:
        if reader.size > MAX_BYTES:
            raise CorruptionError(f"the manifest has {reader.size} bytes, and none has more than {MAX_BYTES}")
        data = bytearray(reader.size)
        reader.read([memoryview(data)], 0)
    with gc_paused():
        return Manifest.decode(bytes(data))


def read_current(storage: Storage, work: Callable[[Manifest], T]) -> T:
    """What `work` makes of the checkpoint that is there; where it is replaced meanwhile, of the one that replaced it.

    A save removes the files of the one before it, so a file that is missing may only mean that there is a newer
    manifest. Files that are open stay readable: `work` opens all it needs before it uses any.
    """
    manifest = read_manifest(storage)
    while True:
        try:
            return work(manifest)
        except MissingKeyError as error:
            newer = read_manifest(storage)
            if newer.save_id == manifest.save_id:
                raise CorruptionError(f"a file of the checkpoint is missing: {error}") from error
            manifest = newer


def check_sizes(storage: Storage, manifest: Manifest) -> None:
    """Sees that every file is there and has its size; nothing is read."""
    for rank, expected in manifest.files.items():
        name = manifest.file_name(rank)
        with storage.open(name) as reader:
            if reader.size != expected.size:
                raise CorruptionError(f"{name} has {reader.size} bytes, and the manifest says {expected.size}")


def read_current_on_ranks(place: Callable[[], Storage], group: comm.Group, work: Callable[[Current], T]) -> T:
    """`read_current` on all ranks of a group, of one checkpoint, the same on all of them. `work` is collective.

    `place` says where it is; what it raises on any rank is raised on all.
    """
    current = _same_on_ranks(place, group)
    while True:
        try:
            return work(current)
        except RankFailedError as error:
            if not any(failure.kind == MissingKeyError.__name__ for failure in error.failures):
                raise
            newer = _same_on_ranks(place, group)
            if newer.manifest.save_id == current.manifest.save_id:
                own = comm.common_error(error, group)
                if own is None:
                    raise
                raise CorruptionError(f"a file of the checkpoint is missing: {own}") from own
            current = newer


def _same_on_ranks(place: Callable[[], Storage], group: comm.Group) -> Current:
    """The manifest, the same one on all ranks, though the checkpoint be replaced while they read it."""
    said: list[_Sight] = []
    host = this_host()

    def look() -> tuple[tuple[Storage, Manifest], bytes]:
        storage = place()
        folder = storage.path if isinstance(storage, LocalStorage) else ""
        manifest = read_manifest(storage)
        return (storage, manifest), msgspec.json.encode(_Sight(manifest.save_id, repr(storage), folder, host))

    for attempt in range(_MAX_TRIES):
        (storage, manifest), told = comm.agree(look, what="load", group=group, gather=True)
        before, said = said, [msgspec.json.decode(one, type=_Sight) for one in told]
        if len({one.save_id for one in said}) == 1:
            return Current(storage, manifest, tuple(one.host for one in said))
        if len({one.folder for one in said}) > 1 and said == before:
            break  # different folders, and nobody saves to any of them
        time.sleep(min(_MAX_PAUSE, 0.001 * 2 ** min(attempt, 10)))
    listed = [
        f"rank {rank} reads save {one.save_id} of {one.where}" for rank, one in zip(group.ranks, said, strict=True)
    ]
    raise CheckpointError(
        f"ranks read different checkpoints, and load takes one: {join_first(listed, _MAX_LISTED, '; ')}. Give all "
        "ranks one folder that they share, or copies of one checkpoint"
    )
