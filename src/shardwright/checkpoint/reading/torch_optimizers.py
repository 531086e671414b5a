"""The state of an optimizer as PyTorch's `get_state_dict` writes it, in the form of `optimizer_state`.

PyTorch lists options by group, with the names of the group's parameters; `optimizer_state` has them by parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from shardwright.checkpoint.format.names import joined, prefix
from shardwright.checkpoint.format.tree import StoredEntry, StoredValue
from shardwright.checkpoint.state.optimizer import OptimizerState

__all__ = ["optimizer_names", "options_by_parameter"]

_GROUPS = "param_groups"
_MAX_DEPTH = 64


def optimizer_names(state: Any) -> list[str]:
    """Return the names of the `optimizer_state`s in a state.

    >>> import torch
    >>> from shardwright import checkpoint
    >>> model = torch.nn.Linear(1, 1)
    >>> optimizer = torch.optim.SGD(model.parameters())
    >>> optimizer_names({"model": model, "optim": checkpoint.optimizer_state(model, optimizer)})
    ['optim']
    """
    found: list[str] = []
    pending: list[tuple[str, Any, int]] = [("", state, 0)]
    while pending:
        name, value, depth = pending.pop()
        if isinstance(value, OptimizerState):
            found.append(name)
        elif isinstance(value, Mapping) and depth < _MAX_DEPTH:
            pending += [(joined(name, key), item, depth + 1) for key, item in value.items()]
        elif isinstance(value, list | tuple) and depth < _MAX_DEPTH:
            pending += [(joined(name, index), item, depth + 1) for index, item in enumerate(value)]
    return sorted(found)


def options_by_parameter(stored: Sequence[StoredEntry], names: Collection[str]) -> list[StoredEntry]:
    """Return the entries with those of groups of the optimizers of these names replaced by entries of parameters."""
    entries = list(stored)
    for name in names:
        entries = _of_optimizer(entries, name)
    return entries


def _of_optimizer(stored: Sequence[StoredEntry], name: str) -> list[StoredEntry]:
    begin = f"{prefix(name)}{_GROUPS}."
    parameters: dict[Any, list[str]] = {}  # of each group
    for entry in stored:
        if entry.name.startswith(begin):
            match _below(entry, name):
                case [str(), int(group), "params", int()] if isinstance(entry.content, StoredValue):
                    parameters.setdefault(group, []).append(entry.content.value)
    if not all(isinstance(each, str) for names in parameters.values() for each in names):
        return list(stored)  # numbered, as an optimizer's own state_dict has them
    entries: list[StoredEntry] = []
    for entry in stored:
        below = _below(entry, name) if entry.name.startswith(begin) else []
        match below:
            case []:
                entries.append(entry)
            case [str(), int(group), "params", *_] if group in parameters:
                pass  # the names themselves
            case [str(), int(group), *option] if group in parameters:
                entries += [_option(entry, name, parameter, option) for parameter in parameters[group]]
            case _:  # flattened: by parameter already
                entries.append(entry._replace(name=f"{prefix(name)}options.{entry.name[len(begin) :]}", keys=None))
    return entries


def _below(entry: StoredEntry, name: str) -> list[Any]:
    """Return the keys of an entry below the value of this name; its name as one key, if they do not spell it."""
    for depth in range(len(entry.path)):
        if ".".join(map(str, entry.path[:depth])) == name and entry.path[depth] == _GROUPS:
            return list(entry.path[depth:])
    return [entry.name]


def _option(entry: StoredEntry, name: str, parameter: str, option: list[Any]) -> StoredEntry:
    """Return an option of a group as an option of one of its parameters."""
    depth = len(entry.path) - len(option) - 2
    path = (*entry.path[:depth], "options", parameter, *option)
    within = f"{entry.within[:depth]}dd{entry.within[depth + 2 :]}"
    spelled = ".".join(map(str, ("options", parameter, *option)))
    return entry._replace(name=f"{prefix(name)}{spelled}", keys=path, path=path, within=within)
