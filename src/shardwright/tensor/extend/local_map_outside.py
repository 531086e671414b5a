"""`local_map` on a rank outside the mesh: the results are empty, with the layouts they have on the mesh.

To find these, the function is called on fake tensors, which have shapes but no values, once for each combination of
local shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shardwright import comm
from shardwright.errors import UnsupportedError
from shardwright.layout import Layout, Mesh, Placement
from shardwright.tensor.api.from_local import layout_of_shards
from shardwright.tensor.base.tagging import DTensorBase, no_torch_function, tag
from shardwright.tensor.dispatch.outside import ResultMeta, empty_results

__all__ = ["map_outside"]


def map_outside(
    name: str,
    function: Callable[..., Any],
    values: Sequence[Any],
    spec: pytree.TreeSpec,
    targets: Sequence[Layout | None],
    mesh: Mesh,
    placements_of: Callable[[Sequence[Any]], Sequence[tuple[Placement, ...] | None]],
) -> Any:
    """Return the results of the mapped function: empty here, with the layouts they have on the mesh.

    `values` are the flat arguments, `targets` the layouts in which the function gets those that are DTensors.
    """
    called = _on_each_rank(name, function, values, spec, targets, mesh)
    first, structure = next(iter(called.values()))
    placements = placements_of(first)
    inputs = [value for value in values if isinstance(value, Tensor)]
    with no_torch_function():
        empty = iter(empty_results([value for value in first if isinstance(value, ResultMeta)], inputs))
    results: list[Any] = []
    for index, (value, entry) in enumerate(zip(first, placements, strict=True)):
        result = next(empty) if isinstance(value, ResultMeta) else value
        if isinstance(value, ResultMeta) and entry is not None:
            shapes = {rank: leaves[index].shape for rank, (leaves, _) in called.items()}
            result = tag(result, layout_of_shards(shapes, mesh, list(entry)))
        results.append(result)
    return pytree.tree_unflatten(results, structure)


def _on_each_rank(
    name: str,
    function: Callable[..., Any],
    values: Sequence[Any],
    spec: pytree.TreeSpec,
    targets: Sequence[Layout | None],
    mesh: Mesh,
) -> dict[int, tuple[list[Any], pytree.TreeSpec]]:
    """Return the flat results on each rank of the mesh, with a `ResultMeta` for each tensor."""
    by_shapes: dict[tuple[Any, ...], tuple[list[Any], pytree.TreeSpec]] = {}
    called = {}
    for rank in mesh.ranks:
        shapes = tuple(None if target is None else target.local_shape(rank) for target in targets)
        if shapes not in by_shapes:
            try:
                by_shapes[shapes] = _call_on_fakes(function, values, spec, shapes)
            except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
                raise UnsupportedError(
                    f"{name}: rank {comm.rank()} is outside the mesh, where the results of local_map cannot be found "
                    f"without values ({error}). Call it only on ranks of the mesh (mesh.get_coordinate() is not None)"
                ) from error
        called[rank] = by_shapes[shapes]
    return called


def _call_on_fakes(
    function: Callable[..., Any], values: Sequence[Any], spec: pytree.TreeSpec, shapes: Sequence[Any]
) -> tuple[list[Any], pytree.TreeSpec]:
    from torch._subclasses.fake_tensor import FakeTensorMode  # slow to import, and needed only on these ranks

    with no_torch_function(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [
            _fake(mode, value, shape) if isinstance(value, Tensor) else value
            for value, shape in zip(values, shapes, strict=True)
        ]
        args, kwargs = pytree.tree_unflatten(fakes, spec)
        flat, structure = pytree.tree_flatten(function(*args, **kwargs))
    kinds = [
        ResultMeta(tuple(value.shape), value.dtype, value.device, value.requires_grad)
        if isinstance(value, Tensor)
        else value
        for value in flat
    ]
    return kinds, structure


def _fake(mode: Any, value: Tensor, shape: tuple[int, ...] | None) -> Tensor:
    if not isinstance(value, DTensorBase) or shape is None:
        fake: Tensor = mode.from_tensor(value)
        return fake
    empty = torch.empty(shape, dtype=value.dtype, device=value.device)
    return empty.requires_grad_(value.requires_grad)
