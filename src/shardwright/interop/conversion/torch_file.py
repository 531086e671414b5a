"""Write a file as `torch.save` does: an archive of a pickled dict and of one record per storage, written in order.

`torch.load` reads it, with `weights_only` and with `mmap`.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

import torch
from torch import Tensor

from shardwright.checkpoint.runtime.address_space import memory_at
from shardwright.interop.conversion.files import NewFile, storage_errors
from shardwright.interop.conversion.source import ConversionSource, OutputTensor

__all__ = ["TorchFileWriter", "write_tensor_archive"]

_ALIGNMENT = 64  # of records, as torch has it
_ZIP64_EXTRA = 20  # bytes that `zipfile` adds to the header of a record
_PROTOCOL = 2  # torch's own


@final
class TorchFileWriter:
    """Writes one file with a dict of tensors by name; tied tensors share a storage."""

    def __init__(self, source: ConversionSource) -> None:
        self._source = source
        self.names = list(source.tensors)

    @property
    def nbytes(self) -> int:
        """The number of bytes of all storages."""
        return sum(tensor.nbytes for tensor in self.names if tensor.tied_to is None)

    def write(self, path: str, rank: int, ranks: int, progress: Callable[[int], None]) -> None:  # noqa: ARG002  one file: the first rank writes it
        """Write the file, on the first rank."""
        if rank:
            return
        with NewFile(path) as out, storage_errors(path), zipfile.ZipFile(out.file, "w") as archive:
            _write_archive(archive, self.names, self._source.windows, progress)

    def finish(self, folder: str) -> None:
        """Do nothing: the file is complete."""


def _write_archive(
    archive: zipfile.ZipFile,
    tensors: Sequence[OutputTensor],
    windows: Callable[[OutputTensor], Any],
    progress: Callable[[int], None],
) -> None:
    """Write the records of a dict of tensors."""
    keys = {tensor.name: str(key) for key, tensor in enumerate(each for each in tensors if each.tied_to is None)}
    _begin(archive, {tensor.name: _Pickled(tensor, keys[tensor.tied_to or tensor.name]) for tensor in tensors})
    for tensor in tensors:
        if tensor.tied_to is None:
            _write_record(archive, f"data/{keys[tensor.name]}", windows(tensor), progress)
    _write_record(archive, "version", [b"3\n"])


def write_tensor_archive(
    archive: zipfile.ZipFile, tensor: OutputTensor, windows: Iterable[Tensor], progress: Callable[[int], None]
) -> None:
    """Write the records of one tensor."""
    _begin(archive, _Pickled(tensor, "0"))
    _write_record(archive, "data/0", windows, progress)
    _write_record(archive, "version", [b"3\n"])


def _begin(archive: zipfile.ZipFile, value: object) -> None:
    """Write what comes before the storages: the pickled value, and how they are stored."""
    data = io.BytesIO()
    _Pickler(data).dump(value)
    for name, content in (
        ("data.pkl", data.getvalue()),
        (".format_version", b"1"),
        (".storage_alignment", str(_ALIGNMENT).encode()),
        ("byteorder", b"little"),
    ):
        _write_record(archive, name, [content])


def _write_record(
    archive: zipfile.ZipFile, name: str, contents: Any, progress: Callable[[int], None] | None = None
) -> None:
    info = zipfile.ZipInfo(f"archive/{name}")  # with the date that zip begins with: equal inputs give equal files
    assert archive.fp is not None  # it is open
    start = archive.fp.tell() + 30 + len(info.filename) + _ZIP64_EXTRA + 4
    padding = -start % _ALIGNMENT
    info.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
    with archive.open(info, "w", force_zip64=True) as record:
        for content in contents:
            if isinstance(content, Tensor):
                flat = content.contiguous()
                if flat.nbytes:
                    record.write(memory_at(flat.data_ptr(), flat.nbytes))
                if progress is not None:
                    progress(flat.nbytes)
            else:
                record.write(content)


class _Storage:
    """Stands for a storage while a tensor is pickled."""

    def __init__(self, tensor: OutputTensor, key: str) -> None:
        self.tensor, self.key = tensor, key


class _Pickled:
    """Stands for a tensor: it is pickled as torch pickles one."""

    def __init__(self, tensor: OutputTensor, key: str) -> None:
        self._storage, self._tensor = _Storage(tensor, key), tensor

    def __reduce__(self) -> tuple[Any, ...]:
        shape = self._tensor.shape
        strides = torch.empty(shape, device="meta").stride()
        arguments: tuple[Any, ...] = (self._storage, 0, shape, strides, False, OrderedDict())
        if _typed_storage(self._tensor.dtype) is None:
            return torch._utils._rebuild_tensor_v3, (*arguments, self._tensor.dtype)
        return torch._utils._rebuild_tensor_v2, arguments


class _Pickler(pickle.Pickler):
    def __init__(self, out: io.BytesIO) -> None:
        super().__init__(out, protocol=_PROTOCOL)

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, _Storage):
            return None
        kind = _typed_storage(value.tensor.dtype)
        if kind is None:
            return "storage", torch.UntypedStorage, value.key, "cpu", value.tensor.nbytes
        return "storage", kind, value.key, "cpu", torch.Size(value.tensor.shape).numel()


def _typed_storage(dtype: torch.dtype) -> Any:
    """Return the class by which torch names storages of this dtype, if it has one."""
    name = torch.storage._dtype_to_storage_type_map().get(dtype)
    return None if name is None else getattr(torch, name)
