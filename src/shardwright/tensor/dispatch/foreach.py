"""Operators on lists of tensors: `torch._foreach_*`, fused optimizers, the gradient scaler's check.

If the tensors at each index of the lists have the same layout, one native call handles all of them. Otherwise the
ordinary operator is called for each index. Norms of a list take one all-reduce for each set of ranks that shares
tensors, however long the list is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from shardwright import comm
from shardwright.errors import InPlaceError, TensorError
from shardwright.layout import Layout
from shardwright.tensor.base.layout_cache import cache_of
from shardwright.tensor.base.tagging import DTensorBase, disabled, no_torch_function, tag_replicated
from shardwright.tensor.base.writes import WATCH, count_write
from shardwright.tensor.redistribute.steps import line

__all__ = ["LISTS", "LIST_FUNCTIONS", "call_on_lists"]

Handler: TypeAlias = Callable[[str, bool, Any, list[Any], dict[str, Any]], Any]

# Arguments that may also be given by keyword, in the order of torch's signatures.
_BY_NAME = (
    *("self", "other", "tensors1", "tensor1", "tensor2", "exponent", "src", "mat2"),
    *("scalar", "value", "scalars", "weight", "weights"),
)


def call_on_lists(name: str, inplace: bool, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a function on lists of tensors that contain DTensors; `name` is a key of `LISTS`."""
    return LISTS[name](name.removeprefix("_foreach_"), inplace, func, list(args), kwargs)


def _elementwise(name: str, inplace: bool, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    layouts = _common_layouts([*args, *kwargs.values()])
    if layouts is None:
        return _one_by_one(name, inplace, args, kwargs)
    if inplace:
        _refuse_copies(name, args[0])
        try:
            return disabled(func, (), tuple(args), kwargs)
        finally:
            if WATCH.inference:
                for tensor in args[0]:
                    count_write(tensor)  # even if torch raises: it writes to an inference tensor first
    result = disabled(func, (), tuple(args), kwargs)
    concrete = DTensorBase.concrete
    for tensor, layout in zip(result, layouts, strict=True):
        if layout is not None:
            tensor.__class__ = concrete
            tensor._layout = layout
    return result


def _common_layouts(values: Sequence[Any]) -> list[Layout | None] | None:
    """Return the layout at each index, if all lists have the same and the local call suffices; None if not.

    A None in the list stands for a plain tensor at that index of every list.
    """
    layouts: list[Layout | None] | None = None
    scalars = []
    for value in values:
        if isinstance(value, list | tuple):
            if value and not isinstance(value[0], Tensor):
                continue  # one number per tensor
            own = [getattr(tensor, "_layout", None) for tensor in value]
            if layouts is None:
                layouts = own
            elif own != layouts:
                return None
        elif isinstance(value, Tensor):
            scalars.append(value)
    if layouts is None or any(layout is not None and layout.is_partial for layout in layouts):
        return None
    return layouts if all(_fits_anywhere(scalar, layouts) for scalar in scalars) else None


def _fits_anywhere(scalar: Tensor, layouts: Sequence[Layout | None]) -> bool:
    """Return whether a tensor beside the lists is the same number on every rank that computes with it."""
    if scalar.requires_grad and torch.is_grad_enabled():
        return False
    if not isinstance(scalar, DTensorBase):
        return True
    own = scalar._layout
    if comm.rank() not in own.mesh:  # empty here, but torch's functions need one number
        return False
    meshes = {layout.mesh for layout in layouts if layout is not None} - {own.mesh}
    return own.is_replicated and all(set(mesh.ranks) <= set(own.mesh.ranks) for mesh in meshes)


def _one_by_one(name: str, inplace: bool, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Call the ordinary operator for each index of the lists."""
    given = args + [kwargs.pop(key) for key in _BY_NAME if key in kwargs]
    if name in ("addcmul", "addcdiv") and len(given) == 4:
        last = given.pop()
        kwargs["value"] = last.tolist() if isinstance(last, Tensor) else last
    count = next(len(value) for value in given if isinstance(value, list | tuple))

    def at(value: Any, index: int) -> Any:
        return value[index] if isinstance(value, list | tuple) else value

    results = []
    for index in range(count):
        own = [at(value, index) for value in given]
        own_kwargs = {key: at(value, index) for key, value in kwargs.items()}
        results.append(_single(name, inplace)(*own, **own_kwargs))
    return given[0] if inplace else tuple(results)


def _single(name: str, inplace: bool) -> Callable[..., Any]:
    """Return the ordinary operator of a `_foreach_` function."""
    special = {"norm": torch.linalg.vector_norm, "powsum": _powsum}
    if not inplace:
        return special.get(name) or getattr(torch, name)  # type: ignore[no-any-return]  # torch's functions
    method: Callable[..., Any] | None = getattr(Tensor, f"{name}_", None)
    if method is not None:
        return method
    out_of_place = getattr(torch, name)  # maximum_ and similar exist for lists only
    return lambda target, *others: target.copy_(out_of_place(target, *others))


def _powsum(tensor: Tensor, ord: Any = 2, dtype: torch.dtype | None = None) -> Tensor:
    return tensor.abs().pow(ord).sum(dtype=dtype)


def _refuse_copies(name: str, targets: Sequence[Tensor]) -> None:
    for target in targets:
        if "_copied_by" in target.__dict__:
            raise InPlaceError(
                f"_foreach_{name}_: {target._layout} looks like a view but is a copy, because "  # type: ignore[attr-defined]  # it is a DTensor
                f"{target._copied_by} of a sharded dimension needed communication: write to the base tensor"  # type: ignore[attr-defined]  # likewise
            )


def _each_index(name: str, inplace: bool, _: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    return _one_by_one(name, inplace, args, kwargs)


def _norm(name: str, _: bool, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    tensors = list(kwargs.pop("self", None) or args.pop(0))
    order, dtype = _order_and_dtype(*args, **kwargs)
    differentiable = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    partial = any(isinstance(tensor, DTensorBase) and tensor._layout.is_partial for tensor in tensors)
    if differentiable or partial:
        return _one_by_one(name, False, [tensors, order], {"dtype": dtype})
    with no_torch_function():
        results = _local_norms(func, tensors, order, dtype)
        for ranks, indices in _sharing(tensors).items():
            reduced = _reduce_norms(torch.stack([results[index] for index in indices]), ranks, order, name)
            for index, norm in zip(indices, reduced.unbind(), strict=True):
                results[index] = norm
    for index, tensor in enumerate(tensors):
        if isinstance(tensor, DTensorBase):
            mesh = tensor._layout.mesh
            results[index] = tag_replicated(results[index], mesh)
    return tuple(results)


def _order_and_dtype(ord: Any = 2, dtype: torch.dtype | None = None) -> tuple[float, torch.dtype | None]:
    return float(ord), dtype


def _local_norms(func: Any, tensors: list[Tensor], order: float, dtype: torch.dtype | None) -> list[Tensor]:
    """Return the norm of each shard; that of an empty shard is the identity of the reduction."""
    identity = float("inf") if order < 0 else 0.0
    filled = [tensor for tensor in tensors if tensor.numel()]
    norms = iter(func(filled, order, dtype=dtype) if filled else ())
    results = []
    for tensor in tensors:
        if tensor.numel():
            results.append(next(norms))
        else:
            kind = dtype or (tensor.dtype.to_real() if tensor.dtype.is_complex else tensor.dtype)
            results.append(torch.full((), identity, dtype=kind, device=tensor.device))
    return results


def _sharing(tensors: Sequence[Tensor]) -> dict[tuple[int, ...], list[int]]:
    """Return the indices of the tensors sharded over each set of ranks that includes this rank."""
    shared: dict[tuple[int, ...], list[int]] = {}
    rank = comm.rank()
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, DTensorBase) or rank not in tensor._layout.mesh:
            continue
        ranks = _sharded_over(tensor._layout, rank)
        if len(ranks) > 1:
            shared.setdefault(ranks, []).append(index)
    return shared


def _sharded_over(layout: Layout, rank: int) -> tuple[int, ...]:
    """Return the ranks over which this rank's copy is sharded; cached with the layout."""
    derived = cache_of(layout).derived
    known: tuple[int, ...] | None = derived.get((_sharded_over, rank))
    if known is None:
        sharding = tuple(m for m, placement in enumerate(layout.placements) if placement.is_shard())
        known = derived[_sharded_over, rank] = tuple(sorted(line(layout.mesh, sharding, rank)))
    return known


def _reduce_norms(norms: Tensor, ranks: tuple[int, ...], order: float, name: str) -> Tensor:
    """Reduce norms of shards to norms of the global tensors, all of them with one all-reduce."""
    group = comm.subgroup(ranks)
    if order in (float("inf"), float("-inf")):
        return comm.all_reduce(norms, group, op="max" if order > 0 else "min")
    if order == 0 or name == "powsum":
        return comm.all_reduce(norms, group)
    powers = norms.double().pow(order)  # half precision would overflow
    return comm.all_reduce(powers, group).pow(1.0 / order).to(norms.dtype)


def _fused(name: str, _: bool, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Run a fused optimizer step in one native call; gradients and states must be laid out like their parameter."""
    layouts = [getattr(tensor, "_layout", None) for tensor in args[0]]
    for layout in layouts:
        if layout is not None and layout.is_partial:
            raise TensorError(
                f"{name}_: a parameter must not be partial, got {layout}: redistribute it before training"
            )
    for value in (*args[1:], *kwargs.values()):
        if not isinstance(value, list | tuple):
            continue
        for index, tensor in enumerate(value):
            layout = getattr(tensor, "_layout", None)
            if layout is not layouts[index] and not (layout is None and tensor.ndim == 0):
                raise TensorError(
                    f"{name}_: parameter {index} has layout {layouts[index]}, but its gradient or state has {layout}: "
                    "redistribute the state, or let the optimizer create it"
                )
    return disabled(func, (), tuple(args), kwargs)


def _unscale(_: str, __: bool, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Run the gradient scaler's check: an inf or nan in one rank's shard counts on all ranks."""
    gradients = kwargs.get("self", args[0] if args else ())
    found_inf: Tensor = kwargs["found_inf"] if "found_inf" in kwargs else args[1]
    meshes = [tensor._layout.mesh for tensor in gradients if isinstance(tensor, DTensorBase)]
    ranks = tuple(sorted({rank for mesh in dict.fromkeys(meshes) for rank in mesh.ranks}))
    result = disabled(func, (), tuple(args), kwargs)
    if comm.rank() in ranks:
        with no_torch_function():
            comm.all_reduce_(found_inf, comm.subgroup(ranks), op="max")
    return result


_SPECIAL: dict[str, Handler] = {
    "_foreach_norm": _norm,
    "_foreach_powsum": _norm,
    "_foreach_max": _each_index,
    "_foreach_mm": _each_index,
    "_amp_foreach_non_finite_check_and_unscale": _unscale,
    **{f"_fused_{optimizer}": _fused for optimizer in ("adam", "adamw", "adagrad", "sgd")},
}

LISTS: dict[str, Handler] = {
    **{name.removesuffix("_"): _elementwise for name in dir(torch) if name.startswith("_foreach_")},
    **_SPECIAL,
}

LIST_FUNCTIONS = frozenset(
    function
    for name in LISTS
    for spelled in (name, f"{name}_")
    if (function := getattr(torch, spelled, None)) is not None
)
