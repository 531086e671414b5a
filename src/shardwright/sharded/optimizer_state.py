"""Convert optimizer state between local shards and ShardedTensors per parameter.

All ranks of a parameter's group get the ShardedTensors, including ranks without shards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from shardwright import comm
from shardwright.errors import ShardError
from shardwright.sharded.metadata.process_group import listed
from shardwright.sharded.tensor import ShardedTensor
from shardwright.sharded.transfer.reshard_like import reshard_like

__all__ = ["by_group", "export_state", "import_state"]


class _Entry(NamedTuple):
    """One state entry: a tensor of the shard's size, or a number; `dtype` is None for a Python number."""

    dtype: str | None
    shaped: bool = False
    number: float | int | bool | str | None = None


class _Description(NamedTuple):
    """A rank's description of the state of a parameter; empty if it holds no elements of it."""

    entries: dict[str, _Entry] | None = None
    fault: str | None = None


def export_state(named: Mapping[str, Tensor], state: Mapping[Tensor, Any]) -> dict[str, dict[str, Any]]:
    """Return the state by parameter name, given that of the local tensors. Collective over the tensors' groups."""
    exported = {
        name: dict(state[tensor])
        for name, tensor in named.items()
        if not isinstance(tensor, ShardedTensor) and tensor in state
    }
    for group, sharded in by_group(named):
        local = {name: _describe(tensor, state) for name, tensor in sharded.items()}
        gathered = comm.gather_bytes(msgspec.msgpack.encode(local), group, what="state_dict of a ShardedOptimizer")
        descriptions = [msgspec.msgpack.decode(message, type=dict[str, _Description]) for message in gathered]
        for name, tensor in sharded.items():
            if entries := _agreed(name, [description[name] for description in descriptions], group):
                exported[name] = {key: _assemble(tensor, key, entry, state) for key, entry in entries.items()}
    return {name: exported[name] for name in named if name in exported}


def import_state(
    named: Mapping[str, Tensor], state_dict: Mapping[str, Any], groups: Sequence[Sequence[str]]
) -> dict[str, list[dict[str, Any]]]:
    """Return the state of each local tensor by parameter name, from a state dict with any sharding. Collective."""

    def check() -> tuple[None, str]:
        if faults := list(_faults(named, state_dict, groups)):
            raise ShardError("load_state_dict of a ShardedOptimizer: " + "; ".join(faults))
        # All ranks must load the same keys and agree on which of them are resharded.
        keys = {
            name: [(key, _action(value, named[name])) for key, value in sorted(entries.items())]
            for name, entries in sorted(state_dict["state"].items())
        }
        return None, f"state of {len(keys)} parameters ({hashlib.blake2b(repr(keys).encode()).hexdigest()[:16]})"

    sharing = list(by_group(named))
    for group, _ in sharing:
        comm.agree(check, what="load_state_dict of a ShardedOptimizer", group=group, same=True, unwrap=True)
    check()  # if there is no group
    saved = {name: dict(state_dict["state"].get(name, {})) for name in named}
    imported = {
        name: [{key: _copied(value) for key, value in saved[name].items()}]
        for name, tensor in named.items()
        if not isinstance(tensor, ShardedTensor)
    }
    for _, sharded in sharing:
        imported.update({name: _disassemble(tensor, saved[name]) for name, tensor in sharded.items()})
    return imported


def by_group(named: Mapping[str, Tensor]) -> Iterator[tuple[comm.Group, dict[str, ShardedTensor]]]:
    """Yield the ShardedTensors by group, so that each group needs one round of messages."""
    groups: dict[comm.Group, dict[str, ShardedTensor]] = {}
    for name, tensor in named.items():
        if isinstance(tensor, ShardedTensor):
            groups.setdefault(tensor._group, {})[name] = tensor
    yield from groups.items()


def _describe(tensor: ShardedTensor, state: Mapping[Tensor, Any]) -> _Description:
    """Describe the state of this rank's shards of a parameter, which must have the same entries."""
    description = _Description()
    for shard in tensor.local_shards():
        if not shard.tensor.numel():
            continue  # an empty shard may have no gradient, and has no state to lose
        entries = {}
        for key, value in state.get(shard.tensor, {}).items():
            entry = _entry(value, shard.tensor)
            if entry is None:
                size = f" of size {list(value.shape)}" if isinstance(value, Tensor) else ""
                return _Description(
                    fault=f"{key!r} must be a number or have the shard's size, got {type(value).__name__}{size}: the "
                    "optimizer is not elementwise"
                )
            entries[key] = entry
        if description.entries is not None and description.entries != entries:
            return _Description(fault=_difference("two of its shards", description.entries, entries))
        description = _Description(entries)
    return description


def _entry(value: Any, tensor: Tensor) -> _Entry | None:
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        if not value.ndim:
            return _Entry(dtype, number=value.item())
        return _Entry(dtype, shaped=True) if value.shape == tensor.shape else None
    return _Entry(None, number=value) if value is None or isinstance(value, float | int | bool | str) else None


def _agreed(name: str, descriptions: Sequence[_Description], group: comm.Group) -> dict[str, _Entry] | None:
    """Return the state entries that all ranks have of a parameter; raise the same error on all if they differ."""
    by_rank = list(zip(group.ranks, descriptions, strict=True))
    faults = [f"rank {rank}: {description.fault}" for rank, description in by_rank if description.fault]
    described = [(rank, description.entries) for rank, description in by_rank if description.entries is not None]
    if not faults:
        for rank, entries in described[1:]:
            if entries != described[0][1]:
                faults = [_difference(f"ranks {described[0][0]} and {rank}", described[0][1] or {}, entries or {})]
                break
    if faults:
        raise ShardError(f"state_dict of a ShardedOptimizer: parameter {name!r}: {'; '.join(faults[:8])}")
    return described[0][1] if described else None


def _difference(ranks: str, first: dict[str, _Entry], second: dict[str, _Entry]) -> str:
    keys = sorted(key for key in {**first, **second} if first.get(key) != second.get(key))
    return (
        f"{ranks} differ in {', '.join(map(repr, keys))}: shards without a gradient are not stepped. Give every shard "
        "a gradient in every step, zeros if nothing changes"
    )


def _assemble(tensor: ShardedTensor, key: str, entry: _Entry, state: Mapping[Tensor, Any]) -> Any:
    """Build one entry of a parameter's state, on any rank."""
    dtype = None if entry.dtype is None else getattr(torch, entry.dtype)
    if not entry.shaped:
        return entry.number if dtype is None else torch.tensor(entry.number, dtype=dtype)
    local_values = [state.get(shard.tensor, {}).get(key) for shard in tensor.local_shards()]
    tensors = [
        torch.empty_like(shard.tensor, dtype=dtype, requires_grad=False) if value is None else value
        for value, shard in zip(local_values, tensor.local_shards(), strict=True)
    ]
    return tensor._with(tensors, dtype=dtype)


def _disassemble(tensor: ShardedTensor, saved: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the state of each local shard. All ranks process the keys in the same order, as it may reshard."""
    states: list[dict[str, Any]] = [{} for _ in tensor.local_shards()]
    for key, value in sorted(saved.items()):
        if isinstance(value, ShardedTensor):
            values: Sequence[Any] = [shard.tensor for shard in reshard_like(value.detach(), tensor).local_shards()]
        else:
            values = [value] * len(states)
        for state, entry in zip(states, values, strict=True):
            state[key] = _copied(entry)
    return states


def _action(value: Any, tensor: Tensor) -> str:
    """Describe how an entry is loaded: ranks communicate only if it is resharded."""
    if isinstance(value, ShardedTensor) and isinstance(tensor, ShardedTensor):
        return "as it is" if value._has_same_shards(tensor) else "resharded"
    return "a tensor" if isinstance(value, Tensor) and value.ndim else "a number"


def _copied(value: Any) -> Any:
    """Copy the value: shards must not share it with each other or with the caller, or it would be stepped twice."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def _faults(
    named: Mapping[str, Tensor], state_dict: Mapping[str, Any], groups: Sequence[Sequence[str]]
) -> Iterator[str]:
    """Yield what is wrong with a state dict for these parameters in these groups."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        had = f"{sorted(state_dict)}" if isinstance(state_dict, Mapping) else type(state_dict).__name__
        yield f"expected the keys 'state' and 'param_groups', got {had}"
        return
    if not isinstance(state_dict["state"], Mapping):
        yield f"'state' must be a dict by parameter name, got {type(state_dict['state']).__name__}"
        return
    saved = [set(group["params"]) for group in state_dict["param_groups"]]
    if len(saved) != len(groups):
        yield f"it has {len(saved)} parameter groups, but the optimizer has {len(groups)}"
        return
    for number, (saved_names, names) in enumerate(zip(saved, map(set, groups), strict=True)):
        if saved_names != names:
            lacks, excess = sorted(names - saved_names), sorted(map(str, saved_names - names))
            yield f"group {number} lacks the parameters {lacks} and has {excess}, which the optimizer does not have"
    for name, state in state_dict["state"].items():
        tensor = named.get(name)
        if tensor is None:
            yield f"{name!r} is not a parameter of the optimizer"
            continue
        if not isinstance(state, Mapping):
            yield f"the state of {name!r} must be a dict, got {type(state).__name__}"
            continue
        for key, value in state.items():
            if fault := _misfit(tensor, value):
                yield f"{key!r} of {name!r} is {fault}"


def _misfit(tensor: Tensor, value: Any) -> str | None:
    if not isinstance(value, Tensor) or (not isinstance(value, ShardedTensor) and not value.ndim):
        return None
    if isinstance(value, ShardedTensor) != isinstance(tensor, ShardedTensor):
        return f"a {type(value).__name__}, but the parameter has type {type(tensor).__name__}"
    if value.shape != tensor.shape:
        return f"of size {list(value.shape)}, but the parameter has size {list(tensor.shape)}"
    if isinstance(value, ShardedTensor) and isinstance(tensor, ShardedTensor):
        saved_ranks, ranks = value._group.ranks, tensor._group.ranks
        if saved_ranks != ranks:
            return f"on {listed(saved_ranks)}, but the parameter is on {listed(ranks)}"
    return None
