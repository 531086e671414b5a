"""Create state that a checkpoint has and an object lacks, so that it can be filled: see `StateCompleter`.

An optimizer has state only after its first step. When a checkpoint is loaded into one that has not stepped, the stored
state of each parameter is created first, with the parameter's layout if it has its shape. No step is taken, and the
optimizer gets all of it at the end, through its own `load_state_dict`, or nothing.

A rank with one stage of a model has objects with the state of that stage, but the checkpoint has the state of all
stages. So if any rank has created state, ranks exchange what they have, and what one rank has is not created on the
others.
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
    """Return the state as `complete` created it, or flattened `again` without what other ranks have.

    All ranks of the group call it, if any of them has created state.
    """
    new = complete.created
    common = [index for index, entry in enumerate(stored) if not entry.of_rank]
    matched = matched_entries(flat, stored) - new
    gathered = comm.gather_bytes(_bits(matched.intersection(common)), group, what="load: comparing what ranks have")
    present = 0
    for bits in gathered:
        present |= int(bits, 16)
    on_others = {index for index in new if present >> index & 1}
    completer = complete.without([stored[index] for index in on_others])
    completed = comm.agree(
        lambda: again(completer) if on_others else flat, what="load: creating missing state", group=group
    )
    return completed, completer if on_others else complete


def _bits(indices: Collection[int]) -> bytes:
    return f"{sum(1 << index for index in indices):x}".encode()


@final
class StateCompleter:
    """Completes an object's state dict, as `flatten` found it, with entries that exist only in the checkpoint.

    These are the state of an optimizer that has not stepped, and what any other object except a module lacks. Only
    names that `only` selects are created. `new_values` has the tensors that were created without contents: they must be
    filled. `created` has the indices of stored entries that were created for objects other than optimizers.
    """

    def __init__(
        self, stored: Sequence[StoredEntry], table: TensorTable, only: str | Sequence[str] | None = None
    ) -> None:
        self._table, self.new_values = table, _Created()
        self.created: set[int] = set()
        self._indices = {id(entry): index for index, entry in enumerate(stored)}
        patterns = patterns_of(only)
        self._stored = [entry for entry in stored if patterns is None or fits(entry.name, patterns)]

    def without(self, entries: Iterable[StoredEntry]) -> StateCompleter:
        """Return a completer that does not create these entries."""
        completer = StateCompleter([], self._table)
        left_out = {id(entry) for entry in entries}
        completer._indices = self._indices
        completer._stored = [entry for entry in self._stored if id(entry) not in left_out]
        return completer

    def __call__(self, value: Any, state: Any, name: str, keys: Keys) -> Any:
        if isinstance(value, nn.Module) or not self._stored:
            return state
        parameters = parameters_of(value)
        if parameters is None:
            return add_missing(state, entries_under(self._stored, name, keys), self._make_plain)
        if not isinstance(state, Mapping) or not isinstance(state.get("state"), dict):
            return state
        optimizer_state = dict(state["state"])
        new: dict[Any, list[RelativeEntry]] = {}
        for key, relative in _of_parameters(
            entries_under(self._stored, joined(name, "state"), (*keys, "state")), parameters
        ):
            if key not in optimizer_state:
                new.setdefault(key, []).append(relative)
        for key, entries in new.items():
            value_for_key = value_of(build_tree(entries), partial(self._make_like, parameters[key]))
            if value_for_key is not ABSENT:
                optimizer_state[key] = value_for_key
        return {**state, "state": optimizer_state}

    def _make_plain(self, entry: StoredEntry, depth: int) -> Any:
        if entry.of_rank or RelativeEntry(entry.path[len(entry.path) - depth :], "", entry).has_codec:
            return ABSENT  # only an existing state knows how it is wrapped
        if id(entry) in self._indices:
            self.created.add(self._indices[id(entry)])
        content = entry.content
        if not isinstance(content, StoredTensor):
            return plain(content.value)
        tensor = torch.empty(self._table.shape(content.number), dtype=self._dtype(content))
        return self.new_values.keep(tensor.numpy() if content.is_array else tensor)

    def _dtype(self, stored: StoredTensor) -> torch.dtype:
        return DTYPES[self._table.dtypes[stored.number]]

    def _make_like(self, parameter: Tensor, entry: StoredEntry, depth: int) -> Any:
        if entry.of_rank or RelativeEntry(entry.path[len(entry.path) - depth :], "", entry).has_codec:
            return ABSENT
        content = entry.content
        if not isinstance(content, StoredTensor):
            return plain(content.value)
        if content.is_array:
            return self.new_values.keep(
                torch.empty(self._table.shape(content.number), dtype=self._dtype(content)).numpy()
            )
        is_step = depth == 1 and entry.path[-1:] == ("step",)
        return self.new_values.keep(_empty_for(parameter, is_step, content.number, self._table))


@final
class _Created:
    """Created objects, by identity; they are kept alive, so that their ids are not reused."""

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
    """Yield (parameter key, remaining entry) for every stored entry that belongs to a parameter."""
    by_text = {str(key): key for key in parameters}
    for relative in entries:
        first = relative.keys[0]
        if first in parameters and type(first) is type(by_text.get(str(first))):
            yield first, relative.below(1)
            continue
        path = ".".join(map(str, relative.keys))
        at = len(path)
        while at > 0 and path[:at] not in by_text:
            at = path.rfind(".", 0, at)  # names contain dots: take the longest match
        if at == len(path):
            yield by_text[path], RelativeEntry((), "", relative.entry)
        elif at > 0:
            yield by_text[path[:at]], relative_entry(relative.entry, path[at + 1 :])


def _empty_for(parameter: Tensor, is_step: bool, number: int, table: TensorTable) -> Tensor:
    """Create an empty tensor for a stored tensor of a parameter's state."""
    shape, dtype = table.shape(number), DTYPES[table.dtypes[number]]
    is_like = tuple(parameter.shape) == shape and not is_step
    if dtype.is_floating_point and parameter.dtype.is_floating_point and not is_step:
        dtype = parameter.dtype  # as torch does: the optimizer would convert it anyway, and `cast` must allow it
    if not shape and not is_like:
        return torch.empty((), dtype=dtype)
    if isinstance(parameter, ShardedTensor):
        if not is_like:
            return torch.empty(shape, dtype=dtype)
        shards = [torch.empty_like(shard.tensor, dtype=dtype) for shard in parameter.local_shards()]
        return parameter._with([shard.requires_grad_(False) for shard in shards], dtype=dtype)
    if is_like:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    dtensor = to_ours(parameter)
    if not isinstance(dtensor, DTensor):
        return torch.empty(shape, dtype=dtype, device=parameter.device)
    result = empty(*shape, dtype=dtype, mesh=dtensor.device_mesh, placements=[Replicate()] * dtensor.device_mesh.ndim)
    if isinstance(parameter, DTensor):
        return result
    from shardwright.interop.tensors import to_torch_dtensor  # the parameter is PyTorch's, so it is already imported

    return to_torch_dtensor(result)
