"""`local_map`: call a function of local tensors with DTensors, with explicit placements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from inspect import signature
from typing import Any, TypeAlias, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shardwright import comm
from shardwright.errors import ArgumentTypeError, LocalTensorError, MeshMismatchError, TensorError
from shardwright.layout import Layout, Mesh, Placement, as_placement
from shardwright.tensor.api.from_local import for_gradient, from_local, one_mesh
from shardwright.tensor.base.capture import capturing
from shardwright.tensor.base.copied import refuse_stale
from shardwright.tensor.base.gradient_types import ENTERED
from shardwright.tensor.base.tagging import DTensorBase, alias, no_torch_function, tag
from shardwright.tensor.dispatch.outside import ResultMeta
from shardwright.tensor.extend.local_map_outside import map_outside
from shardwright.tensor.gradients.below_autograd import expect_plain_roots
from shardwright.tensor.redistribute.autograd import redistribute_local

__all__ = ["local_map"]

Placements: TypeAlias = Sequence[object] | None

# Types whose repr identifies the value. Keys contain the type as well, because 1 == True.
BY_VALUE = frozenset(
    (int, float, complex, bool, str, bytes, slice, range, type(None), type(...), torch.dtype, torch.device, torch.Size)
)


def local_map(
    func: Callable[..., Any] | None = None,
    out_placements: Sequence[Placements] | Sequence[object] | None = None,
    in_placements: Sequence[Placements] | Sequence[object] | None = None,
    in_grad_placements: Sequence[Placements] | Sequence[object] | None = None,
    device_mesh: Any = None,
    *,
    redistribute_inputs: bool = False,
    mesh: Any = None,
) -> Callable[..., Any]:
    """Return a function of DTensors that calls `func` with local tensors. Arguments are those of PyTorch's `local_map`.

    Each DTensor among the arguments, nested or not, is passed as this rank's local tensor, and each tensor that `func`
    returns becomes a DTensor with the placements that `out_placements` gives for it. The lists have one entry for each
    leaf of the results and of the arguments, None where it is not a DTensor; a single list of placements is used for
    all of them. `in_placements=None` accepts inputs with any placements. Otherwise inputs with other placements are an
    error, or are redistributed with `redistribute_inputs=True`. Plain tensors and other values are passed unchanged.
    `device_mesh`, or `mesh`, is needed only if no argument is a DTensor. Without `func`, it is a decorator.

    The leaves are those of the arguments in the order of the function's parameters, whether a call passes them by
    position or by name. Keyword arguments that are not parameters, or of a function without a signature, come last,
    sorted by name; dicts within arguments keep their order. `in_grad_placements` uses the same order. Lists that cover
    the positional arguments only are accepted if no keyword argument is a DTensor.

    Gradients: on each mesh dimension, the gradient of a replicated input is a partial sum if any other input or an
    output is not replicated, because each rank then contributes its own share. `in_grad_placements` overrides this.

    If outputs are sharded, the ranks gather the local sizes once for each combination of layouts, plain numbers and
    strings, which must be the same on every rank. Sizes must depend on these alone, not on what `func` closes over. If
    there are plain tensors or other objects among the arguments, sizes are gathered on each call. If `func` raises
    before sizes are gathered, all ranks raise, as a `RankFailedError`.

    On a rank outside the mesh `func` is called on tensors without values to find out what the results are, and these
    are empty there. It raises `UnsupportedError` there if they depend on values.

    >>> import torch, shardwright as sw
    >>> mesh = sw.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    >>> rows, whole = [sw.Shard(0)], [sw.Replicate()]
    >>> product = sw.local_map(torch.mm, out_placements=rows, in_placements=(rows, whole))
    >>> w = sw.ones(3, 2, mesh=mesh, requires_grad=True)
    >>> y = product(sw.ones(4, 3, mesh=mesh, placements=rows), w)
    >>> y.sum().backward()
    >>> print(y.sharding, w.grad.sharding)
    [4, 2] (dp: S(0)) [3, 2] (dp: R)

    >>> @sw.local_map(out_placements=rows, in_placements=(rows,))
    ... def double(x):
    ...     return x * 2
    >>> print(double(y).sharding)
    [4, 2] (dp: S(0))
    """
    given_mesh = one_mesh("local_map", mesh, device_mesh)
    outs = _PlacementLists.parse("out_placements", out_placements)
    ins = _PlacementLists.parse("in_placements", in_placements)
    in_gradients = _PlacementLists.parse("in_grad_placements", in_grad_placements)
    if func is None:
        return partial(
            _mapped, outs=outs, ins=ins, in_gradients=in_gradients, mesh=given_mesh, redistribute=redistribute_inputs
        )
    return _mapped(func, outs, ins, in_gradients, given_mesh, redistribute_inputs)


def _mapped(
    function: Callable[..., Any],
    outs: _PlacementLists,
    ins: _PlacementLists,
    in_gradients: _PlacementLists,
    mesh: Any,
    redistribute: bool,
) -> Callable[..., Any]:
    if not callable(function):
        raise ArgumentTypeError(
            f"local_map: func must be callable, got {type(function).__name__}: the arguments are local_map(func, "
            "out_placements, in_placements)"
        )
    name = getattr(function, "__name__", type(function).__name__)
    parameters = _parameters(function)
    cache = _LayoutCache()

    @wraps(function)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        flat, spec = pytree.tree_flatten((args, _in_order(kwargs, parameters)))
        over = _mesh_of(name, flat, mesh)
        wanted = ins.for_arguments(name, args, flat)
        for value in flat:
            if isinstance(value, DTensorBase):
                refuse_stale(name, value)
        sources = [value._layout if isinstance(value, DTensorBase) else None for value in flat]
        targets = [
            None if source is None else _target(name, index, source, want, ins.entries is None, redistribute)
            for index, (source, want) in enumerate(zip(sources, wanted, strict=True))
        ]
        if comm.rank() not in over:
            return map_outside(name, function, flat, spec, targets, over, partial(_out_placements, name, over, outs))
        gradients = in_gradients.for_arguments(name, args, flat)
        entering = [
            None if target is None else _entering(target, given, targets, outs)
            for target, given in zip(targets, gradients, strict=True)
        ]
        with no_torch_function():
            local = [
                _local(value, target) if isinstance(value, DTensorBase) else value
                for value, target in zip(flat, entering, strict=True)
            ]
        local_args, local_kwargs = pytree.tree_unflatten(local, spec)
        is_sharded = any(placement.is_shard() for out in outs.given() for placement in out)
        key = _key(flat, spec, targets) if is_sharded else None  # unsharded results have their global size
        if over.size == 1 or key in cache.layouts or not is_sharded:
            returned = function(*local_args, **local_kwargs)
        else:  # sizes are gathered next: if the function fails on one rank, the others must not wait for it
            group = comm.subgroup(sorted(over.ranks))
            returned = comm.agree(lambda: function(*local_args, **local_kwargs), what=name, group=group)
        results, out_spec = pytree.tree_flatten(returned)
        layouts = _layouts(name, results, over, outs, cache, key)
        tagged = [
            value if layout is None else tag(alias(value) if _may_be_shared(value, local) else value, layout)
            for value, layout in zip(results, layouts, strict=True)
        ]
        return pytree.tree_unflatten(tagged, out_spec)

    return mapped


@final
@dataclass(frozen=True, slots=True)
class _PlacementLists:
    """Placements for each leaf of the arguments or results of a call."""

    what: str  # the name of the argument of local_map that they come from
    entries: tuple[tuple[Placement, ...] | None, ...] | None  # None: not given
    is_for_all: bool = False  # True if the only entry is for all leaves

    @classmethod
    def parse(cls, what: str, given: Any) -> _PlacementLists:
        """Check the lists that were given to local_map: placements for all leaves, or lists of placements, or None."""
        if given is None:
            return cls(what, None)
        if not isinstance(given, list | tuple):
            raise ArgumentTypeError(
                f"local_map: {what} must be a list of placements, or a list with a list of placements or None for each "
                f"leaf, got {type(given).__name__}. {_ORDER}"
            )
        if given and not any(value is None or isinstance(value, list | tuple) for value in given):
            return cls(what, (tuple(map(as_placement, given)),), is_for_all=True)
        for value in given:
            if value is not None and not isinstance(value, list | tuple):
                raise ArgumentTypeError(
                    f"local_map: {what} mixes lists and placements ({value!r}): write each entry as a list, or as None"
                )
        return cls(what, tuple(None if value is None else tuple(map(as_placement, value)) for value in given))

    def given(self) -> list[tuple[Placement, ...]]:
        return [entry for entry in self.entries or () if entry is not None]

    def for_arguments(self, name: str, args: Sequence[Any], flat: Sequence[Any]) -> list[tuple[Placement, ...] | None]:
        """Return the placements for each leaf of the arguments."""
        entries = self.entries
        if entries is not None and not self.is_for_all and len(entries) < len(flat):
            positional = len(pytree.tree_leaves(args))
            if len(entries) == positional and not any(isinstance(value, DTensorBase) for value in flat[positional:]):
                entries += (None,) * (len(flat) - positional)  # as in PyTorch, where they are for positional ones
        return self._for_leaves(name, entries, flat, "argument")

    def for_results(self, name: str, results: Sequence[Any]) -> list[tuple[Placement, ...] | None]:
        """Return the placements for each leaf of the results."""
        return self._for_leaves(name, self.entries, results, "result")

    def _for_leaves(
        self, name: str, entries: tuple[tuple[Placement, ...] | None, ...] | None, leaves: Sequence[Any], leaf: str
    ) -> list[tuple[Placement, ...] | None]:
        if entries is None:
            return [None] * len(leaves)
        if self.is_for_all:
            return list(entries) * len(leaves)
        if len(entries) != len(leaves):
            raise TensorError(
                f"{name}: {self.what} has {len(entries)} entries for {len(leaves)} {leaf}s: give one for each, None "
                f"for plain values. {_ORDER}"
            )
        for index, (value, entry) in enumerate(zip(leaves, entries, strict=True)):
            if entry is not None and not isinstance(value, Tensor | ResultMeta):
                raise TensorError(
                    f"{name}: {self.what} has placements for {leaf} {index}, which is not a tensor but "
                    f"{type(value).__name__}: give None for it. {_ORDER}"
                )
        return list(entries)


_ORDER = "The arguments are local_map(func, out_placements, in_placements), in this order"


@final
class _LayoutCache:
    """The layouts of results, by the key of the call.

    Not a bare dict, which `sw.compile` would take for state of the program, which must not change.
    """

    def __init__(self) -> None:
        self.layouts: dict[tuple[Any, ...] | None, list[Layout | None]] = {}


def _parameters(function: Callable[..., Any]) -> dict[str, int]:
    """Return the positions of a function's parameters by name; empty if it has no signature."""
    try:
        return {name: index for index, name in enumerate(signature(function).parameters)}
    except (TypeError, ValueError):
        return {}


def _in_order(kwargs: dict[str, Any], parameters: dict[str, int]) -> dict[str, Any]:
    """Return keyword arguments in the order of the function's parameters, then others by name."""
    if len(kwargs) < 2:
        return kwargs
    return dict(sorted(kwargs.items(), key=lambda item: (parameters.get(item[0], len(parameters)), item[0])))


def _may_be_shared(value: Any, local: Sequence[Any]) -> bool:
    """Return whether a result may be referenced elsewhere, so that an alias must be tagged instead."""
    return value.grad_fn is None or any(value is other for other in local)


def _mesh_of(name: str, values: Sequence[Any], given: Any) -> Mesh:
    meshes = dict.fromkeys(value._layout.mesh for value in values if isinstance(value, DTensorBase))
    if given is not None:
        meshes = {comm.bind(given): None, **meshes}
    if not meshes:
        raise TensorError(f"{name}: no argument is a DTensor: pass the mesh of the results as device_mesh")
    if len(meshes) > 1:
        first, second = list(meshes)[:2]
        raise MeshMismatchError(
            f"{name}: tensors are on different meshes, {first!r} and {second!r}: redistribute them to one"
        )
    return next(iter(meshes))


def _target(
    name: str, index: int, source: Layout, wanted: tuple[Placement, ...] | None, any_layout: bool, redistribute: bool
) -> Layout:
    """Return the layout in which an input is passed; raise if it has another one and may not be redistributed."""
    if any_layout:
        return source
    if wanted is None:
        raise TensorError(
            f"{name}: argument {index} is a DTensor {source}, but in_placements has None for it: pass its placements"
        )
    target = Layout(source.mesh, wanted, source.shape, source.order)
    if target is not source and not redistribute:
        raise TensorError(
            f"{name}: argument {index} is {source}, but in_placements require {target}: redistribute it before the "
            "call, or pass redistribute_inputs=True"
        )
    return target


def _entering(
    target: Layout, given: tuple[Placement, ...] | None, targets: Sequence[Layout | None], outs: _PlacementLists
) -> Layout:
    """Return the layout with `Entered` in place of `Replicate` where another input or an output is not replicated."""
    if given is not None:
        return for_gradient(target, given)
    placements = list(target.placements)
    for mesh_dim, placement in enumerate(placements):
        others = [layout.placements[mesh_dim] for layout in targets if layout is not None]
        others += [out[mesh_dim] for out in outs.given() if mesh_dim < len(out)]
        if placement.is_replicate() and not all(other.is_replicate() for other in others):
            placements[mesh_dim] = ENTERED
    return target.replace(placements=placements, order=target.order)


def _local(value: DTensorBase, target: Layout | None) -> Tensor:
    assert target is not None
    expect_plain_roots()
    moved = redistribute_local(value, value._layout, target)
    return value.view_as(value) if moved is value else moved


def _layouts(
    name: str,
    results: Sequence[Any],
    mesh: Mesh,
    outs: _PlacementLists,
    cache: _LayoutCache,
    key: tuple[Any, ...] | None,
) -> list[Layout | None]:
    """Return the layouts of the results; sizes are gathered from the ranks unless the key is known."""
    placements = _out_placements(name, mesh, outs, results)
    layouts = None if key is None else cache.layouts.get(key)
    if layouts is None:
        with capturing(False):
            layouts = [_gathered(value, mesh, entry) for value, entry in zip(results, placements, strict=True)]
        if key is not None:
            cache.layouts[key] = layouts
        return layouts
    shapes = [
        tuple(value.shape) if isinstance(value, Tensor) and entry is not None else None
        for value, entry in zip(results, placements, strict=True)
    ]
    before = [None if layout is None else layout.local_shape(comm.rank()) for layout in layouts]
    if shapes != before:
        raise LocalTensorError(
            f"{name}: the local shapes of the results are {_listed(shapes)} on rank {comm.rank()}, but were "
            f"{_listed(before)} with the same arguments: sizes must depend on the arguments alone. Pass what else they "
            "depend on as an argument (a number or a string), or use another local_map for it"
        )
    return layouts


def _out_placements(
    name: str, mesh: Mesh, outs: _PlacementLists, results: Sequence[Any]
) -> list[tuple[Placement, ...] | None]:
    """Return the placements of each result, None if it is returned unchanged."""
    placements = outs.for_results(name, results)
    for index, (value, entry) in enumerate(zip(results, placements, strict=True)):
        if isinstance(value, DTensorBase):
            raise TensorError(f"{name}: result {index} is a DTensor {value._layout}: return local tensors")
        if not isinstance(value, Tensor | ResultMeta):
            continue
        if outs.entries is None:
            raise TensorError(
                f"{name}: result {index} is a tensor, but local_map was called without out_placements: pass them"
            )
        if entry is not None and len(entry) != mesh.ndim:
            raise TensorError(
                f"{name}: result {index} has placements {list(entry)} on {mesh!r}: pass one per mesh dimension"
            )
    return placements


def _listed(shapes: Sequence[tuple[int, ...] | None]) -> str:
    return ", ".join("none" if shape is None else str(shape) for shape in shapes) or "none"


def _key(values: Sequence[Any], spec: Any, targets: Sequence[Layout | None]) -> tuple[Any, ...] | None:
    """Return a key of the arguments on which the sizes of results depend, the same on all ranks; None if there is none.

    Objects of other types have none: their repr may not show their state, or contain an address.
    """
    key: list[Any] = [comm.rank(), comm.world().size, spec]
    for value, target in zip(values, targets, strict=True):
        if target is None and type(value) not in BY_VALUE:
            return None
        key.append((type(value), repr(value)) if target is None else target)
    return tuple(key)


def _gathered(value: Any, mesh: Mesh, placements: tuple[Placement, ...] | None) -> Layout | None:
    if placements is None or not isinstance(value, Tensor):
        return None
    with torch.no_grad():
        result: DTensorBase = from_local(value.detach(), mesh, placements, run_check=None, shape=None, stride=None)
    return result._layout
