"""Loading: take the target apart, find what fills it, check all of that, read it, and put it in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch

from shardwright import comm
from shardwright.checkpoint.format.manifest import Manifest
from shardwright.checkpoint.format.stored import build, stored_entries
from shardwright.checkpoint.read.current import check_sizes, read_current
from shardwright.checkpoint.read.match import Cast, Match, OnMissing, Rename, match_state, of_nobody, renamed
from shardwright.checkpoint.read.mismatch import raise_mismatches
from shardwright.checkpoint.read.on_ranks import read_alone, read_on_ranks
from shardwright.checkpoint.read.targets import Target
from shardwright.checkpoint.state.fill import fill
from shardwright.checkpoint.state.flatten import Flat, flatten
from shardwright.checkpoint.state.grow_together import grow_together
from shardwright.checkpoint.state.optimizer import completing
from shardwright.checkpoint.state.together import make_explicit
from shardwright.checkpoint.state.values import DTYPES, Codec
from shardwright.checkpoint.work.progress import Report
from shardwright.layout import Region
from shardwright.layout.collecting import not_collecting
from shardwright.storage import Storage

__all__ = ["Choice", "Loading", "load_all"]


class Choice(NamedTuple):
    """What of a checkpoint is loaded into what of a state, and how: the arguments of `load` that say so."""

    strict: bool
    only: str | Sequence[str] | None
    rename: Rename | None
    cast: Cast
    on_missing: OnMissing
    codecs: Mapping[type, Codec] | None


@final
@dataclass(frozen=True)
class Loading:
    """One load, as this rank sees it."""

    storage: Storage
    group: comm.Group
    choice: Choice
    threads: int
    progress: Report | None
    memory: int | None

    def fill(self, state: Any, manifest: Manifest) -> Any:
        """The state, filled from this checkpoint. Collective; nothing is changed before everything was checked."""
        flat, found = self._match(state, manifest)
        read_on_ranks(self.storage, manifest, found.tensors, self.group, self.threads, self.progress, self.memory)
        return comm.agree(lambda: fill(flat, found), what="load: filling the state", group=self.group)

    def _match(self, state: Any, manifest: Manifest) -> tuple[Flat, Match]:
        """The target taken apart, and what fills which part of it."""
        group, choice = self.group, self.choice

        def take_apart() -> Any:
            stored, faults = renamed(stored_entries(manifest.tree, group.ranks[group.rank]), choice.rename)
            if choice.strict and choice.only is None:
                faults += of_nobody(manifest.tree, group.ranks)
            complete = completing(stored, manifest.tensors, choice.only)
            return stored, faults, flatten(state, group, choice.codecs, complete), complete

        with not_collecting():
            stored, faults, flat, complete = comm.agree(take_apart, what="load", group=group)
            flat, complete = grow_together(
                flat, complete, stored, group, lambda fewer: flatten(state, group, choice.codecs, fewer)
            )
        make_explicit(flat, group)

        def find() -> Match:
            return match_state(
                flat,
                stored,
                manifest.tensors,
                strict=choice.strict,
                only=choice.only,
                cast=choice.cast,
                on_missing=choice.on_missing,
                faults=faults,
                made=complete.made,
            )

        with not_collecting():
            found = comm.agree(find, what="load: matching", group=group)
        raise_mismatches(found, flat, stored, group)
        return flat, found


def load_all(
    storage: Storage, codecs: Mapping[type, Codec], threads: int, progress: Report | None, memory: int | None
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
