"""State dict hooks for modules that hold ShardedTensors as plain attributes.

Parameters and buffers are in the state dict anyway; attributes need these hooks, registered on a module for it and all
its submodules:

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
from shardwright.sharded.metadata.digest import digest
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
    """Add the ShardedTensors that a module and its submodules hold as attributes to its state dict.

    >>> from torch import nn
    >>> from shardwright import sharded
    >>> model = nn.Sequential(nn.Identity())
    >>> model[0].table = sharded.ones(sharded.ChunkShardingSpec(0, ["rank:0/cpu"]), 2)
    >>> _ = model._register_state_dict_hook(sharded.state_dict_hook)
    >>> list(model.state_dict())
    ['0.table']
    """
    for at, holder in _named_modules(module, prefix):
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
    """Load the ShardedTensors that a module and its submodules hold as attributes from a state dict.

    As with parameters, values are copied into the existing shards (with `assign=True` the loaded tensor replaces them).
    Tensors with another sharding are resharded first, including those of parameters and buffers, so loading is
    collective. Before anything changes, ranks compare what they are about to load; if it differs, all raise.

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
    for holder, name, key, current in _agreed(list(_sharded_attributes(module, prefix)), state_dict):
        loaded: Any = state_dict.get(key)
        if name in holder._parameters or name in holder._buffers:
            if _fault(current, loaded) is None:
                state_dict[key] = _resharded(loaded, current)
        elif key in state_dict:
            # Remove the key, else torch reports it as unexpected: it knows only parameters and buffers.
            if fault := _fault(current, state_dict.pop(key)):
                error_msgs.append(f"{key}: {fault}")
            elif assign:
                setattr(holder, name, _resharded(loaded, current))
            else:
                with torch.no_grad():
                    for shard, new in zip(
                        current.local_shards(), _resharded(loaded, current).local_shards(), strict=True
                    ):
                        shard.tensor.copy_(new.tensor)
        elif strict:
            missing_keys.append(key)
    for at, holder in _named_modules(module, prefix, skip_hook=pre_load_state_dict_hook):
        for name, value in list(vars(holder).items()):
            if value is None and isinstance(state_dict.get(at + name), ShardedTensor):
                setattr(holder, name, state_dict.pop(at + name))


class _Attribute(NamedTuple):
    """A ShardedTensor of a module, its attribute name, and its key in the state dict."""

    holder: nn.Module
    name: str
    key: str
    tensor: ShardedTensor


def _sharded_attributes(module: nn.Module, prefix: str) -> Iterator[_Attribute]:
    for at, holder in _named_modules(module, prefix, skip_hook=pre_load_state_dict_hook):
        for name, value in [*holder._parameters.items(), *holder._buffers.items(), *vars(holder).items()]:
            if isinstance(value, ShardedTensor):
                yield _Attribute(holder, name, at + name, value)


def _agreed(attributes: list[_Attribute], state_dict: MutableMapping[str, Any]) -> list[_Attribute]:
    """Return these tensors after checking that all ranks will load them in the same way: loading may reshard."""
    what = "load_state_dict of ShardedTensors"
    groups: dict[comm.Group, dict[str, str]] = {}
    for item in attributes:
        groups.setdefault(item.tensor._group, {})[item.key] = _describe(item, state_dict)
    for group, local in groups.items():
        gathered = comm.gather_bytes(json.dumps(local).encode(), group, what=what)
        descriptions = [json.loads(message) for message in gathered]
        for key in sorted({key for description in descriptions for key in description}):
            values = [description.get(key, "no such ShardedTensor") for description in descriptions]
            if len(set(values)) > 1:
                listed = [f"rank {rank}: {value}" for rank, value in zip(group.ranks, values, strict=True)]
                raise DisagreementError(f"{what}: {key!r} is not the same on all ranks: {'; '.join(listed[:16])}")
    return attributes


def _describe(item: _Attribute, state_dict: MutableMapping[str, Any]) -> str:
    if item.key not in state_dict:
        return "missing"
    loaded = state_dict[item.key]
    if fault := _fault(item.tensor, loaded):
        return fault
    if loaded._has_same_shards(item.tensor):
        return f"a ShardedTensor of {loaded.dtype} with the same sharding"
    return f"a ShardedTensor of {loaded.dtype} with {digest(loaded._table)}"


def _fault(current: ShardedTensor, loaded: Any) -> str | None:
    """Return why a value cannot be loaded, or None."""
    if not isinstance(loaded, ShardedTensor):
        return f"expected a ShardedTensor, got {type(loaded).__name__}: shard it with spec.shard(tensor)"
    if loaded.shape != current.shape:
        return f"expected a ShardedTensor of size {list(current.shape)}, got size {list(loaded.shape)}"
    if loaded._group.ranks != current._group.ranks:
        return f"expected a ShardedTensor on {listed(current._group.ranks)}, got one on {listed(loaded._group.ranks)}"
    return None


def _resharded(loaded: ShardedTensor, current: ShardedTensor) -> ShardedTensor:
    return loaded if loaded._has_same_shards(current) else reshard_like(loaded.detach(), current)


def _named_modules(
    module: nn.Module, prefix: str, skip_hook: Callable[..., Any] | None = None
) -> Iterator[tuple[str, nn.Module]]:
    """Yield a module and its submodules with their key prefixes, except submodules that have the hook themselves."""
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None and skip_hook not in _hooks_of(child):
            yield from _named_modules(child, f"{prefix}{name}.", skip_hook)


def _hooks_of(module: nn.Module) -> list[Callable[..., Any]]:
    return [getattr(hook, "hook", hook) for hook in module._load_state_dict_pre_hooks.values()]  # torch wraps them
