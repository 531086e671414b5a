"""Write a folder as PyTorch's distributed checkpoint has it: archives in one file, and metadata that says where."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Callable
from typing import final

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from shardwright.interop.conversion.files import NewFile, storage_errors
from shardwright.interop.conversion.source import ConversionSource, OutputTensor
from shardwright.interop.conversion.torch_file import write_tensor_archive

__all__ = ["DistributedCheckpointWriter"]

_FILE = "__0_0.distcp"  # the first file of the first rank
_METADATA = ".metadata"


@final
class DistributedCheckpointWriter:
    """Writes a folder that `torch.distributed.checkpoint.load` reads; tied tensors share their bytes."""

    def __init__(self, source: ConversionSource) -> None:
        self._source = source
        self.names = list(source.tensors)
        self._ranges: dict[str, tuple[int, int]] = {}  # offset and length of each archive

    @property
    def nbytes(self) -> int:
        """The number of bytes of all tensors that are written."""
        return sum(tensor.nbytes for tensor in self.names if tensor.tied_to is None)

    def write(self, path: str, rank: int, ranks: int, progress: Callable[[int], None]) -> None:  # noqa: ARG002  one file: the first rank writes it
        """Write the tensors, on the first rank."""
        if rank:
            return
        with NewFile(os.path.join(path, _FILE)) as out, storage_errors(out.path):
            for tensor in self.names:
                if tensor.tied_to is None:
                    section = _Section(out.file)
                    with zipfile.ZipFile(section, "w") as archive:  # type: ignore[call-overload]  # it has what zipfile uses
                        write_tensor_archive(archive, tensor, self._source.windows(tensor), progress)
                    self._ranges[tensor.name] = section.begin, section.length

    def finish(self, folder: str) -> None:
        """Write the metadata."""
        metadata = Metadata(
            state_dict_metadata={tensor.name: _described(tensor) for tensor in self.names},
            planner_data={tensor.name: (tensor.name,) for tensor in self.names},
            storage_data={
                MetadataIndex(tensor.name, torch.Size([0] * len(tensor.shape)), 0): _StorageInfo(
                    _FILE, *self._ranges[tensor.tied_to or tensor.name]
                )
                for tensor in self.names
            },
            storage_meta=StorageMeta(),
        )
        with NewFile(os.path.join(folder, _METADATA)) as out:
            out.write(pickle.dumps(metadata))


def _described(tensor: OutputTensor) -> TensorStorageMetadata:
    shape = torch.Size(tensor.shape)
    return TensorStorageMetadata(
        TensorProperties(dtype=tensor.dtype), shape, [ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)]
    )


@final
class _Section:
    """The rest of a file, from where it is now, as a file of its own: archives know their offsets in it."""

    def __init__(self, file: io.FileIO) -> None:
        self._file, self.begin = file, file.seek(0, os.SEEK_END)

    @property
    def length(self) -> int:
        return self._file.seek(0, os.SEEK_END) - self.begin

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data)
        total = view.nbytes
        while view.nbytes:
            view = view[self._file.write(view) :]
        return total

    def tell(self) -> int:
        return self._file.tell() - self.begin

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_SET:
            return self._file.seek(self.begin + offset) - self.begin
        return self._file.seek(offset, whence) - self.begin

    def seekable(self) -> bool:
        return True

    def flush(self) -> None:
        self._file.flush()
