"""Loading: take the target apart, find what fills it, check all of that, read it, and put it in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import msgspec
import torch

from shardwright import comm
from shardwright.checkpoint.format.manifest import Manifest
from shardwright.checkpoint.format.tree import StoredEntry, stored_entries
from shardwright.checkpoint.format.values import DTYPES, Codec
from shardwright.checkpoint.reading.build_state import build
from shardwright.checkpoint.reading.current import Current, check_sizes, read_current
from shardwright.checkpoint.reading.fill import fill
from shardwright.checkpoint.reading.match import (
    Cast,
    Match,
    OnMissing,
    Rename,
    match_state,
    rename_entries,
    unclaimed_rank_values,
)
from shardwright.checkpoint.reading.mismatch import Mismatches, mismatches_of, raise_mismatches
from shardwright.checkpoint.reading.missing_state import StateCompleter, create_missing
from shardwright.checkpoint.reading.on_ranks import CollectiveRead, ReadSummary, read_alone
from shardwright.checkpoint.reading.open_files import OpenFiles
from shardwright.checkpoint.reading.targets import Target
from shardwright.checkpoint.runtime.progress import ProgressCallback
from shardwright.checkpoint.state.flatten import (
    CodecNode,
    ContainerNode,
    FlatState,
    Node,
    ObjectNode,
    PerRankNode,
    flatten,
)
from shardwright.checkpoint.state.merge_ranks import flatten_nested_shards
from shardwright.layout import Region
from shardwright.storage import Storage

__all__ = ["Choice", "LoadOperation", "load_all"]


class Choice(NamedTuple):
    """What of a checkpoint is loaded into what of a state, and how: the arguments of `load` that say so."""

    strict: bool
    only: str | Sequence[str] | None
    rename: Rename | None
    cast: Cast
    on_missing: OnMissing
    codecs: Mapping[type, Codec] | None


class _Apart(NamedTuple):
    """The target taken apart, what is stored, and what was made for its objects; `faults` are of names."""

    stored: list[StoredEntry]
    faults: list[str]
    flat: FlatState
    complete: StateCompleter


class _Fit(NamedTuple):
    """The target, what fills it, and how that is read."""

    apart: _Apart
    found: Match
    reading: CollectiveRead


class _Fits(NamedTuple):
    """What a rank tells the others of how the checkpoint fits its state."""

    mismatches: Mismatches | None
    needs: ReadSummary | None
    gives: bool  # plain values, or states of objects: more than bytes to be read again


class _Said(NamedTuple):
    """What a rank tells the others of its state: whether something grew for it, is nested, and else how it fits."""

    grows: bool
    is_nested: bool
    fits: _Fits | None


@final
@dataclass(frozen=True)
class LoadOperation:
    """One load, as this rank sees it."""

    group: comm.Group
    choice: Choice
    threads: int
    progress: ProgressCallback | None
    memory: int | None

    def fill(self, state: Any, current: Current) -> Any:
        """The state, filled from this checkpoint. Collective; nothing is changed before everything was checked."""
        group = self.group
        with ExitStack() as opened:
            fit, said = self._check(state, current, OpenFiles(current.storage, current.manifest, opened))
            raise_mismatches([one.mismatches for one in said], fit.found, fit.apart.flat, fit.apart.stored, group)
            needs, gives = [one.needs for one in said if one.needs is not None], any(one.gives for one in said)

            def put_in() -> Any:
                return fill(fit.apart.flat, fit.found)

            # What cannot be undone by another load waits until every rank has read what it wants.
            filled = fit.reading.read(needs, self.threads, self.progress, (lambda: None) if gives else put_in)
        return comm.agree(put_in, what="load: filling the state", group=group) if gives else filled

    def _check(self, state: Any, current: Current, files: OpenFiles) -> tuple[_Fit, list[_Fits]]:
        """The target, what fills which part of it, and what every rank says to that: in one round, if nothing grows."""
        group = self.group

        def check() -> tuple[tuple[_Apart, _Fit | None], bytes]:
            apart = self._take_apart(state, current.manifest)
            grows, is_nested = bool(apart.complete.created) and group.size > 1, apart.flat.is_nested
            if grows or is_nested:  # what fits is known when ranks have told each other what they have
                return (apart, None), msgspec.json.encode(_Said(grows, is_nested, None))
            fit, fits = self._match(apart, current, files)
            return (apart, fit), msgspec.json.encode(_Said(grows, is_nested, fits))

        (apart, fit), told = comm.agree_telling(check, what="load: checking", group=group)
        said = [msgspec.json.decode(one, type=_Said) for one in told]
        all_fits = [one.fits for one in said if one.fits is not None]
        if fit is not None and len(all_fits) == len(said):
            return fit, all_fits
        if any(one.grows for one in said):
            apart = self._grow(apart, state)
        if any(one.is_nested for one in said):
            flatten_nested_shards(apart.flat, group)

        def check_again() -> tuple[_Fit, bytes]:
            fit, fits = self._match(apart, current, files)
            return fit, msgspec.json.encode(fits)

        grown, told = comm.agree_telling(check_again, what="load: checking what grew", group=group)
        return grown, [msgspec.json.decode(one, type=_Fits) for one in told]

    def _take_apart(self, state: Any, manifest: Manifest) -> _Apart:
        group, choice = self.group, self.choice
        stored, faults = rename_entries(stored_entries(manifest.tree, group.ranks[group.rank]), choice.rename)
        if choice.strict and choice.only is None:
            faults += unclaimed_rank_values(manifest.tree, group.ranks)
        complete = StateCompleter(stored, manifest.tensors, choice.only)
        return _Apart(stored, faults, flatten(state, group, choice.codecs, complete), complete)

    def _grow(self, apart: _Apart, state: Any) -> _Apart:
        flat, complete = create_missing(
            apart.flat,
            apart.complete,
            apart.stored,
            self.group,
            lambda fewer: flatten(state, self.group, self.choice.codecs, fewer),
        )
        return apart._replace(flat=flat, complete=complete)

    def _match(self, apart: _Apart, current: Current, files: OpenFiles) -> tuple[_Fit, _Fits]:
        """What fills what, its files open if this rank needs no other for that; and what the others are told."""
        choice = self.choice
        found = match_state(
            apart.flat,
            apart.stored,
            current.manifest.tensors,
            strict=choice.strict,
            only=choice.only,
            cast=choice.cast,
            on_missing=choice.on_missing,
            faults=apart.faults,
            made=apart.complete.made,
        )
        reading = CollectiveRead(files, found.tensors, self.group, current.hosts, self.memory)
        gives = self.group.size > 1 and bool(found.values or found.emptied or _has_objects(apart.flat.root))
        # What is wrong here is raised on all ranks, and nothing is read: there may be no plan for it.
        needs = None if found.faults or found.missing else reading.prepare()
        fits = _Fits(mismatches_of(found, apart.stored), needs, gives)
        return _Fit(apart, found, reading), fits


def _has_objects(node: Node) -> bool:
    """Whether anything in it is given to an object, or to a codec, rather than read to where it lies."""
    match node:
        case ObjectNode() | CodecNode():
            return True
        case ContainerNode():
            return any(map(_has_objects, node.children))
        case PerRankNode():
            return _has_objects(node.flat.root)
    return False


def load_all(
    storage: Storage, codecs: Mapping[type, Codec], threads: int, progress: ProgressCallback | None, memory: int | None
) -> Any:
    """All that is stored, as a state of plain tensors, by this process alone."""
    by_name = {codec.name: codec for codec in codecs.values()}

    def read(manifest: Manifest) -> Any:
        check_sizes(storage, manifest)  # memory is made for what the files hold, not for what the manifest claims
        table = manifest.tensors
        made: dict[int, torch.Tensor] = {}
        wanted: list[Target] = []

        def tensor(number: int, is_array: bool) -> Any:
            if number not in made:
                dtype, whole = DTYPES[table.dtypes[number]], Region.whole(table.shape(number))
                made[number] = torch.empty(whole.size, dtype=dtype)
                wanted.append(Target(table.names[number], number, made[number], whole, dtype))
            return made[number].numpy() if is_array else made[number]

        result = build(manifest.tree, tensor, by_name, rank=0)
        read_alone(storage, manifest, wanted, threads, progress, memory)
        return result

    return read_current(storage, read)
