"""Shard one parameter of a module, or all parameters that a plan lists."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, final

import torch
from torch import Tensor, nn

from shardwright import comm
from shardwright.errors import ArgumentTypeError, ShardError
from shardwright.sharded.base.tensor_base import ShardedTensorBase
from shardwright.sharded.metadata.process_group import group_of
from shardwright.sharded.metadata.spec import ShardingSpec
from shardwright.sharded.output_hooks import collect_local_shard, reshard_output

__all__ = ["Sharder", "ShardingPlan", "shard_module", "shard_parameter"]


class Sharder(ABC):
    """Shards a submodule as a whole, for example a collection of embedding tables. Implement `shard`.

    >>> from torch import nn
    >>> from shardwright import sharded
    >>> class Rows(sharded.Sharder):
    ...     def shard(self, module):
    ...         sharded.shard_parameter(module, "weight", sharded.ChunkShardingSpec(0, ["rank:0/cpu"] * 2))
    ...         return module
    >>> model = nn.ModuleDict({"table": nn.Embedding(4, 2)})
    >>> sharded.shard_module(model, sharded.ShardingPlan({"table": Rows()}))
    >>> len(model["table"].weight.local_shards())
    2
    """

    @abstractmethod
    def shard(self, module: nn.Module) -> nn.Module:
        """Return the sharded module (possibly the same object) that replaces the given one. Collective."""


@final
@dataclass
class ShardingPlan:
    """How to shard a module: a spec for each parameter name, a `Sharder` for each submodule name.

    `output_plan` maps submodule names to the specs of their outputs; `return_local_tensor` lists submodules whose
    output becomes a plain local tensor. The name "" is the module itself.

    >>> from shardwright import sharded
    >>> rows = sharded.ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
    >>> sharded.ShardingPlan({"table.weight": rows}, return_local_tensor=["table"]).output_plan
    {}
    """

    plan: Mapping[str, ShardingSpec | Sharder]
    output_plan: Mapping[str, ShardingSpec] = field(default_factory=dict)
    return_local_tensor: Sequence[str] = ()

    def __post_init__(self) -> None:
        self.output_plan = self.output_plan or {}  # PyTorch's plan may have None here
        self.return_local_tensor = list(self.return_local_tensor or ())


def shard_parameter(
    module: nn.Module, param_name: str, sharding_spec: ShardingSpec, src_rank: int = 0, process_group: Any = None
) -> None:
    """Replace a parameter by a ShardedTensor parameter with the values of rank `src_rank`.

    Collective. Each rank receives only its own shards, and the original is freed. On other ranks than the source the
    parameter may be a meta tensor; the shards are on the devices of the placements.

    >>> from torch import nn
    >>> from shardwright import sharded
    >>> table = nn.Embedding(4, 2)
    >>> sharded.shard_parameter(table, "weight", sharded.ChunkShardingSpec(0, ["rank:0/cpu"]))
    >>> table.weight
    ShardedTensor([4, 2], torch.float32, 1 shards; here: [0:4, 0:2])
    """
    group = group_of(process_group)

    def prepare() -> tuple[tuple[nn.Module, str, Tensor], str]:
        if fault := _parameter_fault(module, param_name, sharding_spec):
            raise ShardError(f"shard_parameter: {fault}")
        path, _, name = param_name.rpartition(".")
        owner = module.get_submodule(path)
        return (owner, name, getattr(owner, name)), f"parameter {param_name!r}"

    owner, name, tensor = comm.agree(prepare, what="shard_parameter", group=group, same=True, unwrap=True)
    parameter = nn.Parameter(sharding_spec.shard(tensor, src_rank, process_group), requires_grad=tensor.requires_grad)
    for holder, attribute in [(owner, name), *_owners(module, tensor)]:
        if holder._parameters.get(attribute) is None:
            delattr(holder, attribute)  # a buffer or a plain attribute
        holder.register_parameter(attribute, parameter)


def shard_module(module: nn.Module, plan: ShardingPlan, src_rank: int = 0, process_group: Any = None) -> None:
    """Shard everything the plan lists, in its order, in place. Collective: all ranks pass the same plan.

    An invalid plan raises an error that lists all problems, before anything is changed.

    >>> from torch import nn
    >>> from shardwright import sharded
    >>> model = nn.Sequential(nn.Embedding(4, 2))
    >>> rows = sharded.ChunkShardingSpec(0, ["rank:0/cpu", "rank:0/cpu"])
    >>> sharded.shard_module(model, sharded.ShardingPlan({"0.wieght": rows}))
    Traceback (most recent call last):
    shardwright.errors.ShardError: shard_module: '0.wieght' is not a parameter: did you mean '0.weight'?
    >>> sharded.shard_module(model, sharded.ShardingPlan({"0.weight": rows}))
    >>> len(model[0].weight.local_shards())
    2
    """
    group = group_of(process_group)

    def prepare() -> tuple[None, str]:
        if not isinstance(plan, ShardingPlan):
            raise ArgumentTypeError(f"shard_module: plan must be a sharded.ShardingPlan, got {type(plan).__name__}")
        if faults := list(_faults(module, plan)):
            raise ShardError("shard_module: " + "; ".join(faults))
        return None, f"{list(plan.plan)}, outputs of {list(plan.output_plan)}, locally {list(plan.return_local_tensor)}"

    comm.agree(prepare, what="shard_module", group=group, same=True, unwrap=True)
    for name, sharding in plan.plan.items():
        if isinstance(sharding, Sharder):
            _replace(module, name, sharding)
        else:
            shard_parameter(module, name, sharding, src_rank, process_group)
    for name, spec in plan.output_plan.items():
        reshard_output(module.get_submodule(name), spec)
    for name in plan.return_local_tensor:
        collect_local_shard(module.get_submodule(name))


def _replace(module: nn.Module, name: str, sharder: Sharder) -> None:
    path, _, last = name.rpartition(".")
    sharded = sharder.shard(module.get_submodule(name))
    if not isinstance(sharded, nn.Module):
        raise ArgumentTypeError(
            f"shard_module: {type(sharder).__name__}.shard must return a module for {name!r}, got "
            f"{type(sharded).__name__}"
        )
    setattr(module.get_submodule(path), last, sharded)


def _faults(module: nn.Module, plan: ShardingPlan) -> Iterator[str]:
    modules = dict(module.named_modules(remove_duplicate=False))
    planned: list[tuple[str, Any]] = list(plan.plan.items())
    sharders = [name for name, sharding in planned if isinstance(sharding, Sharder)]
    seen: dict[int, str] = {}
    for name, sharding in planned:
        around = [outer for outer in sharders if name.startswith(f"{outer}.")]
        if around:
            yield f"{name!r} is inside {around[0]!r}, which has a Sharder of its own"
        elif isinstance(sharding, Sharder):
            if not name:
                yield "a Sharder for '' would replace the module itself: call its shard(module)"
            elif name not in modules:
                yield _unknown(name, "module", modules)
        elif not isinstance(sharding, ShardingSpec):
            yield f"{name!r}: expected a ShardingSpec or a Sharder, got {type(sharding).__name__}"
        elif fault := _parameter_fault(module, name, sharding):
            yield fault
        else:
            tensor = _find(module, name)
            if (first := seen.setdefault(id(tensor), name)) != name:
                yield f"{name!r} and {first!r} are the same tensor: list only one of them"
    outputs: list[tuple[str, Any]] = list(plan.output_plan.items())
    for name, spec in outputs:
        if name not in modules:
            yield _unknown(name, "module", modules)
        elif not isinstance(spec, ShardingSpec):
            yield f"the output of {name!r}: expected a ShardingSpec, got {type(spec).__name__}"
    yield from (_unknown(name, "module", modules) for name in plan.return_local_tensor if name not in modules)


def _parameter_fault(module: nn.Module, name: str, spec: Any) -> str | None:
    """Return why this parameter cannot be sharded with this spec, or None if it can."""
    tensor = _find(module, name)
    if tensor is None:
        return _unknown(
            name, "parameter", [parameter for parameter, _ in module.named_parameters(remove_duplicate=False)]
        )
    if not isinstance(tensor, Tensor):
        return f"{name!r} must be a tensor, got {type(tensor).__name__}"
    if isinstance(tensor, ShardedTensorBase):
        return f"{name!r} is already a ShardedTensor: use its reshard(spec)"
    if not isinstance(spec, ShardingSpec):
        return f"{name!r}: expected a ShardingSpec, got {type(spec).__name__}"
    if tensor.layout == torch.strided and not tensor.is_contiguous():
        return f"{name!r} of size {list(tensor.shape)} has strides {list(tensor.stride())}: call contiguous()"
    return None


def _find(module: nn.Module, name: str) -> Any:
    """Return the attribute of a module under a dotted name, or None."""
    path, _, last = name.rpartition(".")
    owner = dict(module.named_modules(remove_duplicate=False)).get(path)
    return getattr(owner, last, None) if owner is not None and last else None


def _owners(module: nn.Module, tensor: Tensor) -> list[tuple[nn.Module, str]]:
    """Return every (submodule, name) that holds this parameter: tied weights have several."""
    return [
        (owner, name)
        for owner in module.modules()
        for name, parameter in owner._parameters.items()
        if parameter is tensor
    ]


def _unknown(name: str, kind: str, known: Iterable[str]) -> str:
    near = get_close_matches(name, list(known), n=2, cutoff=0.75)
    hint = f": did you mean {' or '.join(map(repr, near))}?" if near else ""
    return f"{name!r} is not a {kind}{hint}"
