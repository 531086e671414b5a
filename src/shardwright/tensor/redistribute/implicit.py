"""Redistributions that an operator makes on its own: subject to the communication policy, and differentiable."""

from __future__ import annotations

from shardwright.layout import Layout
from shardwright.tensor.base import policy
from shardwright.tensor.base.gradient_types import REPLICATE
from shardwright.tensor.base.tagging import DTensorBase, no_torch_function, tag
from shardwright.tensor.redistribute.autograd import redistribute_local

__all__ = ["completed", "redistributed", "replicated"]


def completed(name: str, input: DTensorBase, *, sums: bool = False) -> DTensorBase:
    """Return the tensor with its partial values reduced; with `sums=True`, sums and averages stay partial."""
    source = input._layout
    placements = [
        REPLICATE if p.is_partial() and not (sums and (p.is_partial("sum") or p.is_partial("avg"))) else p
        for p in source.placements
    ]
    return redistributed(name, input, source.replace(placements=placements, order=source.order))


def replicated(name: str, input: DTensorBase) -> DTensorBase:
    """Return the tensor replicated on every rank."""
    return redistributed(name, input, input._layout.replace(placements=[REPLICATE] * input._layout.mesh.ndim))


def redistributed(name: str, input: DTensorBase, target: Layout) -> DTensorBase:
    """Return the tensor in another layout, differentiably."""
    if target is input._layout:
        return input
    policy.check(name, [(input._layout, target)])
    with no_torch_function():
        moved = redistribute_local(input, input._layout, target)
        result: DTensorBase = tag(moved.view_as(moved) if moved is input else moved, target)
        return result
