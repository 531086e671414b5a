"""`verify`: check every byte of a checkpoint without loading it, and report everything that is corrupted.

Each data file is read once, front to back, through windows of bounded size, in a few threads. If a header is corrupted,
so are its checksums: the data of that file is not checked.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import final

import crc32c
import numpy as np
import numpy.typing as npt

from shardwright.checkpoint.background import wait_for_saves_to
from shardwright.checkpoint.format.data_file import BLOCK, DataFile, digest
from shardwright.checkpoint.format.manifest import KEY, Manifest
from shardwright.checkpoint.location import as_storage, location_id
from shardwright.checkpoint.reading.current import read_contents, read_manifest
from shardwright.checkpoint.runtime.parallel import Stop, in_threads
from shardwright.checkpoint.verify_foreign import verify_foreign
from shardwright.checkpoint.verify_report import Corruption, VerifyReport
from shardwright.errors import CheckpointError, CorruptionError, FormatError, MissingKeyError, StorageError
from shardwright.interop.formats import ForeignContents
from shardwright.listing import join_first
from shardwright.storage import LocalStorage, Reader, Storage

__all__ = ["Corruption", "VerifyReport", "check_files", "verify"]

_WINDOW = 4 * BLOCK  # bytes read in one call
_MAX_LISTED = 20


def verify(
    path: str | os.PathLike[str] | Storage, progress: Callable[[int, int], None] | None = None, *, threads: int = 2
) -> VerifyReport:
    """Check every byte of a checkpoint of any format without loading it, and report everything that is corrupted.

    Of files that `torch.save` wrote, and of distributed checkpoints, the CRC-32 of every record is checked, which
    PyTorch stores and never checks. Raise if there is no checkpoint. If a background save of this process to the same
    location is running, it is waited for first, as in `load`. It needs a few megabytes per thread, whatever the size of
    the tensors. `progress` is called with the bytes read and the total.

    >>> import tempfile, torch
    >>> from shardwright import checkpoint
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     checkpoint.save({"w": torch.ones(4)}, folder)
    ...     print(checkpoint.verify(folder))
    LocalStorage(...) is intact: 1 file, 4112 bytes
    """
    storage = as_storage(path)
    wait_for_saves_to(location_id(storage))
    while True:
        try:
            manifest = read_contents(storage)
        except (CorruptionError, FormatError) as error:
            name = _name_of_contents(storage)
            return VerifyReport(repr(storage), corruptions=(Corruption(name, f"cannot be used: {error}"),))
        except StorageError as error:
            name = _name_of_contents(storage)
            return VerifyReport(repr(storage), corruptions=(Corruption(name, f"cannot be read: {error}"),))
        if isinstance(manifest, ForeignContents):
            return verify_foreign(manifest, storage, progress, threads)
        report = _Verifying(storage, manifest, progress).run(threads)
        if report or not _replaced(storage, manifest):
            return report


def _name_of_contents(storage: Storage) -> str:
    """Return the name of what lists the contents of a checkpoint that cannot be read."""
    if isinstance(storage, LocalStorage) and (storage.is_file() or KEY not in storage.list_files()):
        return os.path.basename(storage.path)
    return KEY


def _replaced(storage: Storage, manifest: Manifest) -> bool:
    """Return True if another save replaced the checkpoint meanwhile, and removed its files."""
    try:
        return read_manifest(storage).save_id != manifest.save_id
    except (CheckpointError, StorageError):
        return False


def check_files(storage: Storage, part: int, parts: int, *, threads: int = 2) -> None:
    """Verify a part of the files of a checkpoint; raise `CorruptionError` if they are corrupted.

    An error of the storage is raised as it is: a failing disk is not corruption.

    >>> import torch
    >>> from shardwright import checkpoint
    >>> from shardwright.storage import MemoryStorage
    >>> place = MemoryStorage()
    >>> checkpoint.save({"w": torch.ones(4)}, place)
    >>> check_files(place, 0, 1)
    """
    manifest = read_manifest(storage)
    verifying = _Verifying(storage, manifest, None, sorted(manifest.files)[part::parts])
    report = verifying.run(threads)
    if verifying.unreadable is not None:
        raise verifying.unreadable
    if not report:
        listed_corruptions = join_first(report.corruptions, _MAX_LISTED, "; ")
        raise CorruptionError(f"{report.location} is corrupted: {listed_corruptions}")


@final
class _Verifying:
    def __init__(
        self,
        storage: Storage,
        manifest: Manifest,
        progress: Callable[[int, int], None] | None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        self._storage, self._manifest, self._progress = storage, manifest, progress
        self._lock = threading.Lock()
        # Each with its rank and its position in the file, to sort them.
        self._corruptions: list[tuple[int, int, Corruption]] = []
        self._remaining = iter(sorted(manifest.files) if ranks is None else ranks)
        self._nbytes, self._total = 0, sum(file.size for file in manifest.files.values())
        self.unreadable: StorageError | None = None  # the first error of the storage itself

    def run(self, threads: int) -> VerifyReport:
        in_threads(self._work, [(0, 0)] * max(1, min(threads, len(self._manifest.files))))
        data_files = self._manifest.names
        return VerifyReport(
            repr(self._storage),
            self._manifest.save_id,
            len(self._manifest.files),
            self._nbytes,
            tuple(corruption for *_, corruption in sorted(self._corruptions, key=lambda found: found[:2])),
            tuple(key for key in self._storage.list_keys() if key != KEY and key not in data_files),
        )

    def _work(self, _first: int, _last: int, stop: Stop) -> None:
        """Check one file after the other, until none is left."""
        while not stop:
            with self._lock:
                rank = next(self._remaining, None)
            if rank is None:
                return
            self._file(rank)

    def _file(self, rank: int) -> None:
        name = self._manifest.file_name(rank)
        try:
            with self._storage.open(name) as reader:
                self._contents(rank, name, reader)
        except MissingKeyError:
            self._add(rank, -1, Corruption(name, "is missing"))
        except FormatError as error:
            self._add(rank, -1, Corruption(name, f"is inconsistent: {error}"))
        except StorageError as error:
            self.unreadable = self.unreadable or error
            self._add(rank, -1, Corruption(name, f"cannot be read: {error}"))

    def _contents(self, rank: int, name: str, reader: Reader) -> None:
        expected = self._manifest.files[rank]
        if reader.size != expected.size:
            problem = f"has {reader.size} bytes, but the manifest says {expected.size}"
            self._add(rank, -1, Corruption(name, problem))
            if reader.size < expected.header_size:
                return
        file = self._manifest.file(rank)
        if (file.size, file.header_size) != (expected.size, expected.header_size):
            listed, computed = (expected.size, expected.header_size), (file.size, file.header_size)
            self._add(
                rank,
                -1,
                Corruption(name, f"has size and header {listed} in the manifest, but its tensors need {computed}"),
            )
            return
        header = bytearray(file.header_size)
        reader.read([memoryview(header)], 0)
        self._count(len(header))
        if digest(bytes(header)) != expected.digest:
            self._add(rank, -1, Corruption(name, "has a corrupted header: its digest does not match the manifest"))
            return
        self._data(rank, file, reader, file.checksums(bytes(header)))

    def _data(self, rank: int, file: DataFile, reader: Reader, checksums: npt.NDArray[np.uint32]) -> None:
        """Check every block, in the order of the file, several per read."""
        chunks = np.repeat(np.arange(len(file.blocks)), file.blocks)
        indices = np.arange(len(chunks)) - file.first_blocks[chunks]
        starts = file.header_size + file.plan.starts[chunks] + indices * BLOCK
        sizes = np.minimum(BLOCK, file.plan.nbytes[chunks] - indices * BLOCK)
        dtypes = file.plan.table.dtypes
        is_bool = [dtypes[tensor] == "bool" for tensor in file.plan.tensors.tolist()]
        window = memoryview(bytearray(min(_WINDOW, file.plan.size)))
        first = 0
        while first < len(chunks):
            last = int(np.searchsorted(starts + sizes, starts[first] + _WINDOW, side="right"))
            begin, end = int(starts[first]), int(starts[last - 1] + sizes[last - 1])
            available = max(0, min(end, reader.size) - begin)
            reader.read([window[:available]], begin)
            for block in range(first, last):
                low = int(starts[block]) - begin
                high = low + int(sizes[block])
                problem = ""
                if high > available:
                    problem = "is truncated"
                elif crc32c.crc32c(window[low:high]) != checksums[block]:
                    problem = "does not match its checksum"
                elif is_bool[chunks[block]] and int(np.frombuffer(window[low:high], np.uint8).max()) > 1:
                    problem = "is of a bool tensor, but contains bytes other than 0 and 1"
                if problem:
                    self._add(rank, block, self._corruption_of(file, int(chunks[block]), int(indices[block]), problem))
            self._count(available)
            first = last

    def _corruption_of(self, file: DataFile, chunk: int, block: int, problem: str) -> Corruption:
        first = file.header_size + int(file.plan.starts[chunk]) + block * BLOCK
        end = file.header_size + int(file.plan.starts[chunk] + file.plan.nbytes[chunk])
        return Corruption(
            file.name,
            problem,
            file.plan.table.names[int(file.plan.tensors[chunk])],
            file.plan.region(chunk),
            block,
            first,
            min(first + BLOCK, end),
        )

    def _add(self, rank: int, block: int, corruption: Corruption) -> None:
        with self._lock:
            self._corruptions.append((rank, block, corruption))

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self._nbytes += nbytes
            if self._progress is not None:
                self._progress(self._nbytes, self._total)
