"""Covariance, comparisons and combinations, composed of other operators."""

from __future__ import annotations

from typing import Any

import torch

from shardwright.layout import Shard
from shardwright.tensor.base.gradient_types import REPLICATE
from shardwright.tensor.base.registry import composite
from shardwright.tensor.base.tagging import DTensorBase, no_torch_function, tag, tag_replicated
from shardwright.tensor.dispatch.outside import is_outside
from shardwright.tensor.redistribute.implicit import completed, redistributed, replicated
from shardwright.tensor.rules.shared.shards import flat_shards_of

__all__: list[str] = []


@composite("nanmean")
def _nanmean(input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    if not input.is_floating_point():
        return NotImplemented
    count = input.detach().isnan().logical_not().sum(dim=dim, keepdim=keepdim)
    return input.nansum(dim=dim, keepdim=keepdim, dtype=dtype) / count


@composite("cov")
def _cov(input: Any, *, correction: int = 1, fweights: Any = None, aweights: Any = None) -> Any:
    weights = [weight for weight in (fweights, aweights) if weight is not None]
    weights = [completed("cov", weight) for weight in weights]
    if input.ndim not in (1, 2) or not (input.is_floating_point() or input.is_complex()) or not input.numel():
        return NotImplemented
    count = input.shape[-1]
    if any(weight.ndim != 1 or weight.shape[0] != count or not _is_positive(weight) for weight in weights):
        return NotImplemented  # torch raises the error
    rows = input.reshape(1, -1) if input.ndim == 1 else input
    degrees: Any = count - correction
    if not weights:
        centred = weighted = rows - rows.mean(1, keepdim=True)
    else:
        weight = weights[0] if len(weights) == 1 else weights[0] * weights[1]
        total = replicated("cov", weight.sum())
        factors = _match_dtype(rows, weight)
        centred = rows - (rows * factors).sum(1, keepdim=True) / total
        weighted = centred * factors
        ratio = 1 if aweights is None else replicated("cov", (weight * weights[-1]).sum()) / total
        degrees = total - correction * ratio
    products = replicated("cov", centred @ weighted.t().conj())
    if isinstance(degrees, int):
        return (products / max(degrees, 0)).squeeze()
    return (products / degrees.clamp(min=0)).squeeze()


def _match_dtype(rows: Any, weight: Any) -> Any:
    """Convert weights to the precision of the data; torch sums them in their own."""
    with no_torch_function():
        factors = weight.to(rows.real.dtype if rows.is_complex() else rows.dtype)
        return tag(factors.view_as(factors), weight._layout)


def _is_positive(weight: Any) -> bool:
    return weight.is_meta or not bool((weight < 0).any().item())


@composite("corrcoef")
def _corrcoef(input: Any) -> Any:
    products = torch.cov(input)
    if not isinstance(products, DTensorBase):
        return NotImplemented
    if products.ndim == 0:
        return products / products
    variance = products.diagonal()
    spread = (variance.real if products.is_complex() else variance).sqrt()
    coefficients = products / spread.unsqueeze(1) / spread.unsqueeze(0)
    if products.is_complex():
        return torch.complex(coefficients.real.clamp(-1, 1), coefficients.imag.clamp(-1, 1))
    return coefficients.clamp(-1, 1)


def _is_true(name: str, value: Any) -> bool:
    """True if the value is True everywhere, and on meta tensors."""
    result = replicated(name, value.all())
    return bool(result.is_meta or is_outside(result) or result.item())


@composite("equal")
def _equal(input: Any, other: Any) -> Any:
    if not isinstance(other, DTensorBase) or input.dtype != other.dtype:
        return NotImplemented
    return tuple(input.shape) == tuple(other.shape) and _is_true("equal", input == other)


@composite("allclose")
def _allclose(input: Any, other: Any, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> Any:
    return _is_true("allclose", torch.isclose(input, other, rtol=rtol, atol=atol, equal_nan=equal_nan))


@composite("combinations")
def _combinations(input: Any, r: int = 2, with_replacement: bool = False) -> Any:
    """Every rank builds its share of the result, which is much larger than the input."""
    shards = flat_shards_of(input._layout)
    if shards is None or input.ndim != 1 or r < 1 or input._layout.is_partial:
        return NotImplemented
    indices = torch.arange(input.shape[0])
    chosen = torch.combinations(indices, r, with_replacement).reshape(-1, r).to(input.device)
    mesh = input._layout.mesh
    replicated_indices = tag_replicated(chosen, mesh)
    placements = [Shard(0) if p.is_shard() else REPLICATE for p in input._layout.placements]
    return input[
        redistributed("combinations", replicated_indices, replicated_indices._layout.replace(placements=placements))
    ]


@composite("cartesian_prod")
def _cartesian_prod(*tensors: Any) -> Any:
    if any(tensor.ndim != 1 for tensor in tensors):
        return NotImplemented
    if len(tensors) == 1:
        return tensors[0].view_as(tensors[0])
    return torch.stack([grid.reshape(-1) for grid in torch.meshgrid(*tensors, indexing="ij")], dim=1)
