"""`fully_shard`: shard the parameters of a module over a mesh, and gather them where they are used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from shardwright import comm
from shardwright.errors import ArgumentTypeError, MeshError, TensorError, UnsupportedError
from shardwright.layout import Mesh, Placement, Replicate, Shard
from shardwright.parallel.fsdp import eager
from shardwright.parallel.fsdp.binding import Binding, OwnerHooks, Slot
from shardwright.parallel.fsdp.module import FSDPModule, binding_of, sharded_class
from shardwright.parallel.units import MixedPrecisionPolicy, Unit, unit_of
from shardwright.tensor import DTensor, distribute_tensor

__all__ = ["fully_shard"]

M = TypeVar("M", bound=nn.Module | list[nn.Module])

# Of a parameter that was replaced by a DTensor: the binding that has it, as a weak reference, and its index there.
# Another module may hold the same parameter, tied.
_replaced: Any = WeakTensorKeyDictionary()
_PLACE = "_shardwright_fsdp_place"  # an attribute of the DTensor: the same
_HOOKS = "_shardwright_owner_hooks"  # an attribute of modules that own parameters


def fully_shard(
    module: M,
    *,
    mesh: Any = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: Any = None,
    offload_policy: Any = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
) -> M:
    """Shard the parameters of a module over a mesh, as PyTorch's FSDP2 function of this name does, and return it.

    The parameters of the module, except those of submodules that were passed to `fully_shard` before and
    `ignored_params`, become one unit: DTensors, `Shard(0)` over the mesh. A forward of the module gathers them by one
    collective and computes on plain local tensors, with each rank's own batch; any kernel and autograd function works.
    Backward averages the gradients over the mesh, in one collective. Call it on the blocks of a model, then on the
    model itself. A list of modules makes one unit of all of them.

    - `mesh`: of one dimension, or of two: replicated over the first, sharded over the second. The default is the mesh
      of the enclosing `with mesh:`, or all ranks.
    - `reshard_after_forward`: release the parameters after forward, and gather them again in backward. `None` does so
      except for the outermost module. A number, for which PyTorch keeps them on fewer ranks, releases them.
    - `shard_placement_fn(parameter)` returns the `Shard` of a parameter; `None` means `Shard(0)`. Sizes that do not
      divide evenly are fine in any dimension.
    - `mp_policy`: a `MixedPrecisionPolicy`.

    Parameters on the meta device stay there: call `to_empty` and initialize them afterwards. Every rank keeps its shard
    of the values it has, without communication.

    >>> import torch, shardwright as sw
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    >>> for layer in model:
    ...     _ = sw.fully_shard(layer)
    >>> model = sw.fully_shard(model)
    >>> model(torch.ones(3, 4)).sum().backward()
    >>> print(model[0].weight.sharding, model[0].weight.grad.shape)
    [8, 4] (0: S(0)) torch.Size([8, 4])
    """
    modules = _modules(module)
    precision = _precision(mp_policy)
    after_forward = _after_forward(reshard_after_forward)
    _refuse_offload(offload_policy)
    device_mesh, bound = _mesh(mesh)
    ignored = {id(parameter) for parameter in _ignored(ignored_params)}
    found = _find(modules, ignored)
    placements = [_placements(each, bound, shard_placement_fn) for each in found.parameters]
    _check(found, placements)

    device = _device(device_mesh)
    unit = _make_unit(found, placements, device_mesh, bound, precision, after_forward, device)
    binding = Binding(unit, found.slots, modules, precision, after_forward, found.ignored)
    binding.register_shards()
    for index, (original, parameter) in enumerate(zip(found.parameters, unit.parameters, strict=True)):
        _replaced[original] = parameter.__dict__[_PLACE] = ref(binding), index
    for slot, other in found.tied:
        other.slots.append(slot)
        other.register_shards()
    for child in found.children:
        if child.unit.parent is None:
            child.unit.parent = unit
        unit.schedule.adopt(child.unit)
    for each in modules:
        if device is not None:
            _move_buffers(each, device)
        sharded_class(each, binding)
    _hook_owners(binding, modules, found)
    return module


class _Found(NamedTuple):
    """What belongs to a new unit."""

    parameters: list[nn.Parameter]
    names: list[str]
    slots: list[Slot]
    tied: list[tuple[Slot, Binding]]  # further places of parameters that other units have
    children: list[Binding]  # the units inside the modules
    ignored: list[tuple[nn.Module, str]]  # modules and the names of ignored parameters in them


def _modules(module: Any) -> list[nn.Module]:
    given = list(module) if isinstance(module, list | tuple) else [module]
    if not given:
        raise ArgumentTypeError("fully_shard: expected a module or a list of modules, got an empty list")
    for each in given:
        if not isinstance(each, nn.Module):
            raise ArgumentTypeError(f"fully_shard: expected a module or a list of modules, got {type(each).__name__}")
        if isinstance(each, FSDPModule):
            raise TensorError(f"fully_shard was already called on this {type(each).__name__}: shard a module once")
        if type(each).forward is nn.Module.forward:
            raise ArgumentTypeError(
                f"fully_shard: {type(each).__name__} has no forward, so nothing would gather its parameters: call "
                "fully_shard on the modules in it"
            )
    return given


def _precision(policy: Any) -> MixedPrecisionPolicy:
    if policy is None:
        return MixedPrecisionPolicy()
    if isinstance(policy, MixedPrecisionPolicy):
        return policy
    try:  # PyTorch's, which has the same fields
        return MixedPrecisionPolicy(
            policy.param_dtype, policy.reduce_dtype, policy.output_dtype, policy.cast_forward_inputs
        )
    except AttributeError:
        raise ArgumentTypeError(
            f"fully_shard: mp_policy must be a MixedPrecisionPolicy, got {type(policy).__name__}"
        ) from None


def _after_forward(reshard: Any) -> bool | None:
    if reshard is None or isinstance(reshard, bool):
        return reshard
    if not isinstance(reshard, int):
        raise ArgumentTypeError(
            f"fully_shard: reshard_after_forward must be a bool, an int or None, got {type(reshard).__name__}"
        )
    return True


def _refuse_offload(policy: Any) -> None:
    if policy is not None and type(policy).__name__ != "OffloadPolicy":  # PyTorch's default, which offloads nothing
        raise UnsupportedError(
            f"fully_shard: {type(policy).__name__} is not supported: parameters stay on their device; leave "
            "offload_policy out"
        )


def _ignored(parameters: Any) -> list[nn.Parameter]:
    given = [] if parameters is None else list(parameters)
    for each in given:
        if not isinstance(each, nn.Parameter):
            raise ArgumentTypeError(f"fully_shard: ignored_params must be parameters, got {type(each).__name__}")
    return given


def _mesh(mesh: Any) -> tuple[Any, Mesh]:
    if mesh is None:
        mesh = comm.entered_mesh()
    if mesh is None:
        mesh = comm.init_world_mesh("cuda" if torch.cuda.is_available() else "cpu")
    bound = comm.bind(mesh)
    if not isinstance(bound, Mesh) or bound.ndim not in (1, 2):
        raise MeshError(
            f"fully_shard: expected a mesh of one dimension, or of two (replicate, shard), got {bound!r}: pass a part "
            'of it, such as mesh["dp"]'
        )
    if comm.rank() not in bound:
        raise MeshError(f"fully_shard: rank {comm.rank()} is not in {bound!r}")
    return mesh, bound


def _device(mesh: Any) -> torch.device | None:
    """Return the device to which parameters are moved; None to leave them where they are."""
    kind = getattr(mesh, "device_type", "cpu")
    if kind == "cpu":
        return None
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def _find(modules: Sequence[nn.Module], ignored: set[int]) -> _Found:
    """Return the parameters of the modules that belong to no unit yet, and where they are registered."""
    children = {
        id(binding_of(each)): binding_of(each)
        for module in modules
        for each in module.modules()
        if isinstance(each, FSDPModule)
    }
    taken = {(id(slot.module), slot.key) for binding in children.values() for slot in binding.slots}
    indices: dict[int, int] = {}
    found = _Found([], [], [], [], list(children.values()), [])
    seen: set[int] = set()
    for module in modules:
        for prefix, submodule in module.named_modules():
            if id(submodule) in seen:
                continue
            seen.add(id(submodule))
            for key, parameter in submodule._parameters.items():
                if parameter is None or (id(submodule), key) in taken:
                    continue
                if id(parameter) in ignored:
                    found.ignored.append((submodule, key))
                    continue
                known = parameter.__dict__.get(_PLACE) or _replaced.get(parameter)
                other = None if known is None else known[0]()
                if other is not None:
                    if not any(slot.module is submodule and slot.key == key for slot in other.slots):
                        found.tied.append((Slot(submodule, key, known[1]), other))
                    continue
                if id(parameter) not in indices:
                    indices[id(parameter)] = len(found.parameters)
                    found.parameters.append(parameter)
                    found.names.append(f"{prefix}.{key}" if prefix else key)
                found.slots.append(Slot(submodule, key, indices[id(parameter)]))
    return found


def _placements(parameter: nn.Parameter, mesh: Mesh, choose: Callable[[nn.Parameter], Any] | None) -> list[Placement]:
    chosen = choose(parameter) if choose is not None else None
    dim = 0 if chosen is None else getattr(chosen, "dim", None)
    if not isinstance(dim, int):
        raise ArgumentTypeError(
            f"fully_shard: shard_placement_fn must return a Shard or None, got {type(chosen).__name__}: {chosen!r}"
        )
    return [*[Replicate()] * (mesh.ndim - 1), Shard(dim % max(1, parameter.dim()))]


def _check(found: _Found, placements: Sequence[Sequence[Placement]]) -> None:
    """Raise if a parameter cannot be sharded, naming all of them; nothing is changed before."""
    problems = []
    for name, parameter, _ in zip(found.names, found.parameters, placements, strict=True):
        if isinstance(parameter, DTensor):
            problems.append(
                f"{name} is a DTensor already, {parameter.sharding}: use sw.parallelize to combine fully sharded with "
                "tensor parallel"
            )
        elif not parameter.dim():
            problems.append(f"{name} has no dimensions, so it cannot be sharded: give it the shape [1], or ignore it")
        elif parameter.layout is not torch.strided:
            problems.append(f"{name} has the memory layout {parameter.layout}: only strided tensors can be sharded")
    if problems:
        raise TensorError("fully_shard: " + "; ".join(problems))


def _make_unit(
    found: _Found,
    placements: Sequence[Sequence[Placement]],
    device_mesh: Any,
    mesh: Mesh,
    precision: MixedPrecisionPolicy,
    after_forward: bool | None,
    device: torch.device | None,
) -> Unit:
    parameters = []
    for original, placement in zip(found.parameters, placements, strict=True):
        source = original
        if device is not None and original.device != device and not original.is_meta:
            source = nn.Parameter(original.detach().to(device), requires_grad=original.requires_grad)
        parameter: Any = distribute_tensor(source, device_mesh, placement, src_data_rank=None)
        known = {"_is_param", *parameter.__dict__}
        parameter.__dict__.update({key: value for key, value in original.__dict__.items() if key not in known})
        parameters.append(parameter)
    options: dict[str, Any] = {
        "precision": precision,
        "mean": True,
        "reshard_after_forward": after_forward is not False,
        "names": found.names,
    }
    if not parameters:  # a module without parameters of its own still begins and ends steps
        return Unit([], [], comm.group_along(mesh, mesh.ndim - 1), **options)
    return unit_of(parameters, mesh.ndim - 1, replicated=0 if mesh.ndim > 1 else None, **options)


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    for submodule in module.modules():
        for key, buffer in submodule._buffers.items():
            if isinstance(buffer, Tensor) and not buffer.is_meta:
                submodule._buffers[key] = buffer.to(device)


def _hook_owners(binding: Binding, modules: Sequence[nn.Module], found: _Found) -> None:
    """Register hooks on the modules of a unit and on those that own its parameters."""
    for module in (*modules, *(slot.module for slot in found.slots)):
        _hooks_of(module, binding)
    for slot, other in found.tied:
        _hooks_of(slot.module, other)


def _hooks_of(module: nn.Module, binding: Binding) -> None:
    hooks: OwnerHooks | None = module.__dict__.get(_HOOKS)
    if hooks is None:
        hooks = module.__dict__[_HOOKS] = OwnerHooks([])
        hooks.register(module)
    if not any(each is binding for each in hooks.bindings):
        hooks.bindings.append(binding)


eager.install()
