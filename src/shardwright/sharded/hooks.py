"""ShardedTensors in the state dict of a module that holds them as plain attributes, and back.

A parameter or a buffer is in the state dict by itself; an attribute gets there by these hooks, registered on a module
for it and all its submodules:

    module._register_state_dict_hook(sharded.state_dict_hook)
    module._register_load_state_dict_pre_hook(sharded.pre_load_state_dict_hook, True)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwright import comm
from shardwright.errors import DisagreementError
from shardwright.sharded.base.agreement import digest
from shardwright.sharded.metadata.process_group import listed
from shardwright.sharded.tensor import ShardedTensor
from shardwright.sharded.transfer.reshard_like import reshard_like

__all__ = ["pre_load_state_dict_hook", "state_dict_hook"]


def state_dict_hook(
    module: nn.Module,
    destination: MutableMapping[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],  # noqa: ARG001  # torch passes it
) -> None:
    """Puts the ShardedTensors that a module and its submodules hold as attributes into its state dict.

    >>> from torch import nn
    >>> from shardwright import sharded
    >>> model = nn.Sequential(nn.Identity())
    >>> model[0].table = sharded.ones(sharded.ChunkShardingSpec(0, ["rank:0/cpu"]), 2)
    >>> _ = model._register_state_dict_hook(sharded.state_dict_hook)
    >>> list(model.state_dict())
    ['0.table']
    """
    for at, holder in _holders(module, prefix):
        for name, value in vars(holder).items():
            if isinstance(value, ShardedTensor):
                destination[at + name] = value


def pre_load_state_dict_hook(
    module: nn.Module,
    state_dict: MutableMapping[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],  # noqa: ARG001  # torch passes it, and fills it after this hook
    error_msgs: list[str],
) -> None:
    """Loads the ShardedTensors that a module and its submodules hold as attributes from a state dict.

    As with parameters, values are copied into the shards that are there (with `assign=True` the loaded tensor takes
    their place). A tensor that is cut another way is resharded first, those of parameters and buffers too. So all
    ranks load together, and tell each other what they load before anything changes: where that differs, all raise.

    >>> from torch import nn
    >>> from shardwright import sharded
    >>> model = nn.Identity()
    >>> model.table = sharded.zeros(sharded.ChunkShardingSpec(0, ["rank:0/cpu"]), 2)
    >>> _ = model._register_load_state_dict_pre_hook(sharded.pre_load_state_dict_hook, True)
    >>> model.load_state_dict({"table": sharded.ones(sharded.ChunkShardingSpec(0, ["rank:0/cpu"] * 2), 2)})
    <All keys matched successfully>
    >>> model.table.local_tensor()
    tensor([1., 1.])
    """
    assign = bool(local_metadata.get("assign_to_params_buffers", False))
    for holder, name, key, held in _agreed(list(_held(module, prefix)), state_dict):
        loaded: Any = state_dict.get(key)
        if name in holder._parameters or name in holder._buffers:
            if _fault(held, loaded) is None:
                state_dict[key] = _cut(loaded, held)
        elif key in state_dict:
            # What is left in it would be reported as unexpected: torch knows parameters and buffers only.
            if fault := _fault(held, state_dict.pop(key)):
                error_msgs.append(f"{key}: {fault}")
            elif assign:
                setattr(holder, name, _cut(loaded, held))
            else:
                with torch.no_grad():
                    for mine, theirs in zip(held.local_shards(), _cut(loaded, held).local_shards(), strict=True):
                        mine.tensor.copy_(theirs.tensor)
        elif strict:
            missing_keys.append(key)
    for at, holder in _holders(module, prefix, but=pre_load_state_dict_hook):
        for name, value in list(vars(holder).items()):
            if value is None and isinstance(state_dict.get(at + name), ShardedTensor):
                setattr(holder, name, state_dict.pop(at + name))


class _Held(NamedTuple):
    """A ShardedTensor of a module, by which name it has it, and under which key a state dict does."""

    holder: nn.Module
    name: str
    key: str
    tensor: ShardedTensor


def _held(module: nn.Module, prefix: str) -> Iterator[_Held]:
    for at, holder in _holders(module, prefix, but=pre_load_state_dict_hook):
        for name, value in [*holder._parameters.items(), *holder._buffers.items(), *vars(holder).items()]:
            if isinstance(value, ShardedTensor):
                yield _Held(holder, name, at + name, value)


def _agreed(held: list[_Held], state_dict: MutableMapping[str, Any]) -> list[_Held]:
    """These tensors, once all ranks of their groups have found to load them in the same way: they may reshard."""
    what = "load_state_dict of ShardedTensors"
    groups: dict[comm.Group, dict[str, str]] = {}
    for one in held:
        groups.setdefault(one.tensor._group, {})[one.key] = _way(one, state_dict)
    for group, ours in groups.items():
        told = [json.loads(said) for said in comm.gather_bytes(json.dumps(ours).encode(), group, what=what)]
        for key in sorted({key for one in told for key in one}):
            said = [one.get(key, "nothing held there") for one in told]
            if len(set(said)) > 1:
                ways = [f"rank {rank}: {way}" for rank, way in zip(group.ranks, said, strict=True)]
                raise DisagreementError(f"{what}: {key!r} is not the same on all ranks: {'; '.join(ways[:16])}")
    return held


def _way(one: _Held, state_dict: MutableMapping[str, Any]) -> str:
    if one.key not in state_dict:
        return "missing"
    loaded = state_dict[one.key]
    if fault := _fault(one.tensor, loaded):
        return fault
    if loaded._is_cut_like(one.tensor):
        return f"a ShardedTensor of {loaded.dtype}, cut alike"
    return f"a ShardedTensor of {loaded.dtype}, cut into {digest(loaded._table)}"


def _fault(held: ShardedTensor, loaded: Any) -> str | None:
    """Why a value cannot be loaded, if it cannot."""
    if not isinstance(loaded, ShardedTensor):
        return f"a {type(loaded).__name__} for a ShardedTensor: cut it with spec.shard(tensor)"
    if loaded.shape != held.shape:
        return f"a ShardedTensor of size {list(loaded.shape)} for one of size {list(held.shape)}"
    if loaded._group.ranks != held._group.ranks:
        return f"a ShardedTensor on {listed(loaded._group.ranks)} for one on {listed(held._group.ranks)}"
    return None


def _cut(loaded: ShardedTensor, held: ShardedTensor) -> ShardedTensor:
    return loaded if loaded._is_cut_like(held) else reshard_like(loaded.detach(), held)


def _holders(module: nn.Module, prefix: str, but: Callable[..., Any] | None = None) -> Iterator[tuple[str, nn.Module]]:
    """A module and its submodules with the prefixes of their keys; those left out that have the hook themselves."""
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None and but not in _hooks_of(child):
            yield from _holders(child, f"{prefix}{name}.", but)


def _hooks_of(module: nn.Module) -> list[Callable[..., Any]]:
    return [getattr(hook, "hook", hook) for hook in module._load_state_dict_pre_hooks.values()]  # torch wraps them
