"""`save` and `load`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwright import comm
from shardwright.checkpoint.background import AsyncSave, settle, start, tell_failures, wait_for_place
from shardwright.checkpoint.current import check_sizes, read_current, read_current_on_ranks
from shardwright.checkpoint.datafile import BLOCK
from shardwright.checkpoint.fill import fill
from shardwright.checkpoint.flatten import flatten
from shardwright.checkpoint.manifest import Manifest
from shardwright.checkpoint.match import Cast, Match, OnMissing, Rename, match_state, renamed
from shardwright.checkpoint.mismatch import raise_mismatches
from shardwright.checkpoint.on_ranks import read_alone, read_on_ranks
from shardwright.checkpoint.optimizer import completing
from shardwright.checkpoint.place import storage_at
from shardwright.checkpoint.progress import Meter, Report, reporting
from shardwright.checkpoint.save import Saving
from shardwright.checkpoint.stored import build, stored_entries
from shardwright.checkpoint.targets import Target
from shardwright.checkpoint.together import make_explicit
from shardwright.checkpoint.values import DTYPES, Codec
from shardwright.checkpoint.write import Progress
from shardwright.errors import ArgumentTypeError, CheckpointError
from shardwright.layout import Region
from shardwright.layout.collecting import not_collecting
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
    progress: Report | None = None,
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
    """
    group = comm.Group.of(process_group)
    saving = Saving(storage_at(path), group, extra)

    def before() -> None:
        _check_limits(memory, threads)
        settle()

    with not_collecting():
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
    progress: Report | None = None,
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
    group = comm.Group.of(process_group)
    aside = group.aside("checkpoint")
    if group.size > 1 and aside.channel is None:  # ranks meet there once while all of them are known to be here
        comm.agree(lambda: None, what="async_save", group=aside)
    storage = storage_at(path)
    place = storage.path if isinstance(storage, LocalStorage) else repr(storage)
    saving = Saving(storage, group, extra)

    def before() -> None:
        _check_limits(memory, threads)
        wait_for_place(place)
        tell_failures()

    meters: list[Meter] = []

    def meter(total: int) -> Meter:
        meters.append(Meter(total, progress))
        return meters[0]

    with not_collecting():
        saving.begin(lambda: flatten(state, group, codecs), before, check_replicas=check_replicas)
    saving.stage(threads, meter, memory)
    return start(place, meters[0], lambda: saving.finish(aside))


def _check_limits(memory: int | None, threads: int) -> None:
    for name, value in (("memory", memory), ("threads", threads)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise ArgumentTypeError(f"{name}={value!r}: a whole number is expected")
    if memory is not None and memory < BLOCK:
        raise CheckpointError(f"memory={memory}: a block of {BLOCK} bytes is the least that is copied at a time")
    if threads < 1:
        raise CheckpointError(f"threads={threads}: one at least")


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
    threads: int = 2,
    progress: Progress | None = None,
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
    """
    if path is None:
        return _load_all(storage_at(state), {codec.name: codec for codec in (codecs or {}).values()}, threads, progress)
    group = comm.Group.of(process_group)
    storage = storage_at(path)

    def work(manifest: Manifest) -> Any:
        def check() -> Any:
            stored, faults = renamed(stored_entries(manifest.tree, group.ranks[group.rank]), rename)
            flat = flatten(state, group, codecs, completing(stored, manifest.tensors))
            return stored, faults, flat

        with not_collecting():
            stored, faults, flat = comm.agree(check, what="load", group=group)
        make_explicit(flat, group)

        def find() -> Match:
            return match_state(
                flat,
                stored,
                manifest.tensors,
                strict=strict,
                only=only,
                cast=cast,
                on_missing=on_missing,
                faults=faults,
            )

        with not_collecting():
            found = comm.agree(find, what="load: matching", group=group)
        raise_mismatches(found, flat, stored, group)
        read_on_ranks(storage, manifest, found.tensors, group, threads, progress)
        return comm.agree(lambda: fill(flat, found), what="load: filling the state", group=group)

    return read_current_on_ranks(storage, group, work)


def _load_all(storage: Storage, codecs: Mapping[str, Codec], threads: int, progress: Progress | None) -> Any:
    return read_current(storage, lambda manifest: _read_all(storage, manifest, codecs, threads, progress))


def _read_all(
    storage: Storage, manifest: Manifest, codecs: Mapping[str, Codec], threads: int, progress: Progress | None
) -> Any:
    check_sizes(storage, manifest)  # memory is made for what the files hold, not for what the manifest claims
    table = manifest.tensors
    made: dict[int, torch.Tensor] = {}
    wanted: list[Target] = []

    def tensor(number: int, is_array: bool) -> Any:
        if number not in made:
            dtype = DTYPES[table.dtypes[number]]
            made[number] = torch.empty(table.shape(number), dtype=dtype)
            wanted.append(Target(table.names[number], number, made[number], Region.whole(table.shape(number)), dtype))
        return made[number].numpy() if is_array else made[number]

    result = build(manifest.tree, tensor, codecs, rank=0)
    read_alone(storage, manifest, wanted, threads, progress)
    return result
