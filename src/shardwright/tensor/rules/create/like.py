"""Creation of tensors like others: `*_like` keeps the layout, `new_*` is replicated unless given placements."""

from __future__ import annotations

from typing import Any

from shardwright.layout import Layout
from shardwright.tensor.base.gradient_types import REPLICATE, without_entered
from shardwright.tensor.base.registry import rule
from shardwright.tensor.base.strategy import MeshStrategy, Operand

__all__: list[str] = []


@rule("zeros_like", "empty_like")
def _zeros_like(input: Operand, **_: Any) -> MeshStrategy:
    return MeshStrategy((input.layout,), (input.layout,))


@rule("ones_like", "full_like", numbers_by_type=True)
def _ones_like(input: Operand, *_: Any, **__: Any) -> MeshStrategy:
    """A nonzero constant: its sum over ranks would be wrong, so partial placements become replicated."""
    placements = [REPLICATE if p.is_partial() else p for p in without_entered(input.layout).placements]
    return MeshStrategy((input.layout,), (input.layout.replace(placements=placements, order=input.layout.order),))


@rule("new_empty_strided")
def _new_strided(input: Operand, size: Any, stride: Any, **_: Any) -> MeshStrategy:
    del stride
    mesh = input.layout.mesh
    return MeshStrategy((input.layout,), (Layout(mesh, [REPLICATE] * mesh.ndim, size),))


@rule("new_zeros", "new_ones", "new_empty", "new_full")
def _new(input: Operand, *size: Any, **kwargs: Any) -> MeshStrategy:
    shape = kwargs.get("size", size[0] if size and isinstance(size[0], list | tuple) else None)
    if shape is None:
        shape = size
    mesh = input.layout.mesh
    return MeshStrategy((input.layout,), (Layout(mesh, [REPLICATE] * mesh.ndim, shape),))
