"""Write a checkpoint of this library, block by block, without holding its tensors."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, final

import numpy as np
import torch

from shardwright.checkpoint.commit import abort_on_error
from shardwright.checkpoint.format.data_file import BLOCK, DataFile, FileEntry
from shardwright.checkpoint.format.manifest import KEY, Manifest
from shardwright.checkpoint.format.tensor_table import TensorTable
from shardwright.checkpoint.format.write_layout import file_plan
from shardwright.checkpoint.writing.data_writer import Blocks, FileWriter
from shardwright.interop.conversion.source import ConversionSource, OutputTensor
from shardwright.layout import Layout, Mesh, Replicate
from shardwright.storage import LocalStorage

__all__ = ["OwnFormatWriter"]


@final
class OwnFormatWriter:
    """Writes a checkpoint of this library in one file. `tree` is that of the source, if nothing was mapped or left out.

    Without it, the state is one dict of the tensors by name.
    """

    def __init__(self, source: ConversionSource, tree: Any | None) -> None:
        self._source = source
        self.names = list(source.tensors)
        self._stored = [tensor for tensor in self.names if tensor.tied_to is None]
        numbers = {tensor.name: number for number, tensor in enumerate(self._stored)}
        flat = [item for tensor in self.names for item in (tensor.name, numbers[tensor.tied_to or tensor.name])]
        self._tree = ["d", *flat] if tree is None else tree
        self._table = TensorTable.of(
            [tensor.name for tensor in self._stored],
            [str(tensor.dtype).removeprefix("torch.") for tensor in self._stored],
            [tensor.dtype.itemsize for tensor in self._stored],
            [Layout(Mesh((1,)), [Replicate()], tensor.shape) for tensor in self._stored],
        )

    @property
    def nbytes(self) -> int:
        """The number of bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self._stored)

    def write(self, folder: str, rank: int, ranks: int, progress: Callable[[int], None]) -> None:  # noqa: ARG002  one file: the first rank writes it
        """Write the checkpoint, on the first rank."""
        if rank:
            return
        storage = LocalStorage(folder)
        storage.prepare()
        save_id = os.urandom(6).hex()
        file = DataFile(file_plan(self._table, 0), save_id)
        files: dict[int, FileEntry] = {}
        if len(file.plan.tensors):
            writer = storage.create(file.name)
            with abort_on_error(writer):
                writing = FileWriter(writer, file, 1, progress)
                for chunk, number in enumerate(file.plan.tensors.tolist()):
                    self._write_chunk(writing, file, chunk, self._stored[number])
                files[0] = writing.finish()
        storage.replace(KEY, Manifest(save_id, self._tree, self._table, files, {}).encode())

    def _write_chunk(self, writing: FileWriter, file: DataFile, chunk: int, tensor: OutputTensor) -> None:
        """Write a tensor, which is one chunk, from windows; blocks may lie across two of them."""
        begin = 0
        rest = torch.empty(0, dtype=torch.uint8)
        for window in self._source.windows(tensor):
            data = window.contiguous().view(torch.uint8)
            data = torch.cat([rest, data]) if rest.numel() else data
            full = data.numel() if begin + data.numel() == tensor.nbytes else data.numel() // BLOCK * BLOCK
            if full:
                writing.put(_blocks(file, chunk, begin, data[:full]))
            begin, rest = begin + full, data[full:].clone()

    def finish(self, folder: str) -> None:
        """Do nothing: the checkpoint is complete."""


def _blocks(file: DataFile, chunk: int, begin: int, data: torch.Tensor) -> Blocks:
    """Return the blocks of a chunk that these bytes are, which begin at byte `begin` of it."""
    first, count = begin // BLOCK, -(-data.numel() // BLOCK)
    within = np.arange(count, dtype=np.int64) * BLOCK
    return Blocks(
        int(file.first_blocks[chunk]) + first + np.arange(count, dtype=np.int64),
        data.data_ptr() + within,
        file.header_size + int(file.plan.starts[chunk]) + begin + within,
        np.minimum(BLOCK, data.numel() - within),
    )
