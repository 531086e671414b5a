"""Commit a save: data files get new names and are flushed, then one rename of the manifest makes them the checkpoint.

A crash at any point leaves the previous checkpoint or the new one. docs/explanation/commit.md explains the order of
calls and why each of them is needed.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import final

import msgspec

from shardwright import comm
from shardwright.checkpoint.format.data_file import FileEntry
from shardwright.checkpoint.format.manifest import KEY, Manifest
from shardwright.checkpoint.format.other_formats import other_format
from shardwright.checkpoint.location import location_id
from shardwright.checkpoint.reading.current import read_manifest
from shardwright.checkpoint.writing.leftovers import may_be_removed
from shardwright.errors import CheckpointError, MissingKeyError, NotACheckpointError, StorageError
from shardwright.listing import join_first
from shardwright.storage import LocalStorage, Storage, Writer

__all__ = ["Commit", "abort_on_error"]

_BACKOFF = (0.05, 0.15, 0.3, 0.5, None)  # seconds between looks for a file that another rank created
_MAX_LISTED = 16

MakeManifest = Callable[[Mapping[int, FileEntry]], Manifest]


@final
class Commit:
    """The commit protocol of one save, as run by this rank.

    `open`, then the collective `share_id`; every rank creates its file with `create`; `publish` commits; `close`
    releases the lock in any case. The first rank of the group holds the lock and writes the manifest.
    """

    def __init__(self, storage: Storage, group: comm.Group) -> None:
        self._storage, self._group = storage, group
        self._is_first = group.rank == 0
        self._held = ExitStack()
        self._data_file: str | None = None  # created by this rank
        self._is_replacing = False
        self.save_id = ""

    def open(self) -> None:
        """On the first rank, create the directory, take its lock, and create the token for the other ranks."""
        if self._group.size > 1 and not self._storage.is_shared:
            raise StorageError(
                f"{self._storage!r} is private to one process, but {self._group.size} ranks save together; "
                "save to a directory"
            )
        if self._is_first:
            _refuse_other_formats(self._storage)
            self._storage.prepare()
            self._held.enter_context(self._storage.lock())
            self.save_id = os.urandom(6).hex()
            if self._group.size > 1:
                self._create_token()

    def share_id(self) -> None:
        """Take the save id from the first rank, and check that all ranks save to the same path. Collective."""
        location = location_id(self._storage) if isinstance(self._storage, LocalStorage) else ""
        message = msgspec.json.encode([self.save_id, location])
        gathered = [
            msgspec.json.decode(data, type=tuple[str, str])
            for data in comm.gather_bytes(message, self._group, what="save: naming it")
        ]
        self.save_id = gathered[0][0]
        _check_same_location([location for _, location in gathered], self._group.ranks)

    def check_directory_is_shared(self) -> None:
        """Raise `StorageError` if this rank does not see the token: the same path may be another disk here."""
        if self._is_first:
            return
        for delay in _BACKOFF:
            try:
                self._storage.open(self._token).close()
                return
            except MissingKeyError:
                if delay is not None:  # a network file system may show it late
                    time.sleep(delay)
        raise StorageError(
            f"the ranks do not share {self._storage!r}: rank {self._group.ranks[0]} created {self._token} there, but "
            f"after {sum(filter(None, _BACKOFF)):g} s this rank cannot see it; save to a directory shared by all ranks"
        )

    def create(self, name: str) -> Writer:
        """Create this rank's data file."""
        writer = self._storage.create(name)
        self._data_file = name
        return writer

    def publish(
        self,
        write: Callable[[], FileEntry | None],
        manifest: MakeManifest,
        group: comm.Group,
        timeout: float,
    ) -> None:
        """Write this rank's file and commit; on failure keep the previous checkpoint and raise on all ranks.

        `group` has the ranks of the save; it may be a separate channel over them, used by a background thread.
        """
        try:
            try:
                written = comm.agree(write, what="save: writing", group=group, timeout=timeout)
            except BaseException:
                # This rank has not reported success, so no rank commits: its file is of no use.
                self.discard_own_file()
                raise
            try:
                _, entries = comm.agree(
                    lambda: (None, msgspec.json.encode(self._check_own_file(written))),
                    what="save: looking at what was written",
                    group=group,
                    gather=True,
                )
                committed = comm.agree(
                    lambda: self._replace_manifest(entries, manifest), what="save: committing", group=group
                )
            except BaseException:
                # From here on only the first rank may remove files: it alone knows whether it has committed.
                if self._is_first and not self._is_committed():
                    self._discard(None)
                raise
            if committed is not None:
                self._remove_unreferenced(committed)
        finally:
            self.close()

    def discard_own_file(self) -> None:
        """Remove the data file that this rank created, if any."""
        self._discard([self._data_file] if self._data_file else [])

    def close(self) -> None:
        """Remove the token and release the lock."""
        self._held.close()

    @property
    def _token(self) -> str:
        """The key of the file that the first rank creates for the others to find."""
        return f"{self.save_id}.begun"

    def _create_token(self) -> None:
        writer = self._storage.create(self._token)
        with abort_on_error(writer):
            writer.write([memoryview(self.save_id.encode())], 0)
            writer.finish()
        self._held.callback(self._discard, [self._token])

    def _check_own_file(self, written: FileEntry | None) -> FileEntry | None:
        """Return the entry of this rank's file; raise if it was removed or changed while other ranks were writing.

        Each rank checks its own file: a file that another host wrote may not be visible here yet.
        """
        if written is None:
            return None
        assert self._data_file is not None  # it was written
        name = self._data_file
        try:
            with self._storage.open(name) as reader:
                size = reader.size
        except MissingKeyError:
            raise StorageError(
                f"{name} was removed from {self._storage!r} during the save, by another program. Nothing was "
                "committed; make sure that no other program removes files there, and save again"
            ) from None
        if size != written.size:
            raise StorageError(
                f"{name} in {self._storage!r} has {size} bytes, but {written.size} were written: another program has "
                "changed it. Nothing was committed; save again"
            )
        return written

    def _replace_manifest(self, entries: Sequence[bytes], make_manifest: MakeManifest) -> Manifest | None:
        """On the first rank, put the manifest in place: this is the commit."""
        if not self._is_first:
            return None
        files = {}
        for rank, encoded in zip(self._group.ranks, entries, strict=True):
            entry = msgspec.json.decode(encoded, type=FileEntry | None)
            if entry is not None:
                files[rank] = entry
        manifest = make_manifest(files)
        data = manifest.encode()
        self._is_replacing = True
        self._storage.replace(KEY, data)
        return manifest

    def _is_committed(self) -> bool:
        """Return True if the manifest in place is this save's, or if that cannot be determined."""
        if not self._is_replacing:
            return False
        try:
            return read_manifest(self._storage).save_id == self.save_id
        except NotACheckpointError:
            return False
        except (StorageError, CheckpointError):
            return True

    def _discard(self, names: Sequence[str] | None) -> None:
        """Remove these files of a failed save, or all of them. Errors are ignored: the failure itself is raised."""
        with suppress(StorageError):
            if names is None:
                names = [key for key in self._storage.list_keys() if key.startswith(f"{self.save_id}-")]
            for name in names:
                self._storage.delete(name)

    def _remove_unreferenced(self, manifest: Manifest) -> None:
        """Remove files that the manifest does not refer to: those of earlier saves, and leftovers of failed ones."""
        try:
            for key in self._storage.list_keys():
                if key not in manifest.names and key != self._token and may_be_removed(self._storage, key):
                    self._storage.delete(key)
        except StorageError as error:  # the state is saved, and the next save tries again
            warnings.warn(f"saved, but files of earlier saves could not all be removed: {error}", stacklevel=5)


@contextmanager
def abort_on_error(writer: Writer) -> Iterator[None]:
    """Abort the writer if the body raises."""
    try:
        yield
    except BaseException:
        writer.abort()
        raise


def _check_same_location(locations: Sequence[str], ranks: Sequence[int]) -> None:
    """Raise `StorageError` if ranks save to different locations. Every rank has gathered the same list."""
    if len(set(locations)) == 1:
        return
    listed = [
        f"rank {rank} to {location or 'a storage that is not a directory'}"
        for rank, location in zip(ranks, locations, strict=True)
    ]
    raise StorageError(
        f"ranks save to {len(set(locations))} different locations: {join_first(listed, _MAX_LISTED)}; "
        "give all ranks the same path"
    )


def _refuse_other_formats(storage: Storage) -> None:
    """Raise if the directory has a checkpoint of another format: afterwards it would have two."""
    if isinstance(storage, LocalStorage) and not storage.is_file():
        other = other_format(storage.list_files())
        if other is not None:
            raise CheckpointError(
                f"{storage.path} has a checkpoint of another format ({other}); save to a directory of its own"
            )
