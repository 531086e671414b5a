"""The data files of a checkpoint, each opened once, with its header verified."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import final

from shardwright.checkpoint.reading.contents import Contents, file_reader, open_file
from shardwright.checkpoint.reading.data_reader import FileReader
from shardwright.checkpoint.reading.foreign_reader import ForeignFileReader
from shardwright.checkpoint.reading.record_checks import Piece
from shardwright.errors import CorruptionError, MissingKeyError
from shardwright.storage import Storage

__all__ = ["OpenFiles"]


@final
class OpenFiles:
    """Opened data files; they are closed with `opened`."""

    def __init__(self, storage: Storage, manifest: Contents, opened: ExitStack) -> None:
        self.manifest = manifest
        self._storage, self._opened = storage, opened
        self._readers: dict[int, FileReader] = {}

    def open(self, rank: int) -> FileReader:
        """Return the file of a rank, opening it if needed."""
        opened = self._readers.get(rank)
        if opened is None:
            if rank not in self.manifest.files:
                raise CorruptionError(f"the manifest lists no file of rank {rank}, but tensors are stored in it")
            reader = self._opened.enter_context(open_file(self._storage, self.manifest, rank))
            opened = self._readers[rank] = file_reader(reader, self.manifest, rank)
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

    def open_pieces(self) -> list[tuple[int, Piece]]:
        """Return what was read of records that this rank has not read in full, with the number of their file."""
        return [
            (rank, piece)
            for rank, reader in self._readers.items()
            if isinstance(reader, ForeignFileReader)
            for piece in reader.checks.open_pieces()
        ]
