"""Histograms and counts: every rank counts its shard, and the counts are partial sums.

If the bins depend on the values, the ranks first reduce their global range.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwright.layout import Partial
from shardwright.tensor.base.gradient_types import REPLICATE
from shardwright.tensor.base.registry import composite, rule
from shardwright.tensor.base.strategy import (
    Labels,
    Local,
    LocalContext,
    Operand,
    Strategies,
    Strategy,
    index_strategies,
)
from shardwright.tensor.base.tagging import DTensorBase, no_torch_function, tag
from shardwright.tensor.redistribute.implicit import completed, redistributed, replicated
from shardwright.tensor.rules.reduction.reduce import reduced_dims
from shardwright.tensor.rules.shared.shards import flat_shards_of

__all__: list[str] = []


def _with_edges(at: Callable[[int], list[Strategy]], edges: int) -> Callable[[int], list[Strategy]]:
    """Return the strategies of the counts, which are partial sums, with replicated bin edges."""
    return lambda mesh_dim: [
        strategy._replace(outs=(strategy.outs[0], *[REPLICATE] * edges)) for strategy in at(mesh_dim)
    ]


def _range_of(name: str, input: Any, dims: Sequence[int], margin: float) -> tuple[list[float], list[float]]:
    """Return minimum and maximum along these dimensions, widened by a margin where they are equal."""
    plain = input.detach()
    both = [replicated(name, bound) for bound in (plain.amin(dim=dims), plain.amax(dim=dims))]
    if input.is_meta:  # any range will do
        return [0.0] * both[0].numel(), [1.0] * both[0].numel()
    low, high = (bound.reshape(-1).tolist() for bound in both)
    equal = [a == b for a, b in zip(low, high, strict=True)]
    low = [a - margin if same else a for a, same in zip(low, equal, strict=True)]
    return low, [b + margin if same else b for b, same in zip(high, equal, strict=True)]


def _local_counts(context: LocalContext) -> Local:
    """Return the local call; on meta tensors, empty results of the right shapes."""

    def local(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if not args[0].is_meta:
            return func(*args, **kwargs)
        counts, *edges = (torch.empty(out.shape, dtype=args[0].dtype, device="meta") for out in context.outs)
        return (counts, tuple(edges))

    return local


def _is_sharded(*tensors: Any) -> bool:
    return any(isinstance(t, DTensorBase) and flat_shards_of(t._layout) is not None for t in tensors)


@rule("histc")
def _histc(input: Operand, bins: int = 100, min: float = 0, max: float = 0) -> Strategies | None:
    labels = list(range(input.ndim))
    whole: set[Any] = set(labels) if min == max else set()
    return Strategies(index_strategies([input], [labels], [[None]], whole=whole), shapes=((bins,),))


@composite("histc")
def _histc_sharded(input: Any, bins: int = 100, min: Any = 0, max: Any = 0) -> Any:
    if min != max or not _is_sharded(input) or not input.numel():
        return NotImplemented
    (low,), (high,) = _range_of("histc", input, list(range(input.ndim)), 1.0)
    return torch.histc(input, bins, low, high)


@rule("histogram")
def _histogram(
    input: Operand, bins: Any, *, range: Any = None, weight: Operand | None = None, density: bool = False
) -> Strategies:
    labels = [("element", d) for d, _ in enumerate(input.shape)]
    given = isinstance(bins, Operand)
    operands = [input, *([bins] if given else []), *([weight] if weight is not None else [])]
    ins: list[Labels] = [labels, *([[None]] if given else []), *([labels] if weight is not None else [])]
    whole: set[Any] = set() if (given or range is not None) and not density else set(labels)
    count = bins.shape[0] - 1 if given else bins
    at = _with_edges(index_strategies(operands, ins, [[None]], whole=whole), 1)
    return Strategies(at, run=_local_counts, shapes=((count,), (count + 1,)), fresh=False)


@composite("histogram")
def _histogram_sharded(input: Any, bins: Any, *, range: Any = None, weight: Any = None, density: bool = False) -> Any:
    if not _is_sharded(input, weight) or not input.numel():
        return NotImplemented
    if range is None and isinstance(bins, int):
        (low,), (high,) = _range_of("histogram", input, list(_range(input.ndim)), 0.5)
        return torch.histogram(input, bins, range=(low, high), weight=weight, density=density)
    if not density:
        return NotImplemented
    named = {"weight": weight} if range is None else {"weight": weight, "range": range}
    counts, edges = torch.histogram(input, bins, **named)
    return torch.return_types.histogram((counts / counts.sum() / edges.diff(), edges))


_range = range  # where `range` is a parameter


@rule("histogramdd")
def _histogramdd(
    input: Operand, bins: Any, range: Any = None, weight: Operand | None = None, density: bool = False
) -> Strategies:
    rows = [("element", d) for d in _range(input.ndim - 1)]
    per_dimension = [bins] * input.shape[-1] if isinstance(bins, int) else list(bins)
    given = [edges for edges in per_dimension if isinstance(edges, Operand)]
    operands = [input, *given, *([weight] if weight is not None else [])]
    ins: list[Labels] = [[*rows, None], *([[None]] * len(given)), *([rows] if weight is not None else [])]
    whole: set[Any] = set() if (given or range is not None) and not density else set(rows)
    counts = [edges.shape[0] - 1 if isinstance(edges, Operand) else edges for edges in per_dimension]
    shapes = (tuple(counts), *((count + 1,) for count in counts))
    at = _with_edges(index_strategies(operands, ins, [[None] * len(counts)], whole=whole), len(counts))
    return Strategies(at, run=_local_counts, shapes=shapes, fresh=False)


@composite("histogramdd")
def _histogramdd_sharded(input: Any, bins: Any, range: Any = None, weight: Any = None, density: bool = False) -> Any:
    if not _is_sharded(input, weight) or not input.numel() or input.ndim < 2:
        return NotImplemented
    by_count = isinstance(bins, int) or all(isinstance(count, int) for count in bins)
    if range is None and by_count:
        low, high = _range_of("histogramdd", input, list(_range(input.ndim - 1)), 0.5)
        span = [bound for both in zip(low, high, strict=True) for bound in both]
        return torch.histogramdd(input, bins, range=span, weight=weight, density=density)
    if not density:
        return NotImplemented
    counts, edges = torch.histogramdd(input, bins, range=range, weight=weight)
    densities = counts / counts.sum()
    for dim, dim_edges in enumerate(edges):
        densities = densities / dim_edges.diff().reshape([-1 if d == dim else 1 for d in _range(counts.ndim)])
    return torch.return_types.histogramdd((densities, edges))


@composite("bincount")
def _bincount(input: Any, weights: Any = None, minlength: int = 0) -> Any:
    """Reduce the maximum first; then every rank counts."""
    if input.ndim != 1 or not input.numel() or not _is_sharded(input, weights):
        return NotImplemented
    if weights is not None and tuple(weights.shape) != tuple(input.shape):
        return NotImplemented
    input = completed("bincount", input if _is_sharded(input) else redistributed("bincount", input, weights._layout))
    weights = weights if weights is None else redistributed("bincount", weights, input._layout)
    low, high = _range_of("bincount", input, [0], 0)
    if low[0] < 0:
        return NotImplemented  # torch raises the error
    layout = input._layout
    length = max(minlength, int(high[0]) + 1)
    with no_torch_function():
        if input.is_meta:
            counts = torch.empty(length, dtype=torch.long if weights is None else torch.float64, device="meta")
        elif input.numel():
            counts = torch.bincount(input, weights, length)
        else:  # torch ignores the dtype of empty weights
            dtype = torch.long if weights is None else torch.bincount(input.new_zeros(1), weights.new_zeros(1)).dtype
            counts = torch.zeros(length, dtype=dtype, device=input.device)
        placements = [Partial("sum") if p.is_shard() else p for p in layout.placements]
        return tag(counts, layout.replace(placements=placements, shape=(length,)))


@rule("hash_tensor")
def _hash_tensor(input: Operand, dim: Any = (), *, keepdim: bool = False, mode: int = 0) -> Strategies:
    """XOR of the elements' bits; its identity is 0, but torch rejects empty reductions."""
    del mode
    dims = reduced_dims(input, dim)
    labels: Labels = list(range(input.ndim))
    out: Labels = [None if d in dims else d for d in labels] if keepdim else [d for d in labels if d not in dims]

    def run(context: LocalContext) -> Local | None:
        size, shape = context.ins[0].local_shape(context.rank), context.outs[0].local_shape(context.rank)
        if all(size[d] for d in dims):
            return None
        return lambda _, args, kwargs: torch.zeros(shape, dtype=torch.uint64, device=args[0].device)

    whole: set[Any] = set(labels) if 0 in input.shape else set()
    return Strategies(index_strategies([input], [labels], [out], reduction="bxor", whole=whole), run=run)
