"""Saving: unite what the ranks have, write this rank's file (perhaps from a copy, in the background), commit.

The order is what makes it safe. Data files have names of their own and are flushed before anybody says they are
done; one rename of the manifest is the commit; only after it is anything removed.
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from math import prod
from typing import Any, NamedTuple, TypeAlias, final

import msgspec
import numpy as np
import torch
from torch import Tensor

from shardwright import comm
from shardwright.checkpoint.format.data_file import DataFile, FileEntry
from shardwright.checkpoint.format.manifest import FIELDS, KEY, Manifest
from shardwright.checkpoint.format.tensor_table import Pieces, TensorTable
from shardwright.checkpoint.format.write_layout import file_plan
from shardwright.checkpoint.location import location_id
from shardwright.checkpoint.reading.current import read_manifest
from shardwright.checkpoint.runtime.progress import Progress
from shardwright.checkpoint.state.flatten import FlatState
from shardwright.checkpoint.state.merge_ranks import GlobalState, merge_states
from shardwright.checkpoint.writing.data_writer import Blocks, FileWriter
from shardwright.checkpoint.writing.leftovers import may_be_removed
from shardwright.checkpoint.writing.replicas import compare_replicas
from shardwright.checkpoint.writing.staging import Buffer, buffers, stage, windows
from shardwright.errors import (
    ArgumentTypeError,
    CheckpointError,
    MissingKeyError,
    NotACheckpointError,
    StateError,
    StorageError,
)
from shardwright.storage import LocalStorage, Storage, Writer

__all__ = ["SaveOperation"]

_MIN_BYTES_PER_SECOND = 10 << 20  # bytes a second below which a rank that writes counts as stuck
_MAX_PLANS = 4
_PATIENCE = (0.05, 0.15, 0.3, 0.5, None)  # seconds between looking for a file that another rank has made
_MAX_LISTED = 16


Meters: TypeAlias = Callable[[int], AbstractContextManager[Progress]]
"""Given the bytes of the work, what counts those done while it lasts."""


class _Staged(NamedTuple):
    """A copy of what is still to be written, and the file it goes to."""

    buffer: Buffer
    writer: Writer
    writing: FileWriter
    blocks: Blocks


@final
class SaveOperation:
    """One save, as this rank sees it: `begin`, then `write`; or `stage`, and `finish` in another thread.

    Each is collective. The rank that comes first in the group holds the lock of the place, and writes the manifest.
    """

    _storage: Storage

    def __init__(
        self, storage: Callable[[], Storage], group: comm.Group, extra: Mapping[str, Any] | None = None
    ) -> None:
        self._find_storage, self._group, self._given = storage, group, extra
        self._extra: dict[str, msgspec.Raw] = {}
        self._held = ExitStack()
        self._leads = group.rank == 0
        self._file: DataFile | None = None
        self._committing = False
        self._staged: _Staged | None = None
        self.state: GlobalState | None = None
        self.save_id = ""

    def begin(
        self,
        flatten: Callable[[], FlatState],
        before: Callable[[], None] | None = None,
        *,
        check_replicas: bool = False,
    ) -> None:
        """Takes the state apart on every rank, and the lock on the first; then finds out what all have.

        What `before` raises, all ranks raise, and nothing is done.
        """

        def prepare() -> FlatState:
            self._storage = self._find_storage()
            if before is not None:
                before()
            self._extra = _as_fields(self._given)
            if self._group.size > 1 and not self._storage.is_shared:
                raise StorageError(
                    f"{self._storage!r} is one process's own, and {self._group.size} ranks save together: give a folder"
                )
            if self._leads:
                self._storage.prepare()
                self._held.enter_context(self._storage.lock())
                self.save_id = os.urandom(6).hex()
                if self._group.size > 1:
                    self._put_token()
            return flatten()

        try:
            flat = comm.agree(prepare, what="save", group=self._group)
            self.state = merge_states(flat, self._group)
            if check_replicas:
                compare_replicas(self.state, self._group)
            place = location_id(self._storage) if isinstance(self._storage, LocalStorage) else ""
            words = msgspec.json.encode([self.save_id, place])
            said = [
                msgspec.json.decode(one, type=tuple[str, str])
                for one in comm.gather_bytes(words, self._group, what="save: naming it")
            ]
            self.save_id = said[0][0]
            _check_same_place([place for _, place in said], self._group.ranks)
        except BaseException:
            self.end()
            raise

    def file(self) -> DataFile:
        """What this rank writes, and where it lies."""
        assert self.state is not None  # begin comes first
        return _planned(self.state.table, self._group.ranks[self._group.rank]).in_save(self.save_id)

    def chunks(self, file: DataFile) -> list[Tensor]:
        """The memory that holds each chunk: views of the state's own tensors."""
        assert self.state is not None  # begin comes first
        plan = file.plan
        found = []
        for chunk, tensor in enumerate(plan.tensors.tolist()):
            region = plan.region(chunk)
            leaf = self.state.leaves[tensor]
            if region.is_empty:
                found.append(torch.empty(region.size, dtype=torch.uint8))
                continue
            part = leaf.parts[0] if len(leaf.parts) == 1 else next(p for p in leaf.parts if p.region.contains(region))
            found.append(part.tensor if part.region == region else part.tensor[region.slices(part.region)])
        return found

    def write(self, threads: int, progress: Meters, memory: int | None = None) -> None:
        """Writes this rank's file and commits, or leaves what was there as it was, and raises on all ranks."""

        def write() -> FileEntry | None:
            self._find_token()
            file = self.file()
            if not len(file.plan.tensors):
                return None
            with progress(file.plan.size) as count, self._created(file, threads, count, memory) as writing:
                writing.put_chunks(self.chunks(file))
                return writing.finish()

        self._write_and_commit(write, self._group)

    def stage(self, threads: int, progress: Callable[[int], Progress], memory: int | None = None) -> None:
        """Copies what this rank writes, so that the state may change: all of it, or in windows of `memory` bytes.

        Of these, all but the last are written here.
        """
        try:
            comm.agree(
                lambda: self._stage(threads, progress, memory),
                what="save: staging",
                group=self._group,
                timeout=self._patience(),
            )
        except BaseException:
            if self._staged is not None:
                self._staged.writer.abort()
            self._discard([self._file.name] if self._file else [])
            self._let_go()
            self.end()
            raise
        assert self.state is not None  # begin comes first
        self.state = GlobalState(self.state.tree, self.state.table, {})  # the caller's tensors are the caller's again

    def finish(self, group: comm.Group) -> None:
        """Writes what was staged and commits; in whatever thread, if it is the only one that talks in this group."""
        staged = self._staged

        def write() -> FileEntry | None:
            if staged is None:
                return None
            with self._abort_if_it_fails(staged.writer):
                staged.writing.put(staged.blocks)
                return staged.writing.finish()

        try:
            self._write_and_commit(write, group)
        finally:
            self._let_go()

    def _stage(self, threads: int, progress: Callable[[int], Progress], memory: int | None) -> None:
        self._find_token()
        file = self.file()
        count = progress(file.plan.size)
        if not len(file.plan.tensors):
            return
        chunks = self.chunks(file)
        nbytes = file.plan.size if memory is None else min(memory, file.plan.size)
        on_gpu = any(chunk.device.type == "cuda" for chunk in chunks)
        writer = self._create(file)
        with self._abort_if_it_fails(writer):
            writing = FileWriter(writer, file, threads, count)
            buffer = buffers.take(nbytes, memory if memory is not None else nbytes, pinned=on_gpu)
            self._staged = _Staged(buffer, writer, writing, Blocks.of(file, np.empty(0, np.int64)))
            for place, (first, last) in enumerate(runs := windows(file, nbytes)):
                blocks = stage(file, chunks, first, last, buffer, threads)
                if place < len(runs) - 1:
                    writing.put(blocks)
                else:
                    self._staged = _Staged(buffer, writer, writing, blocks)

    def _let_go(self) -> None:
        staged, self._staged = self._staged, None
        if staged is not None:
            buffers.give(staged.buffer)

    def _write_and_commit(self, write: Callable[[], FileEntry | None], group: comm.Group) -> None:
        try:
            try:
                written = comm.agree(write, what="save: writing", group=group, timeout=self._patience())
            except BaseException:
                # This rank has not said that it is done, so nobody commits: its file is of no use.
                self._discard([self._file.name] if self._file else [])
                raise
            try:
                _, said = comm.agree_telling(
                    lambda: (None, msgspec.json.encode(self._still_there(written))),
                    what="save: looking at what was written",
                    group=group,
                )
                manifest = comm.agree(lambda: self._commit(said), what="save: committing", group=group)
            except BaseException:
                # From here on only the first rank may remove anything: it alone knows whether it has committed.
                if self._leads and not self._is_committed():
                    self._discard(None)
                raise
            if manifest is not None:
                self._clean(manifest)
        finally:
            self.end()

    def _patience(self) -> float:
        """Seconds to wait for a rank that writes: the usual, and what twice its part takes on a slow disk.

        A rank that dies is noticed at once, however long this is.
        """
        assert self.state is not None  # begin comes first
        table = self.state.table
        volumes = np.array([prod(sharding.shape) for sharding in table.shardings], np.float64)
        total = float((volumes[table.kinds] * table.itemsizes).sum()) if len(table) else 0.0
        return comm.default_timeout() + 2 * total / self._group.size / _MIN_BYTES_PER_SECOND

    def end(self) -> None:
        """Removes the token and lets go of the lock."""
        self._held.close()

    @property
    def _token(self) -> str:
        """The key of what the first rank makes for the others to find."""
        return f"{self.save_id}.begun"

    def _put_token(self) -> None:
        writer = self._storage.create(self._token)
        with self._abort_if_it_fails(writer):
            writer.write([memoryview(self.save_id.encode())], 0)
            writer.finish()
        self._held.callback(self._discard, [self._token])

    def _find_token(self) -> None:
        """Sees that this rank writes to where the first one does: the same path may name another disk here."""
        if self._leads:
            return
        for patience in _PATIENCE:
            try:
                self._storage.open(self._token).close()
                return
            except MissingKeyError:
                if patience is not None:  # a network file system may show it late
                    time.sleep(patience)
        raise StorageError(
            f"the ranks do not share {self._storage!r}: rank {self._group.ranks[0]} made {self._token} there, and "
            f"after {sum(filter(None, _PATIENCE)):g} s it is not to be seen here; save to a folder that all ranks share"
        )

    def _create(self, file: DataFile) -> Writer:
        writer = self._storage.create(file.name)
        self._file = file
        return writer

    @contextmanager
    def _created(
        self, file: DataFile, threads: int, progress: Progress | None, memory: int | None
    ) -> Iterator[FileWriter]:
        writer = self._create(file)
        with self._abort_if_it_fails(writer):
            yield FileWriter(writer, file, threads, progress, memory)

    @contextmanager
    def _abort_if_it_fails(self, writer: Writer) -> Iterator[None]:
        try:
            yield
        except BaseException:
            writer.abort()
            raise

    def _still_there(self, written: FileEntry | None) -> FileEntry | None:
        """Return what this rank wrote; raise if its file is gone: the others may have taken long to write theirs.

        Each rank looks at its own file: what another host has written, this one may not see yet.
        """
        if written is None:
            return None
        assert self._file is not None  # it was written
        name = self._file.name
        try:
            with self._storage.open(name) as reader:
                size = reader.size
        except MissingKeyError:
            raise StorageError(
                f"{name} was removed from {self._storage!r} during the save, by another program. Nothing was "
                "committed; let no other program remove files there, and save again"
            ) from None
        if size != written.size:
            raise StorageError(
                f"{name} in {self._storage!r} has {size} bytes, and {written.size} were written: another program has "
                "changed it. Nothing was committed; save again"
            )
        return written

    def _commit(self, said: list[bytes]) -> Manifest | None:
        if not self._leads:
            return None
        assert self.state is not None  # begin comes first
        files = {}
        for rank, one in zip(self._group.ranks, said, strict=True):
            written = msgspec.json.decode(one, type=FileEntry | None)
            if written is not None:
                files[rank] = written
        manifest = Manifest(self.save_id, self.state.tree, self.state.table, files, self._extra)
        data = manifest.encode()
        self._committing = True
        self._storage.replace(KEY, data)
        return manifest

    def _is_committed(self) -> bool:
        """Whether the manifest in place is this save's; where that cannot be known, it may be."""
        if not self._committing:
            return False
        try:
            return read_manifest(self._storage).save_id == self.save_id
        except NotACheckpointError:
            return False
        except (StorageError, CheckpointError):
            return True

    def _discard(self, names: Sequence[str] | None) -> None:
        """Removes files of a save that failed: these, or all of it. Why it failed matters more than what is left."""
        with suppress(StorageError):
            if names is None:
                names = [key for key in self._storage.list_keys() if key.startswith(f"{self.save_id}-")]
            for name in names:
                self._storage.delete(name)

    def _clean(self, manifest: Manifest) -> None:
        """Removes what no manifest refers to: the files of the save before, and leftovers of those that failed."""
        try:
            for key in self._storage.list_keys():
                if key not in manifest.names and key != self._token and may_be_removed(self._storage, key):
                    self._storage.delete(key)
        except StorageError as error:  # the state is saved, and the next save cleans again
            warnings.warn(f"saved, but files of earlier saves could not all be removed: {error}", stacklevel=4)


def _planned(table: TensorTable, rank: int) -> DataFile:
    """The file of a rank for this table. That of a state whose names, dtypes and placings are as before is known."""
    shardings = tuple(
        (sharding.shape, sharding.regions, sharding.ranks) if isinstance(sharding, Pieces) else sharding
        for sharding in table.shardings
    )
    key = (rank, table.names, table.dtypes, table.kinds.tobytes(), shardings)
    file = _plans.get(key)
    if file is None:
        file = DataFile(file_plan(table, rank), "")
        _plans[key] = file
        while len(_plans) > _MAX_PLANS:
            _plans.popitem(last=False)
    else:
        _plans.move_to_end(key)
    return file


_plans: OrderedDict[tuple[Any, ...], DataFile] = OrderedDict()


def _check_same_place(places: Sequence[str], ranks: Sequence[int]) -> None:
    """Sees that all ranks save to one folder; they all find the same."""
    if len(set(places)) == 1:
        return
    told = [
        f"rank {rank} to {place or 'a storage that is no folder'}" for rank, place in zip(ranks, places, strict=True)
    ]
    more = f", and {len(told) - _MAX_LISTED} more" if len(told) > _MAX_LISTED else ""
    raise StorageError(
        f"ranks save to {len(set(places))} different places: {', '.join(told[:_MAX_LISTED])}{more}; "
        "give all ranks one path"
    )


def _as_fields(extra: Any) -> dict[str, msgspec.Raw]:
    """Further fields of a manifest, as JSON."""
    if extra is None:
        return {}
    if not isinstance(extra, Mapping):
        raise ArgumentTypeError(f"extra={extra!r} is a {type(extra).__name__}: give a mapping of names to JSON values")
    for name in extra:
        if not isinstance(name, str):
            raise ArgumentTypeError(f"extra: the name {name!r} is a {type(name).__name__}: names are text")
    taken = sorted(extra.keys() & FIELDS)
    if taken:
        raise StateError(f"extra: a manifest has fields {', '.join(map(repr, taken))} of its own; use another name")
    try:
        for name, value in extra.items():
            _check_finite(msgspec.to_builtins(value), name)
        return {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in extra.items()}
    except StateError:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise StateError(f"extra: only what JSON has is stored there: {error}") from None


def _check_finite(value: Any, name: str) -> None:
    """Refuses the floats that JSON has no number for: it would become null."""
    if isinstance(value, float) and not math.isfinite(value):
        raise StateError(
            f"extra: {name!r} has {value!r}, and JSON has no number for it: give text, such as {str(value)!r}"
        )
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    for one in inner:
        _check_finite(one, name)
