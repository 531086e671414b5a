"""Tensors in a file that is mapped into memory: a state larger than memory can be made, and then saved."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardwright import checkpoint
from shardwright.checkpoint import LazyTensor
from shardwright.errors import CheckpointError, NotACheckpointError, StorageError, UsageError

__all__ = ["check_output", "new_checkpoint", "scratch_tensors", "with_tensors"]

_ALIGNMENT = 64


def check_output(path: str) -> None:
    """Raise unless a checkpoint can be created at a path: nothing may exist there, but its parent folder must."""
    if os.path.lexists(path):
        raise UsageError(f"{path} exists: name an output that does not, or remove it first")
    parent = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(parent):
        raise NotACheckpointError(f"{path}: the folder {parent} does not exist")


@contextmanager
def new_checkpoint(path: str) -> Iterator[str]:
    """Yield a folder to work in beside `path`; its subfolder `result` becomes `path` at the end.

    If the work fails or is interrupted, everything is removed, and nothing is at `path`.
    """
    check_output(path)
    parent, name = os.path.split(os.path.abspath(path))
    try:
        folder = tempfile.mkdtemp(prefix=f".{name[:50]}-", dir=parent)
    except OSError as error:
        raise StorageError(f"cannot create a folder in {parent}: {error.strerror}") from error
    try:
        yield folder
        check_output(path)
        os.rename(os.path.join(folder, "result"), path)
        _flush_folder(parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def scratch_tensors(folder: str, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, Tensor]:
    """Return empty tensors of these shapes and dtypes, in a file in a folder, whose space is reserved."""
    offsets: dict[str, int] = {}
    total = 0
    for name, (shape, dtype) in tensors.items():
        offsets[name] = total
        total += -(-prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    path = os.path.join(folder, "scratch")
    try:
        with open(path, "wb") as file:
            if total:
                os.posix_fallocate(file.fileno(), 0, total)  # a full disk is an error here, and a crash later
    except OSError as error:
        raise StorageError(f"cannot reserve {total} bytes in {folder}: {error.strerror}") from error
    memory = torch.from_file(path, shared=True, size=total, dtype=torch.uint8) if total else torch.empty(0).byte()
    return {
        name: memory[offsets[name] : offsets[name] + prod(shape) * dtype.itemsize].view(dtype).view(shape)
        for name, (shape, dtype) in tensors.items()
    }


def with_tensors(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the state of an open checkpoint (`Checkpoint.tree`) with these tensors, by their stored names."""
    if isinstance(tree, LazyTensor):
        return tensors[tree.stored_name]
    if isinstance(tree, dict):
        return {key: with_tensors(value, tensors) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(with_tensors(value, tensors) for value in tree)
    if isinstance(tree, checkpoint.PerRank):
        raise CheckpointError("the checkpoint has PerRank values that rank 0 does not have: load it on ranks instead")
    return tree


def _flush_folder(path: str) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
