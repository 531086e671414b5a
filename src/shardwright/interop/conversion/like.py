"""A folder that a conversion should look like: its names, shapes and dtypes, and the files beside its weights."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence

import torch

from shardwright import checkpoint
from shardwright.errors import LoadMismatchError, NotACheckpointError, StorageError
from shardwright.interop.conversion.files import storage_errors
from shardwright.interop.conversion.source import OutputTensor
from shardwright.listing import join_first

__all__ = ["check_like", "copy_files", "expected_tensors"]

_MAX_LISTED = 20
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".index.json", ".distcp", ".metadata", ".msgpack", ".h5", ".gguf")


def expected_tensors(folder: str) -> dict[str, tuple[tuple[int, ...], torch.dtype]] | None:
    """Return the shapes and dtypes of the tensors of a folder; None if it has none, only a configuration."""
    if not os.path.isdir(folder):
        raise StorageError(f"like: {folder} is not a folder")
    if not any(name.endswith(_WEIGHTS) or name == "manifest.json" for name in os.listdir(folder)):
        return None
    try:
        with checkpoint.open(folder) as opened:
            return {name: (tuple(opened[name].shape), opened[name].dtype) for name in opened}
    except NotACheckpointError as error:
        raise NotACheckpointError(f"like: {error}") from error


def check_like(
    tensors: Sequence[OutputTensor],
    expected: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    folder: str,
    tied: Mapping[str, str],
) -> None:
    """Raise one error that lists all names, shapes and dtypes that differ from those expected.

    `tied` has names that are not written, because they are the same tensor as another.
    """
    faults: list[str] = []
    written = {tensor.name: tensor for tensor in tensors}
    for name, tensor in written.items():
        if name not in expected:
            faults.append(f"{name!r} is not in {folder}")
            continue
        shape, dtype = expected[name]
        if tensor.shape != shape:
            faults.append(f"{name!r} has the shape {list(tensor.shape)}, but {list(shape)} in {folder}")
        if tensor.dtype != dtype:
            faults.append(f"{name!r} would be {tensor.dtype}, but is {dtype} in {folder}; pass cast=")
    faults += [f"{name!r} is in {folder}, and not written" for name in expected if name not in written | dict(tied)]
    if faults:
        raise LoadMismatchError(
            f"the result would differ from {folder} in {len(faults)} place{'s' * (len(faults) > 1)}; nothing was "
            f"written\n  {join_first(faults, _MAX_LISTED, chr(10) + '  ')}"
        )


def copy_files(folder: str, to: str) -> None:
    """Copy the files of a folder that are not weights: its configuration, its tokenizer, its licence."""
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if os.path.isfile(path) and not name.endswith(_WEIGHTS) and name != "manifest.json":
            with storage_errors(os.path.join(to, name)):
                shutil.copyfile(path, os.path.join(to, name))
