"""`save`, `async_save` and `load`: what users call."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from shardwright import comm
from shardwright.checkpoint.arguments import check_choice, check_codecs, check_limits, refuse_without_state
from shardwright.checkpoint.background import AsyncSave, raise_failures, start, wait_for_saves, wait_for_saves_to
from shardwright.checkpoint.format.values import Codec
from shardwright.checkpoint.load import Choice, LoadOperation, load_all
from shardwright.checkpoint.location import as_storage, location_id, resolve_group
from shardwright.checkpoint.reading.current import read_current_on_ranks
from shardwright.checkpoint.reading.match import Cast, OnMissing, Rename
from shardwright.checkpoint.runtime.alike import raised_as_itself
from shardwright.checkpoint.runtime.progress import Meter, ProgressCallback, reporting
from shardwright.checkpoint.save import SaveOperation
from shardwright.checkpoint.state.flatten import flatten
from shardwright.layout.gc import gc_paused
from shardwright.storage import LocalStorage, Storage

__all__ = ["async_save", "load", "save"]


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
    """Saves a state under a path, in place of what was saved there: all of it, or nothing changes.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save({"w": torch.ones(2), "epoch": 3}, folder)
    ...     load(folder)
    {'w': tensor([1., 1.]), 'epoch': 3}

    `extra` are further fields of the manifest, JSON, as the first rank gives them. With `check_replicas` the ranks
    compare the bytes of what several of them hold before anything is written. `memory` bounds the windows that
    strided tensors and those of a GPU go through: 16 MiB if it is not given, 1 MiB at least. `progress` is called with
    the bytes that this rank has written and those it writes in all; without it, a bar is shown on a terminal if it
    takes long. Saves in the background are waited for, and one that failed unnoticed is raised.

    A mistake that all ranks make alike is raised as it is (a `StateError`, say); what fails on some of them, as a
    `RankFailedError` on all, which names them. All ranks give the same folder, and it is one that they share.
    """
    group, check_group = resolve_group(process_group)
    saving = SaveOperation(lambda: as_storage(path), group, extra)

    def before() -> None:
        check_group()
        check_limits(memory, threads)
        check_codecs(codecs)
        wait_for_saves()

    with raised_as_itself(group):
        with gc_paused():
            saving.begin(lambda: flatten(state, group, codecs), before, check_replicas=check_replicas)
        saving.write(threads, lambda total: reporting("saving", total, progress, group), memory)


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
    """Saves a state in the background: it returns when the state may be changed, and writes a copy of it.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     state = {"w": torch.ones(2)}
    ...     saving = async_save(state, folder)
    ...     _ = state["w"].zero_()
    ...     saving.wait()
    ...     load(folder)
    {'w': tensor([1., 1.])}

    The copy is of what this rank writes, in host memory that is kept for the next save (`release_buffers` frees it).
    A second save waits until the first has given it back, unless `memory` has room for both. Where `memory` is less
    than a copy of all, this returns when all but the last `memory` bytes are written. If the save fails, `wait` of what
    is returned raises it; if nobody waits, the next save does. At its end the process waits for it. `progress` is
    called in the background. The other arguments are those of `save`.
    """
    group, check_group = resolve_group(process_group)
    aside = group.aside("checkpoint")
    if group.size > 1 and aside.channel is None:  # ranks meet there once while all of them are known to be here
        comm.agree(lambda: None, what="async_save", group=aside)
    saving = SaveOperation(lambda: as_storage(path), group, extra)

    def before() -> None:
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
        with raised_as_itself(aside):
            saving.finish(aside)

    with raised_as_itself(group):
        with gc_paused():
            saving.begin(lambda: flatten(state, group, codecs), before, check_replicas=check_replicas)
        saving.stage(threads, meter, memory)
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
    cast: Cast = False,
    on_missing: OnMissing = "raise",
    process_group: Any = None,
    codecs: Mapping[type, Codec] | None = None,
    memory: int | None = None,
    threads: int = 2,
    progress: ProgressCallback | None = None,
) -> Any:
    """Fills a state with what is stored under a path, and returns it; `load(path)` makes one of plain tensors.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save({"w": torch.ones(2), "epoch": 3}, folder)
    ...     load({"w": torch.zeros(2), "epoch": 0}, folder)
    {'w': tensor([1., 1.]), 'epoch': 3}

    Tensors are filled where they are, under whatever layout they have; containers stay the same objects. Everything is
    checked before anything changes, and one `LoadMismatchError` lists all that does not fit. A name of the checkpoint
    that no rank has in its state is refused, unless `strict` is false. `only` are patterns (`"model.*"`): other names
    stay as they are. `rename` maps stored names to those of the state, or is a function that does. `cast` allows other
    dtypes, for all names or by patterns. `on_missing` is "raise" or "keep", or a function that says so for a name of
    the state that the checkpoint does not have.

    `memory` bounds the windows of this rank that parts of blocks, strided tensors, those of a GPU and what ranks of a
    host read together go through: 8 MiB for each thread and 8 MiB of shared memory if it is not given, 1 MiB at least;
    below 4 MiB no rank reads for the others of its host. `progress` is called with the bytes that were filled on this
    rank and those to be filled in all; without it, a bar is shown on a terminal if it takes long.

    A save of this process to this place that is in the background is waited for, so that what it saves is what is
    loaded; if it fails, that is told by its `wait` or by the next save. All ranks read one checkpoint: from one folder,
    or from copies. Errors are raised as `save` does it.
    """
    if path is None:
        refuse_without_state(
            strict=strict is not True,
            only=only is not None,
            rename=rename is not None,
            cast=cast is not False,
            on_missing=on_missing != "raise",
            process_group=process_group is not None,
        )
        storage = as_storage(state)
        check_limits(memory, threads)
        check_codecs(codecs)
        wait_for_saves_to(location_id(storage))
        with gc_paused():
            return load_all(storage, codecs or {}, threads, progress, memory)
    group, check_group = resolve_group(process_group)
    choice = Choice(strict, only, rename, cast, on_missing, codecs)

    def prepare() -> Storage:
        check_group()
        check_limits(memory, threads)
        check_codecs(codecs)
        check_choice(only, cast)
        place = as_storage(path)
        wait_for_saves_to(location_id(place))
        return place

    with raised_as_itself(group), gc_paused():
        loading = LoadOperation(group, choice, threads, progress, memory)
        return read_current_on_ranks(prepare, group, lambda current: loading.fill(state, current))
