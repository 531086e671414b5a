"""State that a checkpoint has and an object lacks, created before it is filled: see `StateCompleter`.

What an optimizer remembers exists only once it has stepped. So when a state is loaded into one that has not, what the
checkpoint has for a parameter is made for it first: with the parameter's layout where it has its shape. Nothing is
stepped for it, and the optimizer itself is given all of it at the end, by its own `load_state_dict`, or nothing.

A rank that has one stage of a model has objects with the state of that stage; the checkpoint has all stages'. So once
any rank has made something, ranks tell each other what they have, and what some rank has is not made on the others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from shardwright import comm
from shardwright.checkpoint.format.names import joined
from shardwright.checkpoint.format.tensor_table import TensorTable
from shardwright.checkpoint.format.tree import StoredEntry, StoredTensor
from shardwright.checkpoint.format.values import DTYPES
from shardwright.checkpoint.reading.match import matched_entries
from shardwright.checkpoint.reading.patterns import fits, patterns_of
from shardwright.checkpoint.reading.stored_tree import (
    ABSENT,
    RelativeEntry,
    add_missing,
    build_tree,
    entries_under,
    plain,
    relative_entry,
    value_of,
)
from shardwright.checkpoint.state.flatten import FlatState, Keys
from shardwright.checkpoint.state.leaves import to_ours
from shardwright.checkpoint.state.optimizer import parameters_of
from shardwright.layout import Replicate
from shardwright.sharded import ShardedTensor
from shardwright.tensor import DTensor, empty

__all__ = ["StateCompleter", "create_missing"]


def create_missing(
    flat: FlatState,
    complete: StateCompleter,
    stored: Sequence[StoredEntry],
    group: comm.Group,
    again: Callable[[StateCompleter], FlatState],
) -> tuple[FlatState, StateCompleter]:
    """The state as `complete` made it, or made `again` without what other ranks have.

    All ranks of the group call it, once any of them has made something.
    """
    new = complete.created
    common = [place for place, entry in enumerate(stored) if not entry.of_rank]
    mine = matched_entries(flat, stored) - new
    said = comm.gather_bytes(_bits(mine.intersection(common)), group, what="load: comparing what ranks have")
    taken = 0
    for one in said:
        taken |= int(one, 16)
    others = {place for place in new if taken >> place & 1}
    fewer = complete.without([stored[place] for place in others])
    made = comm.agree(lambda: again(fewer) if others else flat, what="load: creating missing state", group=group)
    return made, fewer if others else complete


def _bits(places: Collection[int]) -> bytes:
    return f"{sum(1 << place for place in places):x}".encode()


@final
class StateCompleter:  # it is called like a function
    """What gives an object's state, as `flatten` found it, back with what is stored for it besides.

    That is what an optimizer that has not stepped lacks, and what any other object does that is no module. Only names
    that `only` chooses are made. `made` are the tensors without contents: they must be filled, or not be given. `grown`
    are the places, among all that is stored, of what objects that are no optimizers lacked.
    """

    def __init__(
        self, stored: Sequence[StoredEntry], table: TensorTable, only: str | Sequence[str] | None = None
    ) -> None:
        self._table, self.made = table, _Made()
        self.created: set[int] = set()
        self._places = {id(one): place for place, one in enumerate(stored)}
        patterns = patterns_of(only)
        self._stored = [one for one in stored if patterns is None or fits(one.name, patterns)]

    def without(self, entries: Iterable[StoredEntry]) -> StateCompleter:
        """The same, which does not make these."""
        other = StateCompleter([], self._table)
        left_out = {id(one) for one in entries}
        other._places, other._stored = self._places, [one for one in self._stored if id(one) not in left_out]
        return other

    def __call__(self, value: Any, state: Any, name: str, keys: Keys) -> Any:
        if isinstance(value, nn.Module) or not self._stored:
            return state
        parameters = parameters_of(value)
        if parameters is None:
            return add_missing(state, entries_under(self._stored, name, keys), self._make_plain)
        if not isinstance(state, Mapping) or not isinstance(state.get("state"), dict):
            return state
        remembered = dict(state["state"])
        new: dict[Any, list[RelativeEntry]] = {}
        for key, one in _of_parameters(
            entries_under(self._stored, joined(name, "state"), (*keys, "state")), parameters
        ):
            if key not in remembered:
                new.setdefault(key, []).append(one)
        for key, entries in new.items():
            made = value_of(build_tree(entries), partial(self._make_like, parameters[key]))
            if made is not ABSENT:
                remembered[key] = made
        return {**state, "state": remembered}

    def _make_plain(self, entry: StoredEntry, depth: int) -> Any:
        if entry.of_rank or RelativeEntry(entry.path[len(entry.path) - depth :], "", entry).has_codec:
            return ABSENT  # only a state that has it already knows how it is wrapped
        if id(entry) in self._places:
            self.created.add(self._places[id(entry)])
        what = entry.what
        if not isinstance(what, StoredTensor):
            return plain(what.value)
        made = torch.empty(self._table.shape(what.number), dtype=self._dtype(what))
        return self.made.keep(made.numpy() if what.is_array else made)

    def _dtype(self, what: StoredTensor) -> torch.dtype:
        return DTYPES[self._table.dtypes[what.number]]

    def _make_like(self, parameter: Tensor, entry: StoredEntry, depth: int) -> Any:
        if entry.of_rank or RelativeEntry(entry.path[len(entry.path) - depth :], "", entry).has_codec:
            return ABSENT
        what = entry.what
        if not isinstance(what, StoredTensor):
            return plain(what.value)
        if what.is_array:
            return self.made.keep(torch.empty(self._table.shape(what.number), dtype=self._dtype(what)).numpy())
        is_step = depth == 1 and entry.path[-1:] == ("step",)
        return self.made.keep(_made(parameter, is_step, what.number, self._table))


@final
class _Made:
    """What was made, by identity; it is kept, so that no other can have it."""

    def __init__(self) -> None:
        self._kept: dict[int, Any] = {}

    def keep(self, value: Any) -> Any:
        self._kept[id(value)] = value
        return value

    def __contains__(self, value: object) -> bool:
        return id(value) in self._kept


def _of_parameters(
    entries: Iterable[RelativeEntry], parameters: Mapping[Any, Tensor]
) -> Iterator[tuple[Any, RelativeEntry]]:
    """What is stored of parameters: of which, and under which keys behind it."""
    by_text = {str(key): key for key in parameters}
    for one in entries:
        first = one.keys[0]
        if first in parameters and type(first) is type(by_text.get(str(first))):
            yield first, one.below(1)
            continue
        rest = ".".join(map(str, one.keys))
        at = len(rest)
        while at > 0 and rest[:at] not in by_text:
            at = rest.rfind(".", 0, at)  # names have dots, too: the longest that fits
        if at == len(rest):
            yield by_text[rest], RelativeEntry((), "", one.entry)
        elif at > 0:
            yield by_text[rest[:at]], relative_entry(one.entry, rest[at + 1 :])


def _made(parameter: Tensor, is_step: bool, number: int, table: TensorTable) -> Tensor:
    """Room for a stored tensor of a parameter's state."""
    shape, dtype = table.shape(number), DTYPES[table.dtypes[number]]
    is_like = tuple(parameter.shape) == shape and not is_step
    if dtype.is_floating_point and parameter.dtype.is_floating_point and not is_step:
        dtype = parameter.dtype  # as torch has it: the optimizer would convert it anyway, and cast= is to say so
    if not shape and not is_like:
        return torch.empty((), dtype=dtype)
    if isinstance(parameter, ShardedTensor):
        if not is_like:
            return torch.empty(shape, dtype=dtype)
        shards = [torch.empty_like(shard.tensor, dtype=dtype) for shard in parameter.local_shards()]
        return parameter._with([shard.requires_grad_(False) for shard in shards], dtype=dtype)
    if is_like:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    ours = to_ours(parameter)
    if not isinstance(ours, DTensor):
        return torch.empty(shape, dtype=dtype, device=parameter.device)
    whole = empty(*shape, dtype=dtype, mesh=ours.device_mesh, placements=[Replicate()] * ours.device_mesh.ndim)
    if isinstance(parameter, DTensor):
        return whole
    from shardwright.interop import to_torch_dtensor  # the parameter is PyTorch's: it is imported already

    return to_torch_dtensor(whole)
