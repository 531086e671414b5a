"""Pairwise distances and renorm."""

from __future__ import annotations

from typing import Any

import torch

from shardwright.tensor.base.registry import composite, rule
from shardwright.tensor.base.strategy import Label, Local, Operand, Strategies, index_strategies
from shardwright.tensor.rules.matrix.linalg import batched

__all__: list[str] = []

MM_THRESHOLD = 25  # torch computes Euclidean distances by matrix products if there are more vectors than this


@rule("cdist")
def _cdist(x1: Operand, x2: Operand, p: float = 2.0, compute_mode: Any = None) -> Strategies | None:
    strategies = batched("mK,nK->mn", [x1, x2])
    automatic = compute_mode in (None, 0, "use_mm_for_euclid_dist_if_necessary")
    if strategies is None or p != 2.0 or not automatic:
        return strategies
    return Strategies(strategies.at, run=lambda _: _with_global_mode(max(x1.shape[-2], x2.shape[-2]) > MM_THRESHOLD))


def _with_global_mode(use_mm: bool) -> Local:
    """Return a local call that computes in the mode torch would choose for the global shape, not for the shard's."""
    name = "use_mm_for_euclid_dist" if use_mm else "donot_use_mm_for_euclid_dist"
    number = 1 if use_mm else 2

    def local(func: Any, args: Any, kwargs: Any) -> Any:
        mode = name if func is torch.cdist else number  # the Python function takes the mode as a string
        rest = {key: value for key, value in kwargs.items() if key != "compute_mode"}
        return func(*args[:3], **rest, compute_mode=mode)

    return local


@rule("pdist")
def _pdist(input: Operand, p: float = 2.0) -> Strategies | None:
    """Sharded along vector elements only if the distance is a sum over them."""
    if input.ndim != 2 or p != 1:
        return None
    return Strategies(index_strategies([input], [[None, "k"]], [[None]]))


@composite("dist")
def _dist(input: Any, other: Any, p: float = 2) -> Any:
    return torch.linalg.vector_norm(input - other, p)


@rule("renorm")
def _renorm(input: Operand, p: float, dim: int, maxnorm: float) -> Strategies:
    del p, maxnorm
    along = input.dim(dim)
    labels = list(range(input.ndim))
    whole: set[Label] = {d for d in labels if d != along}
    return Strategies(index_strategies([input], [labels], [labels], whole=whole), written_back=True)


@composite("renorm")
def _renorm_sharded(input: Any, p: float, dim: int, maxnorm: float) -> Any:
    others = [d for d in range(input.ndim) if d != dim % input.ndim]
    if not any(input._layout.cut_by(d) for d in others):
        return NotImplemented
    length = torch.linalg.vector_norm(input, p, others, keepdim=True)
    return input * torch.where(length > maxnorm, maxnorm / (length + 1e-7), torch.ones_like(length))
