"""Functions of local tensors as functions of DTensors: what goes in and comes out is said, not guessed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from inspect import signature
from typing import Any, TypeAlias, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shardwright import comm
from shardwright.errors import LocalTensorError, MeshMismatchError, TensorError
from shardwright.layout import Layout, Mesh, Placement, as_placement
from shardwright.tensor.api.from_local import for_gradient, from_local
from shardwright.tensor.base.capture import recording
from shardwright.tensor.base.gradient_types import ENTERED
from shardwright.tensor.base.tagging import DTensorBase, alias, no_torch_function, tag
from shardwright.tensor.dispatch.outside import Kind
from shardwright.tensor.extend.local_map_outside import map_outside
from shardwright.tensor.gradients.below_autograd import expect_plain_roots
from shardwright.tensor.redistribute.autograd import redistribute_local

__all__ = ["local_map"]

Placements: TypeAlias = Sequence[object] | None

# Kinds of arguments that their text tells all about; in a key they go with their type, for 1 and True are equal.
BY_VALUE = frozenset(
    (int, float, complex, bool, str, bytes, slice, range, type(None), type(...), torch.dtype, torch.device, torch.Size)
)


def local_map(
    function: Callable[..., Any],
    in_placements: Sequence[Placements] | Sequence[object] | None,
    out_placements: Sequence[Placements] | Sequence[object],
    *,
    mesh: Any = None,
    device_mesh: Any = None,
    redistribute_inputs: bool = False,
    in_grad_placements: Sequence[Placements] | None = None,
) -> Callable[..., Any]:
    """`function`, which computes with local tensors, as a function of DTensors.

    Each DTensor among the arguments, nested or not, goes in as this rank's local tensor, and each tensor that comes
    out is a DTensor laid out as `out_placements` says. Both lists have an entry for each leaf of the arguments and of
    the results, None where it is no DTensor; a single list of placements stands for all of them. Inputs that lie
    otherwise are refused, or brought there with `redistribute_inputs=True`; `in_placements=None` takes them as they
    lie. Plain tensors and other values are passed on. `mesh`, or `device_mesh` as PyTorch calls it, is needed where no
    argument is a DTensor.

    The leaves are those of the arguments that are given, in the order of the function's parameters, however the call
    spells them. Keyword arguments that are no parameters of it, or of a function without a signature, come last, by
    name; dicts within arguments are in their own order. `in_grad_placements` goes by the same order.

    Gradients: that of a replicate is a partial sum wherever, on that mesh dimension, any other input or an output is
    not replicated, for each rank then adds its own share. `in_grad_placements` says otherwise.

    The sizes of outputs that are cut are asked of the ranks once for each combination of layouts and of plain numbers
    and strings, which are to be the same on every rank. They must follow from these alone, not from what `function`
    closes over. Where there are plain tensors or objects of other kinds, they are asked each time. What `function`
    raises while the ranks are asked is raised on all of them, as a `RankFailedError`.

    On a rank outside the mesh `function` is not computed: it is called on tensors without values, to know what the
    results are, and these are empty there. Raise `UnsupportedError` there if they depend on values.

    >>> import torch, shardwright as sw
    >>> mesh = sw.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    >>> rows, whole = [sw.Shard(0)], [sw.Replicate()]
    >>> product = sw.local_map(torch.mm, (rows, whole), rows)
    >>> w = sw.ones(3, 2, mesh=mesh, requires_grad=True)
    >>> y = product(sw.ones(4, 3, mesh=mesh, placements=rows), w)
    >>> y.sum().backward()
    >>> print(y.sharding, w.grad.sharding)
    [4, 2] (dp: S(0)) [3, 2] (dp: R)
    """
    name = getattr(function, "__name__", type(function).__name__)
    parameters = _parameters(function)
    known = _Known()

    @wraps(function)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        flat, spec = pytree.tree_flatten((args, _in_order(kwargs, parameters)))
        over = _mesh_of(name, flat, device_mesh if mesh is None else mesh)
        wanted = _each(in_placements, len(flat), f"{name}: in_placements", "arguments")
        sources = [value._layout if isinstance(value, DTensorBase) else None for value in flat]
        targets = [
            None if source is None else _target(name, place, source, want, in_placements is None, redistribute_inputs)
            for place, (source, want) in enumerate(zip(sources, wanted, strict=True))
        ]
        if comm.rank() not in over:
            return map_outside(name, function, flat, spec, targets, over, partial(_said, name, over, out_placements))
        gradients = _each(in_grad_placements, len(flat), f"{name}: in_grad_placements", "arguments")
        entering = [
            None if target is None else _entering(target, given, targets, out_placements)
            for target, given in zip(targets, gradients, strict=True)
        ]
        with no_torch_function():
            local = [
                _local(value, target) if isinstance(value, DTensorBase) else value
                for value, target in zip(flat, entering, strict=True)
            ]
        local_args, local_kwargs = pytree.tree_unflatten(local, spec)
        is_cut = any(placement.is_shard() for out in _flattened(out_placements) for placement in out or ())
        key = _key(flat, spec, targets) if is_cut else None  # what is not cut says its size itself
        if over.size == 1 or key in known.layouts or not is_cut:
            found = function(*local_args, **local_kwargs)
        else:  # the ranks will be asked for sizes: where one has none to tell, the others must not wait for it
            group = comm.subgroup(sorted(over.ranks))
            found = comm.agree(lambda: function(*local_args, **local_kwargs), what=name, group=group)
        results, out_spec = pytree.tree_flatten(found)
        layouts = _layouts(name, results, over, out_placements, known, key)
        tagged = [
            value if layout is None else tag(alias(value) if _is_given(value, local) else value, layout)
            for value, layout in zip(results, layouts, strict=True)
        ]
        return pytree.tree_unflatten(tagged, out_spec)

    return mapped


@final
class _Known:
    """The layouts of results, by what they follow from.

    An object of our own: a bare dict would be taken for the program's state by `sw.compile`, which may not change.
    """

    def __init__(self) -> None:
        self.layouts: dict[tuple[Any, ...] | None, list[Layout | None]] = {}


def _parameters(function: Callable[..., Any]) -> dict[str, int]:
    """The places of a function's parameters by name; none where it has no signature, as many of torch's have not."""
    try:
        return {name: place for place, name in enumerate(signature(function).parameters)}
    except (TypeError, ValueError):
        return {}


def _in_order(kwargs: dict[str, Any], parameters: dict[str, int]) -> dict[str, Any]:
    """Keyword arguments as the function lists them, then others by name."""
    if len(kwargs) < 2:
        return kwargs
    return dict(sorted(kwargs.items(), key=lambda item: (parameters.get(item[0], len(parameters)), item[0])))


def _is_given(value: Any, local: Sequence[Any]) -> bool:
    """Whether a result is an object that somebody else may hold: only fresh ones are tagged."""
    return value.grad_fn is None or any(value is other for other in local)


def _mesh_of(name: str, values: Sequence[Any], given: Any) -> Mesh:
    meshes = dict.fromkeys(value._layout.mesh for value in values if isinstance(value, DTensorBase))
    if given is not None:
        meshes = {comm.bind(given): None, **meshes}
    if not meshes:
        raise TensorError(f"{name}: there is no DTensor among the arguments: say which mesh the results are on, mesh=…")
    if len(meshes) > 1:
        first, second = list(meshes)[:2]
        raise MeshMismatchError(f"{name}: tensors on different meshes, {first!r} and {second!r}: bring them to one")
    return next(iter(meshes))


def _each(given: Any, count: int, what: str, of: str) -> list[list[Placement] | None]:
    """Placements for each leaf: one list for all of them, or a list of lists."""
    if given is None:
        return [None] * count
    if given and not any(value is None or isinstance(value, list | tuple) for value in given):
        return [[as_placement(value) for value in given]] * count
    if len(given) != count:
        raise TensorError(f"{what} has {len(given)} entries for {count} {of}: give one for each, None for plain values")
    return [None if value is None else [as_placement(item) for item in value] for value in given]


def _target(
    name: str, place: int, source: Layout, wanted: list[Placement] | None, as_they_lie: bool, redistribute: bool
) -> Layout:
    """How an input is to lie; refused where it lies otherwise and nobody asked for it to be moved."""
    if as_they_lie:
        return source
    if wanted is None:
        raise TensorError(f"{name}: argument {place} is a DTensor {source}, in_placements have none for it: give them")
    target = Layout(source.mesh, wanted, source.shape, source.order)
    if target is not source and not redistribute:
        raise TensorError(
            f"{name}: argument {place} is {source}, in_placements want {target}: redistribute it before the call, or "
            "give redistribute_inputs=True"
        )
    return target


def _entering(
    target: Layout, given: list[Placement] | None, targets: Sequence[Layout | None], outs: Sequence[Any]
) -> Layout:
    """The layout with what its gradient is: replicates beside anything that is not enter."""
    if given is not None:
        return for_gradient(target, given)
    placements = list(target.placements)
    said = [out for out in _flattened(outs) if out is not None]
    for mesh_dim, placement in enumerate(placements):
        others = [layout.placements[mesh_dim] for layout in targets if layout is not None]
        others += [out[mesh_dim] for out in said if mesh_dim < len(out)]
        if placement.is_replicate() and not all(other.is_replicate() for other in others):
            placements[mesh_dim] = ENTERED
    return target.replace(placements=placements, order=target.order)


def _flattened(outs: Sequence[Any]) -> list[list[Placement] | None]:
    single = outs and not any(value is None or isinstance(value, list | tuple) for value in outs)
    return _each(outs, 1 if single else len(outs), "out_placements", "results")


def _local(value: DTensorBase, target: Layout | None) -> Tensor:
    assert target is not None
    expect_plain_roots()
    moved = redistribute_local(value, value._layout, target)
    return value.view_as(value) if moved is value else moved


def _layouts(
    name: str,
    results: Sequence[Any],
    mesh: Mesh,
    out_placements: Sequence[Any],
    known: _Known,
    key: tuple[Any, ...] | None,
) -> list[Layout | None]:
    """The results' layouts: what the ranks were asked before, with the same inputs, is known."""
    placements = _said(name, mesh, out_placements, results)
    layouts = None if key is None else known.layouts.get(key)
    if layouts is None:
        with recording(False):
            layouts = [_asked(value, mesh, said) for value, said in zip(results, placements, strict=True)]
        if key is not None:
            known.layouts[key] = layouts
        return layouts
    found = [
        tuple(value.shape) if isinstance(value, Tensor) and said is not None else None
        for value, said in zip(results, placements, strict=True)
    ]
    before = [None if layout is None else layout.local_shape(comm.rank()) for layout in layouts]
    if found != before:
        raise LocalTensorError(
            f"{name}: the results' local shapes are {_listed(found)} on rank {comm.rank()}, and were {_listed(before)} "
            "with the same arguments: sizes must follow from the arguments alone, for every rank to know them. Pass "
            "what else they depend on as an argument (a number or a string), or make another local_map for it"
        )
    return layouts


def _said(name: str, mesh: Mesh, out_placements: Sequence[Any], results: Sequence[Any]) -> list[list[Placement] | None]:
    """Return the placements of each result, None where it stays as it is."""
    placements = _each(out_placements, len(results), f"{name}: out_placements", "results")
    for place, (value, said) in enumerate(zip(results, placements, strict=True)):
        if isinstance(value, DTensorBase):
            raise TensorError(f"{name}: result {place} is a DTensor {value._layout}: return local tensors")
        if isinstance(value, Tensor | Kind) and said is not None and len(said) != mesh.ndim:
            raise TensorError(f"{name}: result {place} has placements {said} on {mesh!r}: give one per mesh dimension")
    return placements


def _listed(shapes: Sequence[tuple[int, ...] | None]) -> str:
    return ", ".join("none" if shape is None else str(shape) for shape in shapes) or "none"


def _key(values: Sequence[Any], spec: Any, targets: Sequence[Layout | None]) -> tuple[Any, ...] | None:
    """What the sizes of results follow from; None where something among it is no key that all ranks agree on.

    An object of another kind is none: what its text does not tell may change, and an address in it differs by rank.
    """
    key: list[Any] = [comm.rank(), comm.world().size, spec]
    for value, target in zip(values, targets, strict=True):
        if target is None and type(value) not in BY_VALUE:
            return None
        key.append((type(value), repr(value)) if target is None else target)
    return tuple(key)


def _asked(value: Any, mesh: Mesh, placements: list[Placement] | None) -> Layout | None:
    if placements is None or not isinstance(value, Tensor):
        return None
    with torch.no_grad():
        found: DTensorBase = from_local(value.detach(), mesh, placements, run_check=None, shape=None, stride=None)
    return found._layout
