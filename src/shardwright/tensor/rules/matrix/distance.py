"""Distances between vectors, and vectors made no longer than they may be."""

from __future__ import annotations

from typing import Any

import torch

from shardwright.tensor.base.registry import composite, rule
from shardwright.tensor.base.strategy import Label, Local, Operand, Strategies, index_strategies
from shardwright.tensor.rules.matrix.linalg import batched

__all__: list[str] = []

BY_PRODUCTS = 25  # torch takes products of matrices for Euclid's distances where there are more vectors than this


@rule("cdist")
def _cdist(x1: Operand, x2: Operand, p: float = 2.0, compute_mode: Any = None) -> Strategies | None:
    strategies = batched("mK,nK->mn", [x1, x2])
    necessary = compute_mode in (None, 0, "use_mm_for_euclid_dist_if_necessary")
    if strategies is None or p != 2.0 or not necessary:
        return strategies
    return Strategies(strategies.at, run=lambda _: _as_whole(max(x1.shape[-2], x2.shape[-2]) > BY_PRODUCTS))


def _as_whole(by_products: bool) -> Local:
    """The local call, computed as torch would the whole: a rank's own part may be small enough for another manner."""
    name = "use_mm_for_euclid_dist" if by_products else "donot_use_mm_for_euclid_dist"
    number = 1 if by_products else 2

    def local(func: Any, args: Any, kwargs: Any) -> Any:
        mode = name if func is torch.cdist else number  # torch's own function in Python says it in words
        rest = {key: value for key, value in kwargs.items() if key != "compute_mode"}
        return func(*args[:3], **rest, compute_mode=mode)

    return local


@rule("pdist")
def _pdist(input: Operand, p: float = 2.0) -> Strategies | None:
    """Of all pairs: only where it is a sum over the vectors' elements can these be cut."""
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
def _renorm_cut(input: Any, p: float, dim: int, maxnorm: float) -> Any:
    others = [d for d in range(input.ndim) if d != dim % input.ndim]
    if not any(input._layout.cut_by(d) for d in others):
        return NotImplemented
    length = torch.linalg.vector_norm(input, p, others, keepdim=True)
    return input * torch.where(length > maxnorm, maxnorm / (length + 1e-7), torch.ones_like(length))
