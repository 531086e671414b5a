"""Steps that all ways to parallelize a model share: agree on the plan, and distribute a parameter."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from shardwright import comm
from shardwright.layout import Layout, Mesh
from shardwright.tensor import distribute_tensor

__all__ = ["agree_on_plan", "distribute_parameter"]

T = TypeVar("T")


def agree_on_plan(decide: Callable[[], T], mesh: Mesh, what: str) -> T:
    """Return what `decide` returns once all ranks of the mesh have decided the same; else raise on all of them."""
    if comm.rank() not in mesh or mesh.size == 1:
        return decide()

    def step() -> tuple[T, str]:
        decided = decide()
        return decided, f"model and plan {hashlib.blake2b(_text(decided).encode(), digest_size=8).hexdigest()}"

    return comm.agree(step, what=what, group=comm.subgroup(sorted(mesh.ranks)), same=True, unwrap=True)


def _text(decided: object) -> str:
    return " ".join(map(str, decided)) if isinstance(decided, tuple) else str(decided)


def distribute_parameter(parameter: nn.Parameter, mesh: Any, layout: Layout, src_data_rank: int | None = 0) -> Any:
    """Return the parameter as a DTensor, with the attributes that models and libraries have set on it."""
    distributed = distribute_tensor(parameter, mesh, layout.placements, order=layout.order, src_data_rank=src_data_rank)
    for name, value in parameter.__dict__.items():
        distributed.__dict__.setdefault(name, value)
    return distributed
