"""`repair`: restore damaged blocks and files of a checkpoint from other copies of the same tensors.

Every element is stored once, so the bytes must come from elsewhere: a copy of the checkpoint, another step in which the
tensor did not change, an export to another format. Bytes are used only if they have the checksum that the damaged
checkpoint recorded, so a repaired checkpoint is bit for bit the one that was saved. A header is computed anew from the
checksums of the data, and used only if it has the digest in the manifest.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import final

import crc32c
import numpy as np
import numpy.typing as npt
import torch

from shardwright.checkpoint.commit import abort_on_error
from shardwright.checkpoint.format.data_file import BLOCK, DataFile, FileEntry, digest
from shardwright.checkpoint.format.manifest import KEY, Manifest
from shardwright.checkpoint.format.split import boxes_of_range
from shardwright.checkpoint.location import as_storage
from shardwright.checkpoint.reader import Checkpoint, open
from shardwright.checkpoint.reading.current import read_manifest
from shardwright.checkpoint.runtime.progress import ProgressCallback
from shardwright.checkpoint.verify import Corruption, verify
from shardwright.errors import (
    ArgumentTypeError,
    CheckpointError,
    CorruptionError,
    FormatError,
    MissingKeyError,
    NotACheckpointError,
    StorageError,
)
from shardwright.storage import LocalStorage, Reader, Storage, Writer

__all__ = ["RepairReport", "RepairedFile", "repair"]


@final
@dataclass(frozen=True)
class RepairedFile:
    """A file that was restored: how many of its blocks came from other copies.

    >>> RepairedFile("manifest.json", 0).blocks
    0
    """

    file: str
    blocks: int


@final
@dataclass(frozen=True)
class RepairReport:
    """The result of `repair`: true if the checkpoint is intact now. `remaining` has what could not be restored.

    >>> bool(RepairReport("here", (RepairedFile("a", 1),)))
    True
    """

    location: str
    repaired: tuple[RepairedFile, ...] = ()
    remaining: tuple[Corruption, ...] = ()

    def __bool__(self) -> bool:
        return not self.remaining


def repair(
    path: str | os.PathLike[str],
    sources: Sequence[str | os.PathLike[str]] = (),
    *,
    dry_run: bool = False,
    progress: ProgressCallback | None = None,
) -> RepairReport:
    """Restore what is damaged in a checkpoint from other checkpoints that hold the same tensors.

    A damaged header needs no other copy if the data is intact; a damaged manifest needs a copy of this checkpoint.
    Sources may be of any format. A file is replaced only when it is complete; with `dry_run`, nothing is written, and
    the report says what would be. No other save may run meanwhile. `progress` is that of `verify`.

    >>> import shutil, tempfile
    >>> from pathlib import Path
    >>> from shardwright import checkpoint
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     checkpoint.save({"w": torch.arange(4)}, f"{folder}/run")
    ...     _ = shutil.copytree(f"{folder}/run", f"{folder}/copy")
    ...     file = next(Path(folder, "run").glob("*.safetensors"))
    ...     _ = file.write_bytes(file.read_bytes()[:-1])
    ...     bool(checkpoint.verify(f"{folder}/run")), bool(repair(f"{folder}/run", [f"{folder}/copy"]))
    (False, True)
    """
    storage = as_storage(path)
    if not isinstance(storage, LocalStorage):
        raise ArgumentTypeError(f"repair needs a directory, got {storage!r}")
    with ExitStack() as stack:
        if not os.path.isdir(storage.path):
            raise NotACheckpointError(f"{storage!r} holds no checkpoint: there is no such directory")
        stack.enter_context(storage.lock())
        repaired: list[RepairedFile] = []
        manifest, is_restored = _manifest(storage, sources, dry_run)
        if is_restored:
            repaired.append(RepairedFile(KEY, 0))
            if dry_run:
                return RepairReport(repr(storage), tuple(repaired))
        report = verify(storage, progress)
        copies = [stack.enter_context(open(source)) for source in sources] if not report else []
        remaining: list[Corruption] = []
        for rank in sorted(manifest.files):
            corruptions = [found for found in report.corruptions if found.file == manifest.file_name(rank)]
            if corruptions:
                rebuilding = _Rebuilding(storage, manifest.file(rank), manifest.files[rank], copies)
                count = rebuilding.run(dry_run=dry_run)
                repaired += [RepairedFile(manifest.file_name(rank), count)] if rebuilding.restored else []
                remaining += rebuilding.remaining or ([] if rebuilding.restored else corruptions)
        return RepairReport(repr(storage), tuple(repaired), tuple(remaining))


def _manifest(storage: Storage, sources: Sequence[str | os.PathLike[str]], dry_run: bool) -> tuple[Manifest, bool]:
    """Return the manifest, and whether it had to be copied from a source that is a copy of this checkpoint."""
    try:
        return read_manifest(storage), False
    except (CorruptionError, FormatError, NotACheckpointError) as error:
        present = set(storage.list_keys())
        for source in sources:
            try:
                copy = as_storage(source)
                manifest = read_manifest(copy)
            except (CheckpointError, StorageError):
                continue
            if manifest.names & present:
                if not dry_run:
                    with copy.open(KEY) as reader:
                        data = bytearray(reader.size)
                        reader.read([memoryview(data)], 0)
                    storage.replace(KEY, bytes(data))
                return manifest, True
        raise error


@final
class _Rebuilding:
    """Write a data file anew: each block from the file itself if it is good, else from another copy."""

    def __init__(self, storage: LocalStorage, file: DataFile, entry: FileEntry, copies: Sequence[Checkpoint]) -> None:
        self._storage, self._file, self._entry, self._copies = storage, file, entry, copies
        self.restored = False
        self.remaining: list[Corruption] = []

    def run(self, *, dry_run: bool) -> int:
        """Rebuild the file, and return the number of blocks that came from other copies."""
        name = f"{secrets.token_hex(6)}-00000-0.safetensors"  # `clean_up` recognises it, should this process be killed
        with ExitStack() as stack:
            try:
                own: Reader | None = stack.enter_context(self._storage.open(self._file.name))
            except (MissingKeyError, StorageError):
                own = None
            header = self._read(own, 0, self._file.header_size)
            is_trusted = header is not None and digest(header) == self._entry.digest
            recorded = self._recorded(header)
            if dry_run:
                return self._write(None, own, recorded, is_trusted)
            writer = self._storage.create(name)
            with abort_on_error(writer):
                count = self._write(writer, own, recorded, is_trusted)
                if not self.restored:
                    writer.abort()
                    return 0
                writer.finish()
        os.replace(os.path.join(self._storage.path, name), os.path.join(self._storage.path, self._file.name))
        return count

    def _write(
        self, writer: Writer | None, own: Reader | None, recorded: npt.NDArray[np.uint32] | None, is_trusted: bool
    ) -> int:
        checksums, taken = [], 0
        for number, (chunk, block, start, nbytes) in enumerate(self._blocks()):
            data = self._read(own, start, nbytes)
            expected = None if recorded is None else int(recorded[number])
            if data is None or (expected is not None and crc32c.crc32c(data) != expected):
                found = self._from_copies(chunk, block, nbytes, expected, is_trusted)
                if found is not None:
                    data, taken = found, taken + 1
                elif data is None or is_trusted:
                    self._fail(chunk, block, start, nbytes)
                    data = data or bytes(nbytes)
            checksums.append(crc32c.crc32c(data))
            if writer is not None:
                writer.write([memoryview(data)], start)
        computed = recorded if is_trusted and recorded is not None else np.array(checksums, np.uint32)
        header = self._file.header(computed)
        self.restored = digest(header) == self._entry.digest and (taken > 0 or not self.remaining)
        if writer is not None and self.restored:
            writer.write([memoryview(header)], 0)
        return taken

    def _blocks(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield chunk, index in the chunk, offset in the file and size of every block."""
        plan = self._file.plan
        for chunk, (start, nbytes) in enumerate(zip(plan.starts.tolist(), plan.nbytes.tolist(), strict=True)):
            for block in range(int(self._file.blocks[chunk])):
                at = block * BLOCK
                yield chunk, block, self._file.header_size + start + at, min(BLOCK, nbytes - at)

    def _recorded(self, header: bytes | None) -> npt.NDArray[np.uint32] | None:
        """Return the checksums of a header, even of a damaged one: then they are hints; None if there are none."""
        count = int(self._file.blocks.sum())
        first = self._file.checksums_start
        try:
            found = np.frombuffer(bytes.fromhex((header or b"")[first : first + 8 * count].decode("ascii")), ">u4")
        except ValueError:
            return None
        return found.astype(np.uint32) if len(found) == count else None

    def _read(self, own: Reader | None, start: int, nbytes: int) -> bytes | None:
        if own is None or own.size < start + nbytes:
            return None
        data = bytearray(nbytes)
        try:
            own.read([memoryview(data)], start)
        except StorageError:
            return None
        return bytes(data)

    def _from_copies(self, chunk: int, block: int, nbytes: int, expected: int | None, is_trusted: bool) -> bytes | None:
        """Return the bytes of a block from the first copy that has them with the right checksum."""
        for copy in self._copies:
            data = self._from_copy(copy, chunk, block, nbytes)
            if data is not None and (not is_trusted or crc32c.crc32c(data) == expected):
                return data
        return None

    def _from_copy(self, copy: Checkpoint, chunk: int, block: int, nbytes: int) -> bytes | None:
        table, tensor = self._file.plan.table, int(self._file.plan.tensors[chunk])
        name, itemsize = table.names[tensor], int(table.itemsizes[tensor])
        if name not in copy:
            return None
        stored = copy[name]
        if tuple(stored.shape) != table.shape(tensor) or str(stored.dtype) != f"torch.{table.dtypes[tensor]}":
            return None
        first = block * BLOCK // itemsize
        parts = []
        try:
            for box in boxes_of_range(self._file.plan.region(chunk), first, first + nbytes // itemsize):
                values = stored[box.slices()].contiguous()
                parts.append(values.reshape(-1).view(torch.uint8).numpy().tobytes())
        except (CorruptionError, StorageError):  # this copy is damaged, too
            return None
        return b"".join(parts)

    def _fail(self, chunk: int, block: int, start: int, nbytes: int) -> None:
        table, tensor = self._file.plan.table, int(self._file.plan.tensors[chunk])
        self.remaining.append(
            Corruption(
                self._file.name,
                "is damaged, and no copy has it",
                table.names[tensor],
                self._file.plan.region(chunk),
                block,
                start,
                start + nbytes,
            )
        )
