"""Compare replicas: ranks that hold the same region of a tensor must hold the same bytes."""

from __future__ import annotations

from collections.abc import Sequence

import crc32c
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardwright import comm
from shardwright.checkpoint.format.tensor_table import TensorTable
from shardwright.checkpoint.runtime.address_space import memory_at
from shardwright.checkpoint.runtime.parallel import Stop, in_threads, split
from shardwright.checkpoint.state.merge_ranks import GlobalState
from shardwright.checkpoint.writing.data_writer import addresses_of, copy_range
from shardwright.errors import StateDiffersError
from shardwright.layout import Layout
from shardwright.listing import join_first

__all__ = ["compare_replicas"]

_WINDOW = 8 << 20
_MAX_LISTED = 20


def compare_replicas(state: GlobalState, group: comm.Group, threads: int = 2) -> None:
    """Raise on all ranks if any two of them hold different bytes for the same region of a tensor.

    Each rank computes the checksums of its replicated regions, and all ranks exchange them.
    """
    table, own_rank = state.table, group.global_rank
    shared = [_shared(table, kind) for kind in range(len(table.shardings))]
    own_tensors = _tensors_of(own_rank, table, shared)
    checksums_here = comm.agree(
        lambda: checksums([state.leaves[number].parts[0].tensor for number in own_tensors], threads),
        what="save: checking replicas",
        group=group,
    )
    gathered = comm.gather_bytes(checksums_here.tobytes(), group, what="save: comparing replicas")
    by_rank = {
        rank: dict(zip(_tensors_of(rank, table, shared), np.frombuffer(encoded, np.uint32).tolist(), strict=True))
        for rank, encoded in zip(group.ranks, gathered, strict=True)
    }
    differ = []
    for tensor, kind in enumerate(table.kinds.tolist()):
        for ranks in shared[kind]:
            ranks_by_checksum: dict[int, list[int]] = {}
            for rank in ranks:
                if rank in by_rank:
                    ranks_by_checksum.setdefault(by_rank[rank][tensor], []).append(rank)
            if len(ranks_by_checksum) > 1:
                differ.append(
                    f"{table.names[tensor]}: {'; '.join(_describe(*item) for item in ranks_by_checksum.items())}"
                )
    if differ:
        raise StateDiffersError(
            f"replicas have different bytes under {len(differ)} {'name' if len(differ) == 1 else 'names'}; mark values "
            "that differ between ranks with PerRank\n  " + join_first(differ, _MAX_LISTED, "\n  ")
        )


def checksums(tensors: Sequence[Tensor], threads: int = 2) -> npt.NDArray[np.uint32]:
    """Return the CRC-32C of each tensor's bytes, in row-major order.

    >>> [f"{value:08x}" for value in checksums([torch.tensor(list(b"123456789"), dtype=torch.uint8)])]
    ['e3069283']
    """
    result = np.zeros(len(tensors), np.uint32)
    addresses = addresses_of(tensors).tolist()
    nbytes = np.array([tensor.numel() * tensor.itemsize for tensor in tensors], np.int64)

    def work(first: int, last: int, stop: Stop) -> None:
        window: Tensor | None = None
        for number in range(first, last):
            if stop:
                return
            size = int(nbytes[number])
            if addresses[number] >= 0:
                result[number] = crc32c.crc32c(memory_at(addresses[number], size))
                continue
            window = torch.empty(_WINDOW, dtype=torch.uint8) if window is None else window
            value = 0
            for begin in range(0, size, _WINDOW):
                length = min(_WINDOW, size - begin)
                copy_range(window, tensors[number], begin, length)
                value = crc32c.crc32c(memory_at(window.data_ptr(), length), value)
            result[number] = value

    in_threads(work, split(nbytes, threads, least=_WINDOW))
    return result


def _shared(table: TensorTable, kind: int) -> list[tuple[int, ...]]:
    """Return the sets of ranks that hold the same region."""
    sharding = table.shardings[kind]
    if not isinstance(sharding, Layout):
        return []
    return [ranks for _, ranks in sharding.regions() if len(ranks) > 1]


def _tensors_of(rank: int, table: TensorTable, shared: Sequence[Sequence[tuple[int, ...]]]) -> list[int]:
    """Return the tensors of which a rank holds a region that other ranks hold, too."""
    kinds = np.array([any(rank in ranks for ranks in groups) for groups in shared], bool)
    tensors: list[int] = np.flatnonzero(kinds[table.kinds]).tolist() if len(table) else []
    return tensors


def _describe(value: int, ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}{', ...' * (len(ranks) > 8)} {value:08x}"
