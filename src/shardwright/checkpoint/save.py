"""Save: merge the states of all ranks, write this rank's data file (possibly from a staged copy), commit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from math import prod
from typing import Any, NamedTuple, TypeAlias, final

import msgspec
import numpy as np
import torch
from torch import Tensor

from shardwright import comm
from shardwright.checkpoint.arguments import extra_fields
from shardwright.checkpoint.commit import Commit, abort_on_error
from shardwright.checkpoint.format.data_file import DataFile, FileEntry
from shardwright.checkpoint.format.manifest import Manifest
from shardwright.checkpoint.format.tensor_table import Pieces, TensorTable
from shardwright.checkpoint.format.write_layout import file_plan
from shardwright.checkpoint.runtime.progress import Progress
from shardwright.checkpoint.state.flatten import FlatState
from shardwright.checkpoint.state.merge_ranks import GlobalState, merge_states
from shardwright.checkpoint.writing.data_writer import Blocks, FileWriter
from shardwright.checkpoint.writing.replicas import compare_replicas
from shardwright.checkpoint.writing.staging import Buffer, buffers, stage, windows
from shardwright.storage import Storage, Writer

__all__ = ["SaveOperation"]

_MIN_BYTES_PER_SECOND = 10 << 20  # a rank that writes more slowly than this counts as stuck
_MAX_PLANS = 4

Meters: TypeAlias = Callable[[int], AbstractContextManager[Progress]]
"""Given the number of bytes to write, a context manager that yields the progress counter."""


class _Staged(NamedTuple):
    """The staged copy of what remains to be written, and the file it goes to."""

    buffer: Buffer
    writer: Writer
    writing: FileWriter
    blocks: Blocks


@final
class SaveOperation:
    """One save on this rank: `begin`, then either `write`, or `stage` and (in another thread) `finish`.

    Every method is collective.
    """

    _commit: Commit

    def __init__(
        self, storage: Callable[[], Storage], group: comm.Group, extra: Mapping[str, Any] | None = None
    ) -> None:
        self._get_storage, self._group, self._given_extra = storage, group, extra
        self._extra: dict[str, msgspec.Raw] = {}
        self._staged: _Staged | None = None
        self.state: GlobalState | None = None

    def begin(
        self,
        flatten: Callable[[], FlatState],
        before: Callable[[], None] | None = None,
        *,
        check_replicas: bool = False,
    ) -> None:
        """Flatten the state on every rank, take the lock on the first, and merge the states of all ranks.

        If `before` raises on any rank, all ranks raise and nothing is done.
        """

        def prepare() -> FlatState:
            self._commit = Commit(self._get_storage(), self._group)
            if before is not None:
                before()
            self._extra = extra_fields(self._given_extra)
            self._commit.open()
            return flatten()

        try:
            flat = comm.agree(prepare, what="save", group=self._group)
            self.state = merge_states(flat, self._group)
            if check_replicas:
                compare_replicas(self.state, self._group)
            self._commit.share_id()
        except BaseException:
            self._close()
            raise

    def write(self, threads: int, progress: Meters, memory: int | None = None) -> None:
        """Write this rank's file and commit; on failure keep the previous checkpoint and raise on all ranks."""

        def write() -> FileEntry | None:
            self._commit.check_directory_is_shared()
            file = self._file()
            if not len(file.plan.tensors):
                return None
            with progress(file.plan.size) as count:
                writer = self._commit.create(file.name)
                with abort_on_error(writer):
                    writing = FileWriter(writer, file, threads, count, memory)
                    writing.put_chunks(self._chunks(file))
                    return writing.finish()

        self._commit.publish(write, self._manifest, self._group, self._write_timeout())

    def stage(self, threads: int, progress: Callable[[int], Progress], memory: int | None = None) -> None:
        """Copy what this rank writes, so that the caller may change the state: all of it, or windows of `memory` bytes.

        All windows but the last are written here.
        """
        try:
            comm.agree(
                lambda: self._stage(threads, progress, memory),
                what="save: staging",
                group=self._group,
                timeout=self._write_timeout(),
            )
        except BaseException:
            if self._staged is not None:
                self._staged.writer.abort()
            self._commit.discard_own_file()
            self._release_buffer()
            self._close()
            raise
        assert self.state is not None  # begin comes first
        self.state = GlobalState(self.state.tree, self.state.table, {})  # drop references to the caller's tensors

    def finish(self, group: comm.Group) -> None:
        """Write what was staged and commit, in any thread, as long as no other thread communicates in this group."""
        staged = self._staged

        def write() -> FileEntry | None:
            if staged is None:
                return None
            with abort_on_error(staged.writer):
                staged.writing.put(staged.blocks)
                return staged.writing.finish()

        try:
            self._commit.publish(write, self._manifest, group, self._write_timeout())
        finally:
            self._release_buffer()

    def _file(self) -> DataFile:
        """Return the data file that this rank writes."""
        assert self.state is not None  # begin comes first
        rank = self._group.global_rank
        return _planned_file(self.state.table, rank).in_save(self._commit.save_id)

    def _chunks(self, file: DataFile) -> list[Tensor]:
        """Return the memory of each chunk of the file: views of the caller's tensors."""
        assert self.state is not None  # begin comes first
        plan = file.plan
        chunks = []
        for chunk, tensor in enumerate(plan.tensors.tolist()):
            region = plan.region(chunk)
            leaf = self.state.leaves[tensor]
            if region.is_empty:
                chunks.append(torch.empty(region.size, dtype=torch.uint8))
                continue
            part = leaf.parts[0] if len(leaf.parts) == 1 else next(p for p in leaf.parts if p.region.contains(region))
            chunks.append(part.tensor if part.region == region else part.tensor[region.slices(part.region)])
        return chunks

    def _stage(self, threads: int, progress: Callable[[int], Progress], memory: int | None) -> None:
        self._commit.check_directory_is_shared()
        file = self._file()
        count = progress(file.plan.size)
        if not len(file.plan.tensors):
            return
        chunks = self._chunks(file)
        nbytes = file.plan.size if memory is None else min(memory, file.plan.size)
        on_gpu = any(chunk.device.type == "cuda" for chunk in chunks)
        writer = self._commit.create(file.name)
        with abort_on_error(writer):
            writing = FileWriter(writer, file, threads, count)
            buffer = buffers.take(nbytes, memory if memory is not None else nbytes, pinned=on_gpu)
            self._staged = _Staged(buffer, writer, writing, Blocks.of(file, np.empty(0, np.int64)))
            for index, (first, last) in enumerate(runs := windows(file, nbytes)):
                blocks = stage(file, chunks, first, last, buffer, threads)
                if index < len(runs) - 1:
                    writing.put(blocks)
                else:
                    self._staged = _Staged(buffer, writer, writing, blocks)

    def _release_buffer(self) -> None:
        staged, self._staged = self._staged, None
        if staged is not None:
            buffers.give(staged.buffer)

    def _manifest(self, files: Mapping[int, FileEntry]) -> Manifest:
        assert self.state is not None  # begin comes first
        return Manifest(self._commit.save_id, self.state.tree, self.state.table, files, self._extra)

    def _write_timeout(self) -> float:
        """Return the timeout of the write phase: the default plus twice the time a slow disk needs.

        A rank that dies is noticed at once, however long this is.
        """
        assert self.state is not None  # begin comes first
        table = self.state.table
        volumes = np.array([prod(sharding.shape) for sharding in table.shardings], np.float64)
        total = float((volumes[table.kinds] * table.itemsizes).sum()) if len(table) else 0.0
        return comm.default_timeout() + 2 * total / self._group.size / _MIN_BYTES_PER_SECOND

    def _close(self) -> None:
        if hasattr(self, "_commit"):
            self._commit.close()


def _planned_file(table: TensorTable, rank: int) -> DataFile:
    """Plan a rank's data file; reuse the cached plan if names, dtypes and shardings are unchanged."""
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
