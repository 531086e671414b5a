"""An optimizer's state between two forms: of each local shard, and of each parameter, as ShardedTensors.

All ranks of a parameter's group have the second form, those without shards, too: they are told what there is.
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
    """What is remembered under one key: a tensor of the shard's size, or a number; `dtype` is None for Python's."""

    dtype: str | None
    shaped: bool = False
    number: float | int | bool | str | None = None


class _Told(NamedTuple):
    """What a rank says of a parameter: nothing where it holds no elements of it."""

    entries: dict[str, _Entry] | None = None
    fault: str | None = None


def export_state(named: Mapping[str, Tensor], state: Mapping[Tensor, Any]) -> dict[str, dict[str, Any]]:
    """The state by names; `state` is that of the local tensors. Collective over the groups of the ShardedTensors."""
    found = {
        name: dict(state[tensor])
        for name, tensor in named.items()
        if not isinstance(tensor, ShardedTensor) and tensor in state
    }
    for group, sharded in by_group(named):
        own = {name: _describe(tensor, state) for name, tensor in sharded.items()}
        said = comm.gather_bytes(msgspec.msgpack.encode(own), group, what="state_dict of a ShardedOptimizer")
        told = [msgspec.msgpack.decode(one, type=dict[str, _Told]) for one in said]
        for name, tensor in sharded.items():
            if entries := _agreed(name, [one[name] for one in told], group):
                found[name] = {key: _assemble(tensor, key, entry, state) for key, entry in entries.items()}
    return {name: found[name] for name in named if name in found}


def import_state(
    named: Mapping[str, Tensor], state_dict: Mapping[str, Any], groups: Sequence[Sequence[str]]
) -> dict[str, list[dict[str, Any]]]:
    """The state of each local tensor, by the name of its parameter, from a state dict of any cut. Collective."""

    def check() -> tuple[None, str]:
        if faults := list(_faults(named, state_dict, groups)):
            raise ShardError("load_state_dict of a ShardedOptimizer: " + "; ".join(faults))
        # Ranks must load the same keys, and find alike which of them are resharded.
        keys = {
            name: [(key, _way(value, named[name])) for key, value in sorted(each.items())]
            for name, each in sorted(state_dict["state"].items())
        }
        return None, f"state of {len(keys)} parameters ({hashlib.blake2b(repr(keys).encode()).hexdigest()[:16]})"

    sharing = list(by_group(named))
    for group, _ in sharing:
        comm.agree(check, what="load_state_dict of a ShardedOptimizer", group=group, same=True, unwrap=True)
    check()  # where there is no group
    saved = {name: dict(state_dict["state"].get(name, {})) for name in named}
    found = {
        name: [{key: _own(value) for key, value in saved[name].items()}]
        for name, tensor in named.items()
        if not isinstance(tensor, ShardedTensor)
    }
    for _, sharded in sharing:
        found.update({name: _disassemble(tensor, saved[name]) for name, tensor in sharded.items()})
    return found


def by_group(named: Mapping[str, Tensor]) -> Iterator[tuple[comm.Group, dict[str, ShardedTensor]]]:
    """The ShardedTensors, those of one group together: its ranks tell each other of all of them at once."""
    found: dict[comm.Group, dict[str, ShardedTensor]] = {}
    for name, tensor in named.items():
        if isinstance(tensor, ShardedTensor):
            found.setdefault(tensor._group, {})[name] = tensor
    yield from found.items()


def _describe(tensor: ShardedTensor, state: Mapping[Tensor, Any]) -> _Told:
    """What the optimizer remembers of this rank's shards, of each the same."""
    told = _Told()
    for shard in tensor.local_shards():
        if not shard.tensor.numel():
            continue  # it may have no gradient, and nothing of it can be forgotten
        entries = {}
        for key, value in state.get(shard.tensor, {}).items():
            entry = _entry(value, shard.tensor)
            if entry is None:
                size = f"of size {list(value.shape)}" if isinstance(value, Tensor) else "which is no number"
                return _Told(fault=f"{key!r} is a {type(value).__name__} {size}: the optimizer is not elementwise")
            entries[key] = entry
        if told.entries is not None and told.entries != entries:
            return _Told(fault=_difference("two of its shards", told.entries, entries))
        told = _Told(entries)
    return told


def _entry(value: Any, tensor: Tensor) -> _Entry | None:
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        if not value.ndim:
            return _Entry(dtype, number=value.item())
        return _Entry(dtype, shaped=True) if value.shape == tensor.shape else None
    return _Entry(None, number=value) if value is None or isinstance(value, float | int | bool | str) else None


def _agreed(name: str, told: Sequence[_Told], group: comm.Group) -> dict[str, _Entry] | None:
    """What all ranks remember of a parameter; the same error on all of them where that differs."""
    faults = [f"rank {rank}: {one.fault}" for rank, one in zip(group.ranks, told, strict=True) if one.fault]
    said = [(rank, one.entries) for rank, one in zip(group.ranks, told, strict=True) if one.entries is not None]
    if not faults:
        for rank, entries in said[1:]:
            if entries != said[0][1]:
                faults = [_difference(f"ranks {said[0][0]} and {rank}", said[0][1] or {}, entries or {})]
                break
    if faults:
        raise ShardError(f"state_dict of a ShardedOptimizer: parameter {name!r}: {'; '.join(faults[:8])}")
    return said[0][1] if said else None


def _difference(who: str, first: dict[str, _Entry], second: dict[str, _Entry]) -> str:
    keys = sorted(key for key in {**first, **second} if first.get(key) != second.get(key))
    return (
        f"{who} differ in {', '.join(map(repr, keys))}: shards without a gradient are not stepped. Give every shard "
        "one in every step, zeros where there is nothing to change"
    )


def _assemble(tensor: ShardedTensor, key: str, entry: _Entry, state: Mapping[Tensor, Any]) -> Any:
    """One entry of a parameter's state, on any rank."""
    dtype = None if entry.dtype is None else getattr(torch, entry.dtype)
    if not entry.shaped:
        return entry.number if dtype is None else torch.tensor(entry.number, dtype=dtype)
    held = [state.get(shard.tensor, {}).get(key) for shard in tensor.local_shards()]
    tensors = [
        torch.empty_like(shard.tensor, dtype=dtype, requires_grad=False) if value is None else value
        for value, shard in zip(held, tensor.local_shards(), strict=True)
    ]
    return tensor._with(tensors, dtype=dtype)


def _disassemble(tensor: ShardedTensor, saved: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The state of each local shard. All ranks go through the keys in the same order, as they may reshard."""
    found: list[dict[str, Any]] = [{} for _ in tensor.local_shards()]
    for key, value in sorted(saved.items()):
        if isinstance(value, ShardedTensor):
            values: Sequence[Any] = [shard.tensor for shard in reshard_like(value.detach(), tensor).local_shards()]
        else:
            values = [value] * len(found)
        for each, one in zip(found, values, strict=True):
            each[key] = _own(one)
    return found


def _way(value: Any, tensor: Tensor) -> str:
    """What is done with an entry: ranks talk only where it is resharded."""
    if isinstance(value, ShardedTensor) and isinstance(tensor, ShardedTensor):
        return "as it is" if value._is_cut_like(tensor) else "resharded"
    return "a tensor" if isinstance(value, Tensor) and value.ndim else "a number"


def _own(value: Any) -> Any:
    """A copy: a number that shards share, or a tensor that the caller keeps, would be stepped twice."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def _faults(
    named: Mapping[str, Tensor], state_dict: Mapping[str, Any], groups: Sequence[Sequence[str]]
) -> Iterator[str]:
    """Where a state dict does not fit these parameters in these groups."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        had = (
            f"the keys {sorted(state_dict)}" if isinstance(state_dict, Mapping) else f"type {type(state_dict).__name__}"
        )
        yield f"it has {had}, not 'state' and 'param_groups'"
        return
    if not isinstance(state_dict["state"], Mapping):
        yield f"'state' is a {type(state_dict['state']).__name__}: a dict by the names of parameters is needed"
        return
    saved = [set(group["params"]) for group in state_dict["param_groups"]]
    if len(saved) != len(groups):
        yield f"it has {len(saved)} groups of parameters, the optimizer {len(groups)}"
        return
    for number, (theirs, ours) in enumerate(zip(saved, map(set, groups), strict=True)):
        if theirs != ours:
            lacks, excess = sorted(ours - theirs), sorted(map(str, theirs - ours))
            yield f"group {number} lacks the parameters {lacks} and has {excess}, which are not the optimizer's"
    for name, state in state_dict["state"].items():
        tensor = named.get(name)
        if tensor is None:
            yield f"{name!r} is not a parameter of the optimizer"
            continue
        if not isinstance(state, Mapping):
            yield f"the state of {name!r} is a {type(state).__name__}: a dict is needed"
            continue
        for key, value in state.items():
            if fault := _misfit(tensor, value):
                yield f"{key!r} of {name!r} is {fault}"


def _misfit(tensor: Tensor, value: Any) -> str | None:
    if not isinstance(value, Tensor) or (not isinstance(value, ShardedTensor) and not value.ndim):
        return None
    if isinstance(value, ShardedTensor) != isinstance(tensor, ShardedTensor):
        return f"a {type(value).__name__}, and the parameter is a {type(tensor).__name__}"
    if value.shape != tensor.shape:
        return f"of size {list(value.shape)}, and the parameter is of size {list(tensor.shape)}"
    if isinstance(value, ShardedTensor) and isinstance(tensor, ShardedTensor):
        theirs, ours = value._group.ranks, tensor._group.ranks
        if theirs != ours:
            return f"on {listed(theirs)}, and the parameter is on {listed(ours)}"
    return None
