"""Functions with PyTorch's names take PyTorch's arguments: names, order, kinds and defaults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import Parameter, signature
from typing import Any

import pytest
import torch
from torch.distributed import device_mesh
from torch.distributed import tensor as torch_tensor
from torch.distributed._shard import metadata as torch_shard_metadata
from torch.distributed._shard import shard_parameter, sharded_optim, sharding_plan, sharding_spec
from torch.distributed._shard import sharded_tensor as torch_sharded
from torch.distributed._shard.api import load_with_process_group
from torch.distributed._shard.sharded_tensor import metadata as torch_sharded_metadata
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint import planner as torch_planner
from torch.distributed.tensor import experimental

import shardwright as sw
from shardwright import checkpoint, sharded
from shardwright.errors import TensorError
from shardwright.sharded import ShardedFactoryOptions
from shardwright.tensor import FactoryOptions

FACTORIES = ("empty", "full", "ones", "rand", "randn", "zeros")


def methods(ours: type, theirs: type, *names: str) -> Iterator[tuple[str, Any, Any]]:
    for name in names:
        yield f"{ours.__name__}.{name}", getattr(ours, name), getattr(theirs, name)


def functions(ours: Any, theirs: Any, *names: str) -> Iterator[tuple[str, Any, Any]]:
    for name in names:
        yield f"{ours.__name__.removeprefix('shardwright.')}.{name}", getattr(ours, name), getattr(theirs, name)


PAIRS = {
    name: (ours, theirs)
    for name, ours, theirs in (
        *methods(sw.DTensor, torch_tensor.DTensor, "from_local", "to_local", "full_tensor", "redistribute"),
        *functions(sw, torch_tensor, "distribute_tensor", "distribute_module", *FACTORIES),
        *functions(sw, device_mesh, "init_device_mesh"),
        *functions(sw, experimental, "implicit_replication", "local_map"),
        *functions(sharded, torch_sharded, *FACTORIES),
        *functions(sharded, torch_sharded, "custom_sharded_op_impl", "init_from_local_shards", "Shard"),
        *functions(sharded, torch_sharded, "state_dict_hook", "pre_load_state_dict_hook"),
        *functions(sharded, torch_shard_metadata, "ShardMetadata"),
        *functions(sharded, torch_sharded_metadata, "ShardedTensorMetadata", "TensorProperties"),
        *functions(sharded, sharding_spec, "ChunkShardingSpec", "EnumerableShardingSpec"),
        *functions(sharded, sharding_plan, "ShardingPlan"),
        *functions(sharded, sharded_optim, "ShardedOptimizer", "named_params_with_sharded_tensor"),
        *functions(sharded, torch.distributed._shard, "shard_module"),
        ("sharded.shard_parameter", sharded.shard_parameter, shard_parameter),
        ("sharded.load_with_process_group", sharded.load_with_process_group, load_with_process_group),
        *methods(sharded.Shard, torch_sharded.Shard, "from_tensor_and_offsets"),
        *methods(sharded.ShardedOptimizer, sharded_optim.ShardedOptimizer, "add_param_group", "step", "zero_grad"),
        *methods(sharded.ShardedTensor, torch_sharded.ShardedTensor, "cpu", "cuda", "gather", "local_tensor"),
        *methods(sharded.ShardedTensor, torch_sharded.ShardedTensor, "remote_shards", "reshard", "to", "metadata"),
        *methods(sharded.ChunkShardingSpec, sharding_spec.ChunkShardingSpec, "build_metadata", "shard"),
        *functions(checkpoint, torch_metadata, "ChunkStorageMetadata", "MetadataIndex", "StorageMeta"),
        *functions(checkpoint, torch_metadata, "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties"),
        *functions(checkpoint, torch_planner, "WriteItem", "TensorWriteData"),
    )
}
OPTIONS = {"shardwright": FactoryOptions, "sharded": ShardedFactoryOptions}  # what **how takes, by namespace

# Defaults that differ, each with the reason.
OTHER_DEFAULTS = {
    ("DTensor.from_local", "run_check"): "None gathers the sizes of shards, so that uneven ones are right",
    ("sharded.ShardingPlan", "output_plan"): "empty; None means the same",
    ("sharded.ShardingPlan", "return_local_tensor"): "empty; None means the same",
}


def by_kind(function: Callable[..., Any], *kinds: Any) -> list[Parameter]:
    return [each for each in signature(function).parameters.values() if each.kind in kinds]


def positional(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    kinds = Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.VAR_POSITIONAL
    return [(each.name, each.kind) for each in by_kind(function, *kinds)]


def keywords(name: str, function: Callable[..., Any]) -> set[str]:
    found = {each.name for each in by_kind(function, Parameter.KEYWORD_ONLY)}
    if by_kind(function, Parameter.VAR_KEYWORD) and name.rpartition(".")[2] in FACTORIES:
        found |= OPTIONS[name.rpartition(".")[0]].__annotations__.keys()
    return found


def is_value(default: object) -> bool:
    return default is not Parameter.empty and "factory" not in repr(default)  # that of a dataclass's field


@pytest.mark.parametrize("name", PAIRS)
def test_positional_arguments_have_pytorchs_names_and_order(name: str) -> None:
    ours, theirs = PAIRS[name]
    assert positional(ours) == positional(theirs)


@pytest.mark.parametrize("name", PAIRS)
def test_keyword_arguments_include_pytorchs(name: str) -> None:
    ours, theirs = PAIRS[name]
    assert {each.name for each in by_kind(theirs, Parameter.KEYWORD_ONLY)} <= keywords(name, ours)


@pytest.mark.parametrize("name", PAIRS)
def test_defaults_are_pytorchs(name: str) -> None:
    ours, theirs = (signature(function).parameters for function in PAIRS[name])
    for argument, parameter in theirs.items():
        if argument not in ours or parameter.default is Parameter.empty or (name, argument) in OTHER_DEFAULTS:
            continue
        default = ours[argument].default
        assert default is not Parameter.empty, argument
        assert default == parameter.default or not (is_value(default) and is_value(parameter.default)), argument


@pytest.mark.parametrize(("name", "argument"), OTHER_DEFAULTS)
def test_a_default_listed_as_different_is_different(name: str, argument: str) -> None:
    ours, theirs = (signature(function).parameters[argument].default for function in PAIRS[name])
    assert ours != theirs


def test_placements_take_pytorchs_names() -> None:
    assert sw.Partial(reduce_op="max").reduce_op == torch_tensor.Partial(reduce_op="max").reduce_op == "max"
    assert sw.Shard(dim=1).dim == torch_tensor.Shard(dim=1).dim == 1


def test_backends_of_a_mesh_can_be_overridden_by_dimension() -> None:
    mesh = sw.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"), backend_override={"tp": "gloo"})
    assert torch.distributed.get_backend(mesh.get_group("tp")) == "gloo"


def test_the_gradient_of_a_partial_value_cannot_be_declared_partial() -> None:
    mesh = sw.init_device_mesh("cpu", (1,))
    with pytest.raises(TensorError, match=r"the gradient of P\(sum\) is Replicate\(\), not P\(sum\)"):
        sw.ones(2, mesh=mesh, placements=[sw.Partial()]).to_local(grad_placements=[sw.Partial()])
    with pytest.raises(TensorError, match=r"the gradient of P\(sum\) is Replicate\(\), not P\(sum\)"):
        sw.DTensor.from_local(torch.ones(2), mesh, [sw.Partial()], grad_placements=[sw.Partial()])


def test_without_a_mesh_the_enclosing_one_is_used() -> None:
    with sw.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp")) as mesh:
        x = sw.DTensor.from_local(torch.ones(2), None, [sw.Shard(0), sw.Replicate()])
        assert x.device_mesh is mesh
        assert sw.distribute_tensor(torch.ones(2)).device_mesh is mesh
    assert sw.DTensor.from_local(torch.ones(2)).placements == (sw.Replicate(),)
