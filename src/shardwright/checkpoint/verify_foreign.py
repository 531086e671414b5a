"""Verify a checkpoint of another format: every record that has a CRC-32, and that everything else can be read."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterable
from typing import final

import numpy as np

from shardwright.checkpoint.format.data_file import BLOCK
from shardwright.checkpoint.runtime.parallel import Stop, in_threads
from shardwright.checkpoint.verify_report import Corruption, VerifyReport
from shardwright.errors import CorruptionError, FormatError, MissingKeyError, StorageError
from shardwright.interop.formats import Archive, ForeignContents, ForeignFile, Location, Record
from shardwright.storage import Reader, Storage

__all__ = ["verify_foreign"]

_WINDOW = 4 * BLOCK  # bytes read in one call


def verify_foreign(
    contents: ForeignContents, storage: Storage, progress: Callable[[int, int], None] | None, threads: int
) -> VerifyReport:
    """Return the report of a checkpoint of another format."""
    return _Verifying(contents, storage, progress).run(threads)


@final
class _Verifying:
    def __init__(
        self, contents: ForeignContents, storage: Storage, progress: Callable[[int, int], None] | None
    ) -> None:
        self._contents, self._storage, self._progress = contents, storage, progress
        self._lock = threading.Lock()
        self._remaining = iter(sorted(contents.files))
        self._corruptions: list[tuple[int, int, Corruption]] = []  # with the file and the offset, to sort them
        self._nbytes, self._unchecked = 0, 0
        self._total = sum(int(file.plan.nbytes.sum()) for file in contents.files.values())

    def run(self, threads: int) -> VerifyReport:
        in_threads(self._work, [(0, 0)] * max(1, min(threads, len(self._contents.files))))
        return VerifyReport(
            repr(self._storage),
            self._contents.save_id,
            len(self._contents.files),
            self._nbytes,
            tuple(corruption for *_, corruption in sorted(self._corruptions, key=lambda found: found[:2])),
            unchecked=self._unchecked,
        )

    def _work(self, _first: int, _last: int, stop: Stop) -> None:
        while not stop:
            with self._lock:
                number = next(self._remaining, None)
            if number is None:
                return
            file = self._contents.files[number]
            try:
                with self._contents.storage.open_file(file.name) as reader:
                    self._file(number, file, reader)
            except MissingKeyError:
                self._add(number, -1, Corruption(file.name, "is missing"))
            except StorageError as error:
                self._add(number, -1, Corruption(file.name, f"cannot be read: {error}"))

    def _file(self, number: int, file: ForeignFile, reader: Reader) -> None:
        chunks: dict[int, list[tuple[int, Location]]] = {}  # by the start of their record
        damaged: set[int] = set()  # offsets of archives that were reported
        window = memoryview(bytearray(_WINDOW))
        for chunk in range(len(file.plan.tensors)):
            try:
                location = file.locate(chunk, reader)
            except (CorruptionError, FormatError) as error:
                damaged.add(int(file.plan.starts[chunk]))
                self._add(number, int(file.plan.starts[chunk]), self._of_chunk(file, chunk, f"is damaged: {error}"))
                continue
            if location.record is None:
                self._read_unchecked(number, file, chunk, location, reader, window)
            else:
                chunks.setdefault(location.record.start, []).append((chunk, location))
        for archive in file.archives:
            if archive.start in damaged:
                continue
            try:
                records = Archive(reader, archive.start, archive.nbytes, archive.name or file.name).records()
            except (CorruptionError, FormatError) as error:
                self._add(number, archive.start, Corruption(file.name, f"is damaged: {error}"))
                continue
            for record in records:
                self._record(number, file, record, chunks.get(record.start, ()), reader, window)

    def _record(
        self,
        number: int,
        file: ForeignFile,
        record: Record,
        chunks: Iterable[tuple[int, Location]],
        reader: Reader,
        window: memoryview,
    ) -> None:
        crc32 = 0
        for begin in range(record.start, record.start + record.nbytes, len(window)):
            view = window[: min(len(window), record.start + record.nbytes - begin)]
            reader.read([view], begin)
            crc32 = zlib.crc32(view, crc32)
            self._count(view.nbytes)
        if crc32 == record.crc32:
            return
        problem = f"does not match the CRC-32 of record {record.name!r}"
        found = [
            self._of_chunk(file, chunk, problem, location.start, location.start + location.span)
            for chunk, location in chunks
        ]
        end = record.start + record.nbytes
        for corruption in found or [Corruption(file.name, f"bytes {record.start} to {end}: {problem}")]:
            self._add(number, record.start, corruption)

    def _read_unchecked(
        self, number: int, file: ForeignFile, chunk: int, location: Location, reader: Reader, window: memoryview
    ) -> None:
        """Read a chunk that has no checksum: its bytes must be there, and those of bools be 0 or 1."""
        end = location.start + location.span
        if end > reader.size:
            self._add(number, location.start, self._of_chunk(file, chunk, "is truncated", location.start, end))
            return
        table = file.plan.table
        is_bool = table.dtypes[int(file.plan.tensors[chunk])] == "bool"
        for begin in range(location.start, end, len(window)):
            view = window[: min(len(window), end - begin)]
            reader.read([view], begin)
            if is_bool and int(np.frombuffer(view, np.uint8).max()) > 1:
                problem = "is of a bool tensor, but contains bytes other than 0 and 1"
                self._add(number, begin, self._of_chunk(file, chunk, problem, begin, begin + view.nbytes))
            self._count(view.nbytes)
        with self._lock:
            self._unchecked += location.span

    def _of_chunk(
        self, file: ForeignFile, chunk: int, problem: str, first: int | None = None, end: int | None = None
    ) -> Corruption:
        name = file.plan.table.names[int(file.plan.tensors[chunk])]
        return Corruption(file.name, problem, name, file.plan.region(chunk), None, first, end)

    def _add(self, number: int, start: int, corruption: Corruption) -> None:
        with self._lock:
            self._corruptions.append((number, start, corruption))

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self._nbytes += nbytes
            if self._progress is not None:
                self._progress(self._nbytes, max(self._total, self._nbytes))
