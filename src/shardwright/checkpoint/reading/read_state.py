"""Read a whole checkpoint into a new state of plain tensors, in one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shardwright.checkpoint.format.values import DTYPES, Codec
from shardwright.checkpoint.reading.build_state import build
from shardwright.checkpoint.reading.collective_read import read_alone
from shardwright.checkpoint.reading.contents import Contents, check_sizes
from shardwright.checkpoint.reading.current import read_current
from shardwright.checkpoint.reading.targets import Target
from shardwright.checkpoint.runtime.progress import ProgressCallback
from shardwright.layout import Region
from shardwright.storage import Storage

__all__ = ["read_state"]


def read_state(
    storage: Storage,
    codecs: Mapping[type, Codec],
    threads: int,
    progress: ProgressCallback | None,
    memory: int | None,
) -> Any:
    """Return everything that is stored, as a state of plain tensors."""
    by_name = {codec.name: codec for codec in codecs.values()}

    def read(manifest: Contents) -> Any:
        check_sizes(storage, manifest)  # size allocations by the files, not by what the manifest claims
        table = manifest.tensors
        tensors: dict[int, torch.Tensor] = {}
        targets: list[Target] = []

        def tensor(number: int, is_array: bool) -> Any:
            if number not in tensors:
                dtype, region = DTYPES[table.dtypes[number]], Region.whole(table.shape(number))
                tensors[number] = torch.empty(region.size, dtype=dtype)
                targets.append(Target(table.names[number], number, tensors[number], region, dtype))
            return tensors[number].numpy() if is_array else tensors[number]

        state = build(manifest.tree, tensor, by_name, rank=0)
        read_alone(storage, manifest, targets, threads, progress, memory)
        return state

    return read_current(storage, read)
