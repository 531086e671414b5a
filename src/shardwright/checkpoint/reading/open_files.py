"""The data files of a checkpoint, each opened once, with its header verified."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import final

from shardwright.checkpoint.format.manifest import Manifest
from shardwright.checkpoint.reading.data_reader import FileReader
from shardwright.errors import CorruptionError, MissingKeyError
from shardwright.storage import Storage

__all__ = ["OpenFiles"]


@final
class OpenFiles:
    """Opened data files; they are closed with `opened`."""

    def __init__(self, storage: Storage, manifest: Manifest, opened: ExitStack) -> None:
        self.manifest = manifest
        self._storage, self._opened = storage, opened
        self._readers: dict[int, FileReader] = {}

    def open(self, rank: int) -> FileReader:
        """Return the file of a rank, opening it if needed."""
        opened = self._readers.get(rank)
        if opened is None:
            expected = self.manifest.files.get(rank)
            if expected is None:
                raise CorruptionError(f"the manifest lists no file of rank {rank}, but tensors are stored in it")
            file = self.manifest.file(rank)
            reader = self._opened.enter_context(self._storage.open(file.name))
            opened = self._readers[rank] = FileReader(reader, file, expected)
        return opened

    def open_all(self, ranks: Iterable[int]) -> None:
        """Open these files; report the errors of all of them in one."""
        faults: list[MissingKeyError | CorruptionError] = []
        for rank in sorted(ranks):
            try:
                self.open(rank)
            except (MissingKeyError, CorruptionError) as error:
                faults.append(error)
        if faults:
            # A missing file may mean that the checkpoint was replaced meanwhile: report it first.
            kind = MissingKeyError if any(isinstance(fault, MissingKeyError) for fault in faults) else CorruptionError
            raise kind("; ".join(map(str, faults))) from faults[0]
