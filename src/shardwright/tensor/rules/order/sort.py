"""Sorting, order statistics, and lookups in sorted or unsorted tensors.

Along a replicated dimension everything is local. A sharded dimension is exchanged for another that may be sharded;
if it is the only one, and long, it is sorted across ranks without gathering it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwright.tensor.base.registry import composite, rule
from shardwright.tensor.base.strategy import Label, Labels, Operand, Strategies, index_strategies
from shardwright.tensor.redistribute.implicit import completed, replicated
from shardwright.tensor.rules.order.distributed_sort import MIN_DISTRIBUTED, is_sortable, kth_element, sort_distributed
from shardwright.tensor.rules.order.extremes import kth_near_end
from shardwright.tensor.rules.shared.shards import Shards, flat_shards_of, shards_of

__all__: list[str] = []


def _along(input: Operand, dim: int, results: int, keepdim: bool = True) -> Strategies:
    axis = input.dim(dim)
    labels: list[Label] = [None if d == axis else d for d in range(input.ndim)]
    out = labels if keepdim else [label for label in labels if label is not None]
    return Strategies(index_strategies([input], [labels], [out] * results, reduction=None))


@rule("sort")
def _sort(input: Operand, dim: int = -1, *_: Any, **__: Any) -> Strategies | None:
    return None if isinstance(dim, bool) else _along(input, dim, 2)


@rule("argsort")
def _argsort(input: Operand, dim: int = -1, *_: Any, **__: Any) -> Strategies | None:
    return None if isinstance(dim, bool) else _along(input, dim, 1)


@rule("msort")
def _msort(input: Operand) -> Strategies:
    return _along(input, 0, 1)


@rule("topk")
def _topk(input: Operand, k: int, dim: int = -1, *_: Any, **__: Any) -> Strategies:
    del k
    return _along(input, dim, 2)


@rule("kthvalue")
def _kthvalue(input: Operand, k: int, dim: int = -1, keepdim: bool = False) -> Strategies:
    del k
    return _along(input, dim, 2, keepdim)


def _long_shards(input: Any, dim: Any) -> Shards | None:
    """Return the shards of a long, sortable 1-dimensional tensor; None if it is better gathered."""
    layout = input._layout
    if layout.ndim != 1 or layout.shape[0] < MIN_DISTRIBUTED or not is_sortable(input.dtype):
        return None
    return shards_of(layout, dim)


@composite("sort")
def _sort_long(input: Any, dim: Any = -1, descending: bool = False, stable: Any = False) -> Any:
    shards = _long_shards(input, dim)
    if shards is None:
        return NotImplemented
    return torch.return_types.sort(sort_distributed("sort", input, shards, descending))


@composite("argsort")
def _argsort_long(input: Any, dim: Any = -1, descending: bool = False, stable: Any = False) -> Any:
    shards = _long_shards(input, dim)
    return NotImplemented if shards is None else sort_distributed("argsort", input.detach(), shards, descending)[1]


@composite("msort")
def _msort_long(input: Any) -> Any:
    shards = _long_shards(input, 0)
    return NotImplemented if shards is None else sort_distributed("msort", input, shards, descending=False)[0]


@composite("kthvalue")
def _kthvalue_sharded(input: Any, k: Any, dim: Any = -1, keepdim: bool = False) -> Any:
    shards = shards_of(input._layout, dim)
    if shards is None or not isinstance(k, int) or not 0 < k <= input.shape[shards.dim]:
        return NotImplemented
    result = kth_near_end(input, k, shards, keepdim)
    if result is None and _long_shards(input, dim) is not None:
        result = _with_keepdim(kth_element("kthvalue", completed("kthvalue", input), shards, k - 1), keepdim)
    return NotImplemented if result is None else torch.return_types.kthvalue(result)


def _with_keepdim(result: tuple[Any, Any], keepdim: bool) -> tuple[Any, Any]:
    return (result[0].unsqueeze(0), result[1].unsqueeze(0)) if keepdim else result


def _median(name: str, ignores_nan: bool) -> Callable[..., Any]:
    def position(input: Any) -> int:
        """Return the position of the median: NaN comes last, and is the median unless ignored."""
        size: int = input.numel()
        nans = 0 if not input.is_floating_point() or input.is_meta else int(input.isnan().sum().item())
        if ignores_nan:
            return max(size - nans - 1, 0) // 2
        return size - nans if nans else (size - 1) // 2

    def global_median(input: Any) -> Any:
        shards = flat_shards_of(input._layout)
        if shards is None or input.numel() < MIN_DISTRIBUTED or not is_sortable(input.dtype):
            return NotImplemented
        input = completed(name, input)
        plain = input.detach()
        result = replicated(name, kth_element(name, plain, shards, position(plain))[0])
        if not (input.requires_grad and torch.is_grad_enabled()):
            return result
        # As in torch, all elements equal to the median share its gradient.
        hit = (plain == result) | (plain.isnan() & result.isnan())
        return (torch.where(hit, input, torch.zeros_like(plain)) / hit.sum()).sum()

    def compose(input: Any, dim: Any = None, keepdim: bool = False) -> Any:
        if dim is None:
            return global_median(input)
        shards = _long_shards(input, dim)
        if shards is None:
            return NotImplemented
        input = completed(name, input)
        result = _with_keepdim(kth_element(name, input, shards, position(input.detach())), keepdim)
        return getattr(torch.return_types, name)(result)

    return compose


composite("median")(_median("median", ignores_nan=False))
composite("nanmedian")(_median("nanmedian", ignores_nan=True))


@composite("mode")
def _mode(input: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return torch.mode(input, -1, keepdim) if dim is None else NotImplemented


@rule("isin")
def _isin(elements: Any, test_elements: Any, *, assume_unique: bool = False, invert: bool = False) -> Strategies | None:
    """True for an element in any shard of `test_elements`."""
    del assume_unique
    operands = [value for value in (elements, test_elements) if isinstance(value, Operand)]
    if not isinstance(elements, Operand):
        return None
    labels: Labels = [("element", d) for d in range(elements.ndim)]
    ins: list[Labels] = [labels, *(list(range(other.ndim)) for other in operands[1:])]
    return Strategies(index_strategies(operands, ins, [labels], reduction="band" if invert else "bor"))


@rule("bucketize")
def _bucketize(input: Any, boundaries: Operand, *, out_int32: bool = False, right: bool = False) -> Strategies | None:
    """The index among sharded boundaries is the sum of the indices in the shards."""
    del out_int32, right
    if not isinstance(input, Operand):
        return None
    labels = list(range(input.ndim))
    return Strategies(index_strategies([input, boundaries], [labels, ["boundary"]], [labels]))


@rule("searchsorted")
def _searchsorted(
    sorted_sequence: Operand,
    input: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Operand | None = None,
) -> Strategies | None:
    """Like `bucketize`, with one sequence per row or one for all."""
    del out_int32, right, side
    if not isinstance(input, Operand):
        return None
    batch = list(range(sorted_sequence.ndim - 1))
    ins: list[Labels] = [[*batch, "boundary"], [*batch, *(["value"] if input.ndim else [])]]
    if sorted_sequence.ndim == 1:
        ins[1] = [("value", d) for d in range(input.ndim)]
    operands = [sorted_sequence, input]
    if sorter is not None:
        ins.append(ins[0])
        operands.append(sorter)
    # A sorter indexes the complete sequence.
    whole: set[Label] = set() if sorter is None else {"boundary"}
    return Strategies(index_strategies(operands, ins, [ins[1]], whole=whole))
