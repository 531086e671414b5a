"""Softmax and variants: a local call along a replicated dimension; two small reductions along a sharded one."""

from __future__ import annotations

from math import inf
from typing import Any

import torch

from shardwright.tensor.base.registry import composite, rule
from shardwright.tensor.base.strategy import Operand, Strategies, index_strategies
from shardwright.tensor.dispatch.cache import mark_fast

__all__: list[str] = []


@rule("softmax", "log_softmax", "softmin", "_safe_softmax")
def _softmax(input: Operand, dim: int | None = None, *_: Any, **__: Any) -> Strategies | None:
    if dim is None:
        return None
    labels = list(range(input.ndim))
    return Strategies(index_strategies([input], [labels], [labels], whole={input.dim(dim)}, reduction=None))


def _is_sharded(input: Any, dim: Any, dtype: Any) -> bool:
    """True if the dimension is sharded and the input has a softmax; otherwise the local call handles errors."""
    layout = input._layout
    if not (dtype or input.dtype).is_floating_point or 0 in layout.shape:
        return False
    return (
        bool(layout.ndim)
        and isinstance(dim, int)
        and any(layout.mesh.shape[mesh_dim] > 1 for mesh_dim in layout.cut_by(dim % layout.ndim))
    )


def _shifted(input: Any, dim: int, dtype: Any) -> Any:
    """Subtract the maximum along a sharded dimension: avoids overflow and leaves the gradient unchanged."""
    if isinstance(dtype, bool):  # aten's _softmax: whether to convert half precision to float
        dtype = torch.float32 if dtype else None
    input = input if dtype is None else input.to(dtype)
    peak = input.detach().amax(dim=dim, keepdim=True)
    return input - peak


@composite("softmax")
def _softmax_sharded(input: Any, dim: Any = None, dtype: Any = None, **_: Any) -> Any:
    if not _is_sharded(input, dim, dtype):
        return NotImplemented
    powers = _shifted(input, dim, dtype).exp()
    return powers / powers.sum(dim=dim, keepdim=True)


@composite("log_softmax")
def _log_softmax_sharded(input: Any, dim: Any = None, dtype: Any = None, **_: Any) -> Any:
    if not _is_sharded(input, dim, dtype):
        return NotImplemented
    shifted = _shifted(input, dim, dtype)
    return shifted - shifted.exp().sum(dim=dim, keepdim=True).log()


@composite("softmin")
def _softmin_sharded(input: Any, dim: Any = None, dtype: Any = None, **_: Any) -> Any:
    return torch.softmax(-input, dim, dtype) if _is_sharded(input, dim, dtype) else NotImplemented


@composite("_safe_softmax")
def _safe_softmax_sharded(input: Any, dim: Any = None, dtype: Any = None) -> Any:
    """Rows of only -inf give zeros."""
    if not _is_sharded(input, dim, dtype):
        return NotImplemented
    input = input if dtype is None else input.to(dtype)
    fully_masked = (input.detach() == -inf).all(dim=dim, keepdim=True)
    return torch.softmax(input.masked_fill(fully_masked, 0.0), dim).masked_fill(fully_masked, 0.0)


mark_fast("softmax", "log_softmax")
