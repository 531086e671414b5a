"""Order: sorting, single places of the order, and looking values up in a sorted or an unsorted tensor.

Along a whole dimension all of it is local. A dimension that is cut is exchanged for another that may be cut; where it
is the only one, and long, its order is agreed on where it lies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwright.tensor.base.registry import composite, rule
from shardwright.tensor.base.strategy import Label, Labels, Operand, Strategies, index_strategies
from shardwright.tensor.redistribute.implicit import completed, replicated
from shardwright.tensor.rules.order.distributed_sort import LONG, can_be_ordered, nth, order_long
from shardwright.tensor.rules.order.extremes import kth_of_few
from shardwright.tensor.rules.shared.pieces import Pieces, pieces_of, pieces_of_all

__all__: list[str] = []


def _along(input: Operand, dim: int, results: int, keepdim: bool = True) -> Strategies:
    place = input.dim(dim)
    labels: list[Label] = [None if d == place else d for d in range(input.ndim)]
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


def _long(input: Any, dim: Any) -> Pieces | None:
    """The pieces of the only dimension, where it is cut, and so long that its order is better agreed on than gathered.

    What is as long as that, but has no order that its bits tell, is gathered all the same.
    """
    layout = input._layout
    if layout.ndim != 1 or layout.shape[0] < LONG or not can_be_ordered(input.dtype):
        return None
    return pieces_of(layout, dim)


@composite("sort")
def _sort_long(input: Any, dim: Any = -1, descending: bool = False, stable: Any = False) -> Any:
    cut = _long(input, dim)
    if cut is None:
        return NotImplemented
    return torch.return_types.sort(order_long("sort", input, cut, descending))


@composite("argsort")
def _argsort_long(input: Any, dim: Any = -1, descending: bool = False, stable: Any = False) -> Any:
    cut = _long(input, dim)
    return NotImplemented if cut is None else order_long("argsort", input.detach(), cut, descending)[1]


@composite("msort")
def _msort_long(input: Any) -> Any:
    cut = _long(input, 0)
    return NotImplemented if cut is None else order_long("msort", input, cut, descending=False)[0]


@composite("kthvalue")
def _kthvalue_cut(input: Any, k: Any, dim: Any = -1, keepdim: bool = False) -> Any:
    cut = pieces_of(input._layout, dim)
    if cut is None or not isinstance(k, int) or not 0 < k <= input.shape[cut.dim]:
        return NotImplemented
    found = kth_of_few(input, k, cut, keepdim)
    if found is None and _long(input, dim) is not None:
        found = _shaped(nth("kthvalue", completed("kthvalue", input), cut, k - 1), keepdim)
    return NotImplemented if found is None else torch.return_types.kthvalue(found)


def _shaped(found: tuple[Any, Any], keepdim: bool) -> tuple[Any, Any]:
    return (found[0].unsqueeze(0), found[1].unsqueeze(0)) if keepdim else found


def _median(name: str, ignores_nan: bool) -> Callable[..., Any]:
    def which(input: Any) -> int:
        """The place of the median: what is no number comes last, and is the median unless it is ignored."""
        size: int = input.numel()
        strange = 0 if not input.is_floating_point() or input.is_meta else int(input.isnan().sum().item())
        if ignores_nan:
            return max(size - strange - 1, 0) // 2
        return size - strange if strange else (size - 1) // 2

    def of_all(input: Any) -> Any:
        cut = pieces_of_all(input._layout)
        if cut is None or input.numel() < LONG or not can_be_ordered(input.dtype):
            return NotImplemented
        input = completed(name, input)
        plain = input.detach()
        found = replicated(name, nth(name, plain, cut, which(plain))[0])
        if not (input.requires_grad and torch.is_grad_enabled()):
            return found
        # As torch has it, all elements that are equal to the median share its gradient.
        hit = (plain == found) | (plain.isnan() & found.isnan())
        return (torch.where(hit, input, torch.zeros_like(plain)) / hit.sum()).sum()

    def compose(input: Any, dim: Any = None, keepdim: bool = False) -> Any:
        if dim is None:
            return of_all(input)
        cut = _long(input, dim)
        if cut is None:
            return NotImplemented
        input = completed(name, input)
        found = _shaped(nth(name, input, cut, which(input.detach())), keepdim)
        return getattr(torch.return_types, name)(found)

    return compose


composite("median")(_median("median", ignores_nan=False))
composite("nanmedian")(_median("nanmedian", ignores_nan=True))


@composite("mode")
def _mode(input: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return torch.mode(input, -1, keepdim) if dim is None else NotImplemented


@rule("isin")
def _isin(elements: Any, test_elements: Any, *, assume_unique: bool = False, invert: bool = False) -> Strategies | None:
    """Each element beside all of the others; where those are cut, it is in if it is in any of the pieces."""
    del assume_unique
    operands = [value for value in (elements, test_elements) if isinstance(value, Operand)]
    if not isinstance(elements, Operand):
        return None
    labels: Labels = [("element", d) for d in range(elements.ndim)]
    ins: list[Labels] = [labels, *(list(range(other.ndim)) for other in operands[1:])]
    return Strategies(index_strategies(operands, ins, [labels], reduction="band" if invert else "bor"))


@rule("bucketize")
def _bucketize(input: Any, boundaries: Operand, *, out_int32: bool = False, right: bool = False) -> Strategies | None:
    """Of cut boundaries, a value lies behind so many in every piece, and behind the sum of those in all."""
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
    """As `bucketize`, with a sequence of its own for every row, or one for all."""
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
    # What sorts a sequence counts through all of it.
    whole: set[Label] = set() if sorter is None else {"boundary"}
    return Strategies(index_strategies(operands, ins, [ins[1]], whole=whole))
