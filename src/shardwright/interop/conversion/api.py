"""`convert`: write a checkpoint in another format, under other names and shapes, without holding it in memory."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Literal, Protocol, TypeAlias

from shardwright import checkpoint, comm
from shardwright.checkpoint.runtime.progress import ProgressCallback, reporting
from shardwright.errors import ArgumentTypeError, CheckpointError, StorageError
from shardwright.interop.conversion.files import commit, discard, storage_errors, temporary_name
from shardwright.interop.conversion.hugging_face import HuggingFaceWriter
from shardwright.interop.conversion.like import check_like, copy_files, expected_tensors
from shardwright.interop.conversion.own_format import OwnFormatWriter
from shardwright.interop.conversion.source import CastTo, ConversionSource, OutputTensor
from shardwright.interop.conversion.torch_file import TorchFileWriter
from shardwright.interop.mapping import Mapping
from shardwright.storage import LocalStorage

__all__ = ["Format", "convert"]

Format: TypeAlias = Literal["hf", "dcp", "torch", "shardwright"]

_FORMATS = ("hf", "dcp", "torch", "shardwright")
_MEMORY = 64 << 20
_MIN_BYTES_PER_SECOND = 5 << 20  # a rank that writes more slowly than this counts as stuck
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


class _Writer(Protocol):
    """What writes one format: its files on every rank, and what completes them on the first."""

    @property
    def names(self) -> list[OutputTensor]: ...

    @property
    def nbytes(self) -> int: ...

    def write(self, path: str, rank: int, ranks: int, progress: Callable[[int], None]) -> None: ...

    def finish(self, folder: str) -> None: ...


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    to: Format,
    mapping: Mapping | None = None,
    only: str | Sequence[str] | None = None,
    cast: CastTo | None = None,
    like: str | os.PathLike[str] | None = None,
    max_shard_size: int | str = "5GB",
    memory: int = _MEMORY,
    progress: ProgressCallback | None = None,
) -> None:
    """Write the tensors of a checkpoint in another format: "hf", "dcp", "torch" or "shardwright".

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     checkpoint.save({"layers.0.w": torch.arange(6.0).reshape(2, 3)}, f"{folder}/ours")
    ...     mapping = Mapping("layers.{i}.w = w.{i} : a b = b a")
    ...     convert(f"{folder}/ours", f"{folder}/weights.pt", to="torch", mapping=mapping)
    ...     torch.load(f"{folder}/weights.pt")
    {'w.0': tensor([[0., 3.], [1., 4.], [2., 5.]])}

    "hf" is a folder of safetensors files of at most `max_shard_size`, "dcp" a folder that
    `torch.distributed.checkpoint.load` reads, "torch" a file that `torch.load` reads, and "shardwright" a checkpoint of
    this library. `mapping` gives names and shapes; `only` selects by patterns of the new
    names; `cast` is a dtype for floating-point tensors, or has dtypes by pattern. `like` is a folder whose other files
    (configuration, tokenizer) are copied, and whose names, shapes and dtypes, if it has weights, the result must have.
    Tied tensors are written once.

    The tensors are read and written in pieces, of which `memory` bounds the bytes that are held at once. `dst` must not
    exist; it appears, complete, when all is written, and an interrupted conversion leaves nothing under its name. All
    ranks of a process group may call it together; for "hf" they share the files among them.
    """
    group = comm.world()
    source_path, path = os.fspath(src), LocalStorage(dst).path
    with comm.unwrap_common_error(group), ExitStack() as closing:

        def prepare() -> tuple[_Writer, bytes]:
            limit = _check_arguments(to, max_shard_size, memory)
            _check_destination(path)
            expected = None if like is None else expected_tensors(os.fspath(like))
            opened = closing.enter_context(checkpoint.open(source_path, mapping=mapping))
            source = ConversionSource(opened, only, cast, memory)
            writer = _writer(to, source, limit, frozenset(expected or ()), is_whole=mapping is None and only is None)
            if expected is not None:
                tied = {tensor.name: tensor.tied_to or "" for tensor in source.tensors}
                check_like(writer.names, expected, os.fspath(like or ""), tied)
            return writer, temporary_name(path).encode() if group.rank == 0 else b""

        writer, names = comm.agree(prepare, what="convert", group=group, gather=True)
        temporary = names[0].decode()
        try:
            comm.agree(lambda: _begin(temporary, to, group), what="convert: beginning", group=group)

            def write() -> None:
                with reporting("converting", writer.nbytes, progress, group) as meter:
                    writer.write(temporary, group.rank, group.size, meter)

            timeout = comm.default_timeout() + 2 * writer.nbytes / _MIN_BYTES_PER_SECOND
            comm.agree(write, what="convert: writing", group=group, timeout=timeout)

            def finish() -> None:
                if group.rank == 0:
                    writer.finish(temporary)
                    if like is not None and to != "torch":
                        copy_files(os.fspath(like), temporary)
                    commit(temporary, path)

            comm.agree(finish, what="convert: finishing", group=group)
        except BaseException:
            if group.rank == 0:
                with suppress(OSError):
                    discard(temporary)
            raise


def _begin(temporary: str, to: Format, group: comm.Group) -> None:
    if group.rank == 0:
        with storage_errors(temporary):
            os.makedirs(os.path.dirname(temporary), exist_ok=True)
            if to != "torch":
                os.mkdir(temporary)


def _writer(to: Format, source: ConversionSource, limit: int, keep: frozenset[str], *, is_whole: bool) -> _Writer:
    match to:
        case "hf":
            return HuggingFaceWriter(source, limit, keep)
        case "dcp":
            from shardwright.interop.conversion.distributed_checkpoint import DistributedCheckpointWriter  # it is slow

            return DistributedCheckpointWriter(source)
        case "torch":
            return TorchFileWriter(source)
        case "shardwright":
            manifest = source.opened._manifest
            stored = sum(tensor.tied_to is None for tensor in source.tensors)
            keeps_tree = is_whole and stored == len(manifest.tensors)
            return OwnFormatWriter(source, manifest.tree if keeps_tree else None)


def _check_arguments(to: object, max_shard_size: int | str, memory: object) -> int:
    """Validate the arguments; return the limit of a file in bytes."""
    if to not in _FORMATS:
        raise ArgumentTypeError(f"to must be one of {', '.join(map(repr, _FORMATS))}, got {to!r}")
    if isinstance(memory, bool) or not isinstance(memory, int):
        raise ArgumentTypeError(f"memory must be an int, got {type(memory).__name__}: {memory!r}")
    if memory < 4 << 20:
        raise CheckpointError(f"memory must be at least {4 << 20} bytes, got {memory}")
    if isinstance(max_shard_size, str):
        found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", max_shard_size)
        if found is None or found[2].upper() not in _UNITS:
            raise ArgumentTypeError(f"max_shard_size must be a number of bytes or as in '5GB', got {max_shard_size!r}")
        max_shard_size = int(float(found[1]) * _UNITS[found[2].upper()])
    if isinstance(max_shard_size, bool) or not isinstance(max_shard_size, int) or max_shard_size < 1:
        raise ArgumentTypeError(f"max_shard_size must be a positive number of bytes, got {max_shard_size!r}")
    return max_shard_size


def _check_destination(path: str) -> None:
    if os.path.lexists(path):
        raise StorageError(f"{path} exists; nothing was written. Remove it, or choose another destination")
