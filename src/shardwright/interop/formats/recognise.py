"""Recognise the format of a checkpoint by its contents, and read what it contains."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeAlias

from shardwright.checkpoint.format.manifest import KEY
from shardwright.checkpoint.format.other_formats import INDEX_SUFFIX, RANK_METADATA, is_only_ours, other_format
from shardwright.errors import FormatError, NotACheckpointError
from shardwright.interop.formats.contents import ForeignContents
from shardwright.interop.formats.dcp import COMMON, read_dcp
from shardwright.interop.formats.hugging_face import read_safetensors_file, read_safetensors_index
from shardwright.interop.formats.stored import read_bytes
from shardwright.interop.formats.torch_file import LEGACY, ZIP, read_torch_file
from shardwright.interop.formats.torch_ranks import read_torch_ranks, sets_of_ranks
from shardwright.storage import LocalStorage

__all__ = ["read_foreign"]

_OURS = b'{"shardwright":'
_OUR_FILE = re.compile(r"[0-9a-z]{6,32}-\d{5,}-0\.safetensors")
_TORCH = (".pt", ".pth", ".bin")

_Read: TypeAlias = Callable[[], ForeignContents]


def read_foreign(storage: LocalStorage) -> ForeignContents | None:
    """Return the contents of a checkpoint of another format; None if the folder has none, or one of ours.

    Raise `FormatError` if a folder has checkpoints of two formats, or several files and none that says how they belong
    together.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     torch.save({"w": torch.ones(2)}, f"{folder}/state.pt")
    ...     read_foreign(LocalStorage(folder)).format
    'torch'
    """
    if storage.is_file():
        return _read_file(storage)
    names = storage.list_files()
    if is_only_ours(names):
        return None
    if KEY in names and _start(storage, KEY).startswith(_OURS):
        raise FormatError(
            f"{storage.path} has checkpoints of two formats: {KEY} and {other_format(names)}; move one of them to a "
            "folder of its own"
        )
    found = _found(storage, names)
    if len(found) > 1:
        raise FormatError(
            f"{storage.path} has checkpoints of two formats or of two models: {found[0][0]} and {found[1][0]}; name "
            "the file, or move one of them to a folder of its own"
        )
    return found[0][1]() if found else None


def _found(storage: LocalStorage, names: list[str]) -> list[tuple[str, _Read]]:
    """Return what says that a folder has a checkpoint of another format: the name of the file, and how to read it."""
    found: list[tuple[str, _Read]] = []
    ranks = sorted((int(match[1]), match[0]) for name in names if (match := RANK_METADATA.fullmatch(name)))
    if ".metadata" in names:
        found.append((".metadata", lambda: read_dcp(storage, [".metadata"], COMMON in names)))
    elif ranks:
        found.append((ranks[0][1], lambda: read_dcp(storage, [name for _, name in ranks], False)))
    indices = [name for name in names if name.endswith(INDEX_SUFFIX)]
    files = [name for name in names if name.endswith(".safetensors") and not _OUR_FILE.fullmatch(name)]
    if indices:
        found += [(name, lambda name=name: read_safetensors_index(storage, name)) for name in indices]  # type: ignore[misc]  # mypy cannot infer a lambda with a default
    elif len(files) == 1:
        found.append((files[0], lambda: read_safetensors_file(storage, files[0])))
    elif files:
        raise FormatError(
            f"{storage.path} has {len(files)} safetensors files and no index that says what belongs together: "
            f"{', '.join(files[:3])}; name one of them"
        )
    if not found:
        archives = [name for name in names if name.endswith(_TORCH) and _start(storage, name).startswith(ZIP)]
        sets = sets_of_ranks(archives)
        if sets is not None:
            found.append((archives[0], lambda: read_torch_ranks(storage, sets)))
        elif len(archives) == 1:
            found.append((archives[0], lambda: read_torch_file(storage, archives[0])))
        elif archives:
            raise FormatError(
                f"{storage.path} has {len(archives)} torch.save files: {', '.join(archives[:3])}; name one of them"
            )
    return found


def _start(storage: LocalStorage, name: str) -> bytes:
    with storage.open_file(name) as reader:
        return read_bytes(reader, 0, min(16, reader.size))


def _read_file(storage: LocalStorage) -> ForeignContents:
    folder = storage.parent()
    name = storage.path.removeprefix(folder.path).lstrip("/")
    start = _start(folder, name)
    if name.endswith(INDEX_SUFFIX):
        return read_safetensors_index(folder, name)
    if start.startswith(ZIP) or (start and start.startswith(LEGACY)):
        return read_torch_file(folder, name)
    if len(start) > 8 and start[8:9] == b"{" and int.from_bytes(start[:8], "little") < 1 << 32:
        return read_safetensors_file(folder, name)
    raise NotACheckpointError(f"{storage.path} is neither a torch.save file nor a safetensors file")
