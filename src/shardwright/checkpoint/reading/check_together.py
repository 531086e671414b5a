"""Check records that several ranks read in parts: each has the checksums of its pieces, and all compare the whole."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from shardwright import comm
from shardwright.checkpoint.reading.open_files import OpenFiles
from shardwright.checkpoint.reading.record_checks import Piece, RecordChecks
from shardwright.interop.formats import Record

__all__ = ["check_together"]


def check_together(files: OpenFiles, read: Callable[[], None], group: comm.Group, timeout: float) -> None:
    """Run `read` on all ranks; raise `CorruptionError` on all if a record that they read together is damaged."""

    def read_pieces() -> tuple[None, bytes]:
        read()
        return None, msgspec.msgpack.encode([(rank, *piece) for rank, piece in files.open_pieces()])

    _, gathered = comm.agree(read_pieces, what="load: reading", group=group, timeout=timeout, gather=True)
    checks: dict[int, RecordChecks] = {}
    for encoded in gathered:
        for rank, record, *rest in msgspec.msgpack.decode(encoded, type=list[tuple[int, Record, int, int, int]]):
            if rank not in checks:
                checks[rank] = RecordChecks(files.manifest.file_name(rank))
            checks[rank].add(Piece(record, *rest))
