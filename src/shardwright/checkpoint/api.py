"""`save` and `load`."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from shardwright import comm
from shardwright.checkpoint.alike import raised_as_itself
from shardwright.checkpoint.background import AsyncSave, settle, start, tell_failures, wait_for_place
from shardwright.checkpoint.current import check_sizes, read_current, read_current_on_ranks
from shardwright.checkpoint.datafile import BLOCK
from shardwright.checkpoint.fill import fill
from shardwright.checkpoint.flatten import flatten
from shardwright.checkpoint.grow_together import grow_together
from shardwright.checkpoint.manifest import Manifest
from shardwright.checkpoint.match import Cast, Match, OnMissing, Rename, match_state, of_nobody, renamed
from shardwright.checkpoint.mismatch import raise_mismatches
from shardwright.checkpoint.on_ranks import read_alone, read_on_ranks
from shardwright.checkpoint.optimizer import completing
from shardwright.checkpoint.place import group_of, place_of, storage_at
from shardwright.checkpoint.progress import Meter, Report, reporting
from shardwright.checkpoint.save import Saving
from shardwright.checkpoint.stored import build, stored_entries
from shardwright.checkpoint.targets import Target
from shardwright.checkpoint.together import make_explicit
from shardwright.checkpoint.values import DTYPES, Codec
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

    A mistake that all ranks make alike is raised as it is (a `StateError`, say); what fails on some of them, as a
    `RankFailedError` on all, which names them. All ranks give the same folder, and it is one that they share.
    """
    group, check_group = group_of(process_group)
    saving = Saving(lambda: storage_at(path), group, extra)

    def before() -> None:
        check_group()
        _check_limits(memory, threads)
        _check_codecs(codecs)
        settle()

    with raised_as_itself(group):
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
    group, check_group = group_of(process_group)
    aside = group.aside("checkpoint")
    if group.size > 1 and aside.channel is None:  # ranks meet there once while all of them are known to be here
        comm.agree(lambda: None, what="async_save", group=aside)
    saving = Saving(lambda: storage_at(path), group, extra)

    def before() -> None:
        check_group()
        _check_limits(memory, threads)
        _check_codecs(codecs)
        wait_for_place(place_of(storage_at(path)))
        tell_failures()

    meters: list[Meter] = []

    def meter(total: int) -> Meter:
        meters.append(Meter(total, progress))
        return meters[0]

    def finish() -> None:
        with raised_as_itself(aside):
            saving.finish(aside)

    with raised_as_itself(group):
        with not_collecting():
            saving.begin(lambda: flatten(state, group, codecs), before, check_replicas=check_replicas)
        saving.stage(threads, meter, memory)
    storage = storage_at(path)
    shown = storage.path if isinstance(storage, LocalStorage) else repr(storage)
    return start(shown, place_of(storage), meters[0], finish)


def _check_limits(memory: int | None, threads: int) -> None:
    for name, value in (("memory", memory), ("threads", threads)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise ArgumentTypeError(f"{name}={value!r}: a whole number is expected")
    if memory is not None and memory < BLOCK:
        raise CheckpointError(f"memory={memory}: a block of {BLOCK} bytes is the least that is copied at a time")
    if threads < 1:
        raise CheckpointError(f"threads={threads}: one at least")


def _check_codecs(codecs: Any) -> None:
    if codecs is None:
        return
    if not isinstance(codecs, Mapping):
        raise ArgumentTypeError(f"codecs={codecs!r} is a {type(codecs).__name__}: give a mapping of types to Codecs")
    for kind, codec in codecs.items():
        if not isinstance(kind, type):
            raise ArgumentTypeError(f"codecs: the key {kind!r} is a {type(kind).__name__}: a type is needed")
        if not isinstance(codec, Codec):
            raise ArgumentTypeError(f"codecs: for {kind.__name__} there is a {type(codec).__name__}: a Codec is needed")


def _check_choice(only: Any, cast: Any) -> None:
    if only is not None and not isinstance(only, str):
        if not isinstance(only, Collection) or isinstance(only, bytes):
            raise ArgumentTypeError(f"only={only!r} is a {type(only).__name__}: give a pattern, or several in a list")
        for pattern in only:
            if not isinstance(pattern, str):
                raise ArgumentTypeError(
                    f"only: the pattern {pattern!r} is a {type(pattern).__name__}: patterns are text"
                )
    if isinstance(cast, Mapping):
        for pattern, said in cast.items():
            if not isinstance(pattern, str) or not isinstance(said, bool):
                raise ArgumentTypeError(f"cast: {pattern!r}: {said!r} is no pattern with True or False")
    elif not isinstance(cast, bool):
        raise ArgumentTypeError(
            f"cast={cast!r} is a {type(cast).__name__}: give True, False, or a mapping of patterns to these"
        )


def _refuse_without_state(**given: bool) -> None:
    names = [f"{name}=" for name, is_given in given.items() if is_given]
    if names:
        raise ArgumentTypeError(
            f"load(path) makes a state of all that is stored, and {', '.join(names)} would mean nothing: give a state "
            "to fill, load(state, path, ...), or take what you need from open(path)"
        )


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
    progress: Report | None = None,
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
        _refuse_without_state(
            strict=strict is not True,
            only=only is not None,
            rename=rename is not None,
            cast=cast is not False,
            on_missing=on_missing != "raise",
            process_group=process_group is not None,
        )
        storage = storage_at(state)
        _check_limits(memory, threads)
        _check_codecs(codecs)
        wait_for_place(place_of(storage))
        return _load_all(storage, {codec.name: codec for codec in (codecs or {}).values()}, threads, progress, memory)
    group, check_group = group_of(process_group)

    def prepare() -> Storage:
        check_group()
        _check_limits(memory, threads)
        _check_codecs(codecs)
        _check_choice(only, cast)
        place = storage_at(path)
        wait_for_place(place_of(place))
        return place

    def work(manifest: Manifest) -> Any:
        def check() -> Any:
            stored, faults = renamed(stored_entries(manifest.tree, group.ranks[group.rank]), rename)
            if strict and only is None:
                faults += of_nobody(manifest.tree, group.ranks)
            complete = completing(stored, manifest.tensors, only)
            return stored, faults, flatten(state, group, codecs, complete), complete

        with not_collecting():
            stored, faults, flat, complete = comm.agree(check, what="load", group=group)
            flat, complete = grow_together(
                flat, complete, stored, group, lambda fewer: flatten(state, group, codecs, fewer)
            )
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
                made=complete.made,
            )

        with not_collecting():
            found = comm.agree(find, what="load: matching", group=group)
        raise_mismatches(found, flat, stored, group)
        read_on_ranks(storage, manifest, found.tensors, group, threads, progress, memory)
        return comm.agree(lambda: fill(flat, found), what="load: filling the state", group=group)

    with raised_as_itself(group):
        storage = comm.agree(prepare, what="load", group=group)
        return read_current_on_ranks(storage, group, work)


def _load_all(
    storage: Storage, codecs: Mapping[str, Codec], threads: int, progress: Report | None, memory: int | None
) -> Any:
    return read_current(storage, lambda manifest: _read_all(storage, manifest, codecs, threads, progress, memory))


def _read_all(
    storage: Storage,
    manifest: Manifest,
    codecs: Mapping[str, Codec],
    threads: int,
    progress: Report | None,
    memory: int | None,
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
    read_alone(storage, manifest, wanted, threads, progress, memory)
    return result
