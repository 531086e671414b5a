"""The public functions `save`, `async_save`, `load` and `read`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from shardwright import comm
from shardwright.checkpoint.arguments import check_codecs, check_limits, check_mapping, check_selection
from shardwright.checkpoint.background import AsyncSave, raise_failures, start, wait_for_saves, wait_for_saves_to
from shardwright.checkpoint.format.values import Codec
from shardwright.checkpoint.load import LoadOperation
from shardwright.checkpoint.location import as_storage, location_id, resolve_group
from shardwright.checkpoint.reader import LazyTensor
from shardwright.checkpoint.reader import open as open_checkpoint
from shardwright.checkpoint.reading.current import read_current_on_ranks
from shardwright.checkpoint.reading.read_state import read_state
from shardwright.checkpoint.reading.request import Cast, LoadRequest, OnMissing, Rename
from shardwright.checkpoint.runtime.progress import Meter, ProgressCallback, reporting
from shardwright.checkpoint.save import SaveOperation
from shardwright.checkpoint.state.flatten import flatten
from shardwright.errors import ArgumentTypeError
from shardwright.interop.mapping import Mapping as Rules
from shardwright.layout.gc import gc_paused
from shardwright.storage import LocalStorage, Storage

__all__ = ["async_save", "load", "read", "save"]


def save(
    state: Any,
    path: str | os.PathLike[str] | Storage,
    *,
    process_group: Any = None,
    codecs: Mapping[type, Codec] | None = None,
    extra: Mapping[str, Any] | None = None,
    check_replicas: bool = False,
    memory: int | None = None,
    threads: int = 2,
    progress: ProgressCallback | None = None,
) -> None:
    """Save a state to a path, atomically replacing the checkpoint there: all of it is saved, or nothing changes.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save({"w": torch.ones(2), "epoch": 3}, folder)
    ...     read(folder)
    {'w': tensor([1., 1.]), 'epoch': 3}

    `extra` has further fields for the manifest, as JSON values; those of the first rank are stored. With
    `check_replicas`, ranks compare the bytes of replicas before anything is written. `memory` bounds the buffers
    through which strided and GPU tensors are copied: 16 MiB by default, at least 1 MiB. `progress` is called with the
    bytes written by this rank and its total; without it, a progress bar is shown on a terminal if the save takes long.
    Background saves are waited for, and one that failed unreported is raised.

    An error that is the same on all ranks is raised as it is (a `StateError`, for example); if only some ranks fail,
    all raise a `RankFailedError` that names them. All ranks must give the same directory, which they must share.
    """
    group, check_group = resolve_group(process_group)
    operation = SaveOperation(lambda: as_storage(path), group, extra)

    def check() -> None:
        check_group()
        check_limits(memory, threads)
        check_codecs(codecs)
        wait_for_saves()

    with comm.unwrap_common_error(group):
        with gc_paused():
            operation.begin(lambda: flatten(state, group, codecs), check, check_replicas=check_replicas)
        operation.write(threads, lambda total: reporting("saving", total, progress, group), memory)


def async_save(
    state: Any,
    path: str | os.PathLike[str] | Storage,
    *,
    process_group: Any = None,
    codecs: Mapping[type, Codec] | None = None,
    extra: Mapping[str, Any] | None = None,
    check_replicas: bool = False,
    memory: int | None = None,
    threads: int = 2,
    progress: ProgressCallback | None = None,
) -> AsyncSave:
    """Save a state in the background: return once it is copied, so that it may be changed, and write the copy.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     state = {"w": torch.ones(2)}
    ...     saving = async_save(state, folder)
    ...     _ = state["w"].zero_()
    ...     saving.wait()
    ...     read(folder)
    {'w': tensor([1., 1.])}

    The copy holds what this rank writes, in host memory that is reused by the next save (`release_buffers` frees it).
    A second save waits until the first has released its buffer, unless `memory` has room for both. If `memory` is
    smaller than the copy, this returns when all but the last `memory` bytes are written. If the save fails, `wait` of
    the returned `AsyncSave` raises the error; if it is never called, the next save does. The process waits for the save
    before it exits. `progress` is called from the background thread. The other arguments are those of `save`.
    """
    group, check_group = resolve_group(process_group)
    side_group = group.side_channel("checkpoint")
    if group.size > 1 and side_group.channel is None:  # open the second channel while all ranks are known to be here
        comm.agree(lambda: None, what="async_save", group=side_group)
    operation = SaveOperation(lambda: as_storage(path), group, extra)

    def check() -> None:
        check_group()
        check_limits(memory, threads)
        check_codecs(codecs)
        wait_for_saves_to(location_id(as_storage(path)))
        raise_failures()

    meters: list[Meter] = []

    def meter(total: int) -> Meter:
        meters.append(Meter(total, progress))
        return meters[0]

    def finish() -> None:
        with comm.unwrap_common_error(side_group):
            operation.finish(side_group)

    with comm.unwrap_common_error(group):
        with gc_paused():
            operation.begin(lambda: flatten(state, group, codecs), check, check_replicas=check_replicas)
        operation.stage(threads, meter, memory)
    storage = as_storage(path)
    shown = storage.path if isinstance(storage, LocalStorage) else repr(storage)
    return start(shown, location_id(storage), meters[0], finish)


def load(
    state: Any,
    path: str | os.PathLike[str] | Storage | None = None,
    *,
    strict: bool = True,
    only: str | Sequence[str] | None = None,
    rename: Rename | None = None,
    mapping: Rules | None = None,
    cast: Cast = False,
    on_missing: OnMissing = "raise",
    process_group: Any = None,
    codecs: Mapping[type, Codec] | None = None,
    memory: int | None = None,
    threads: int = 2,
    progress: ProgressCallback | None = None,
) -> Any:
    """Fill a state with the checkpoint at a path, and return it. To read a checkpoint without a state, use `read`.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save({"w": torch.ones(2), "epoch": 3}, folder)
    ...     load({"w": torch.zeros(2), "epoch": 0}, folder)
    {'w': tensor([1., 1.]), 'epoch': 3}

    Tensors are filled in place, whatever their layout; containers remain the same objects. Everything is checked before
    anything changes, and one `LoadMismatchError` lists all mismatches. A stored name that no rank has in its state is a
    mismatch, unless `strict` is False. `only` has patterns (`"model.*"`) of the names to load; others keep their
    values. `rename` maps stored names to names of the state, or is a function that does; `mapping` is a
    `shardwright.Mapping` from stored tensors, on its left, to those of the state: each rank reads only what its shards
    need. `cast` allows dtypes to
    differ, for all names or by pattern. `on_missing` is "raise", "keep", or a function that returns one of them for a
    name of the state that is not in the checkpoint.

    `memory` bounds this rank's buffers for partial blocks, strided and GPU tensors, and blocks that ranks of a host
    read together: by default 8 MiB per thread and 8 MiB of shared memory, at least 1 MiB; below 4 MiB, ranks of a host
    do not share reads. `progress` is called with the bytes filled on this rank and its total; without it, a progress
    bar is shown on a terminal if the load takes long.

    If a background save of this process to the same location is running, it is waited for first; its failure is
    reported by its `wait` or by the next save. All ranks must read one checkpoint: from one directory, or from copies.
    Errors are raised as in `save`.
    """
    group, check_group = resolve_group(process_group)
    request = LoadRequest(group, strict, only, rename, cast, on_missing, codecs, memory, threads, progress, mapping)

    def prepare() -> Storage:
        check_group()
        check_limits(memory, threads)
        check_codecs(codecs)
        check_selection(only, cast)
        check_mapping(mapping, rename)
        if path is None:
            raise ArgumentTypeError(
                "load(state, path) needs a path; to read a whole checkpoint without a state, call read(path)"
            )
        storage = as_storage(path)
        wait_for_saves_to(location_id(storage))
        return storage

    with comm.unwrap_common_error(group), gc_paused():
        return read_current_on_ranks(prepare, group, lambda current: LoadOperation(request, state, current).run())


def read(
    path: str | os.PathLike[str] | Storage,
    *,
    mapping: Rules | None = None,
    codecs: Mapping[type, Codec] | None = None,
    memory: int | None = None,
    threads: int = 2,
    progress: ProgressCallback | None = None,
) -> Any:
    """Read a whole checkpoint and return it as a new state of plain tensors, in this process alone.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save({"w": torch.ones(2), "layers": [torch.zeros(1)]}, folder)
    ...     read(folder)
    {'w': tensor([1., 1.]), 'layers': [tensor([0.])]}

    Of `PerRank` values it has those of rank 0; if rank 0 has none, a `PerRank` of all ranks' values by rank. To fill a
    state that exists, under its own layout, use `load`; to read single tensors or slices, `open`. With a `mapping`, it
    is one dict of tensors and values by name. The arguments are those of `load`.
    """
    storage = as_storage(path)
    check_limits(memory, threads)
    check_codecs(codecs)
    if mapping is not None:
        with open_checkpoint(storage, mapping=mapping) as opened:
            return {name: _read_whole(value) for name, value in opened.tree().items()}
    wait_for_saves_to(location_id(storage))
    with gc_paused():
        return read_state(storage, codecs or {}, threads, progress, memory)


def _read_whole(value: Any) -> Any:
    return value[...] if isinstance(value, LazyTensor) else value
