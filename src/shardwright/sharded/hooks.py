"""ShardedTensors in the state dict of a module that holds them as plain attributes, and back.

A parameter or a buffer is in the state dict by itself; an attribute gets there by these hooks, registered on a module
for it and all its submodules:

    module._register_state_dict_hook(sharded.state_dict_hook)
    module._register_load_state_dict_pre_hook(sharded.pre_load_state_dict_hook, True)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch import nn

from shardwright.sharded.tensor import ShardedTensor

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
    their place). A tensor that is cut another way is resharded first, those of parameters and buffers too, so all
    ranks load together.

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
    for at, holder in _holders(module, prefix, but=pre_load_state_dict_hook):
        for name, held in [*holder._parameters.items(), *holder._buffers.items()]:
            loaded = state_dict.get(at + name)
            if isinstance(held, ShardedTensor) and isinstance(loaded, ShardedTensor) and loaded.shape == held.shape:
                state_dict[at + name] = _cut_like(loaded, held)
        for name, held in list(vars(holder).items()):
            key = at + name
            if not isinstance(held, ShardedTensor):
                if held is None and isinstance(state_dict.get(key), ShardedTensor):
                    setattr(holder, name, state_dict.pop(key))
            elif key in state_dict:
                # What is left in it would be reported as unexpected: torch knows parameters and buffers only.
                if fault := _load(holder, name, held, state_dict.pop(key), assign):
                    error_msgs.append(f"{key}: {fault}")
            elif strict:
                missing_keys.append(key)


def _load(holder: nn.Module, name: str, held: ShardedTensor, loaded: Any, assign: bool) -> str | None:
    """Loads an attribute, or says why not."""
    if not isinstance(loaded, ShardedTensor):
        return f"a {type(loaded).__name__} for a ShardedTensor: cut it with spec.shard(tensor)"
    if loaded.shape != held.shape:
        return f"a ShardedTensor of size {list(loaded.shape)} for one of size {list(held.shape)}"
    cut = _cut_like(loaded, held)
    if assign:
        setattr(holder, name, cut)
        return None
    with torch.no_grad():
        for mine, theirs in zip(held.local_shards(), cut.local_shards(), strict=True):
            mine.tensor.copy_(theirs.tensor)
    return None


def _cut_like(loaded: ShardedTensor, held: ShardedTensor) -> ShardedTensor:
    if loaded._is_cut_like(held):
        return loaded
    return loaded.detach().reshard(held.sharding_spec())  # detached: another object, as the one given stays as it is


def _holders(module: nn.Module, prefix: str, but: Callable[..., Any] | None = None) -> Iterator[tuple[str, nn.Module]]:
    """A module and its submodules with the prefixes of their keys; those left out that have the hook themselves."""
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None and but not in _hooks_of(child):
            yield from _holders(child, f"{prefix}{name}.", but)


def _hooks_of(module: nn.Module) -> list[Callable[..., Any]]:
    return [getattr(hook, "hook", hook) for hook in module._load_state_dict_pre_hooks.values()]  # torch wraps them
