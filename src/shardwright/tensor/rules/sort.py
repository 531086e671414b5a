"""Order: sorting along a whole dimension, and looking values up in a sorted or an unsorted whole tensor."""

from __future__ import annotations

from typing import Any

from shardwright.tensor.registry import rule
from shardwright.tensor.rules.notation import Label, Labels, Operand, Ways, index_ways

__all__: list[str] = []


def _along(input: Operand, dim: int, results: int, keepdim: bool = True) -> Ways:
    place = input.dim(dim)
    labels: list[Label] = [None if d == place else d for d in range(input.ndim)]
    out = labels if keepdim else [label for label in labels if label is not None]
    return Ways(index_ways([input], [labels], [out] * results, reduction=None))


@rule("sort")
def _sort(input: Operand, dim: int = -1, *_: Any, **__: Any) -> Ways | None:
    return None if isinstance(dim, bool) else _along(input, dim, 2)


@rule("argsort")
def _argsort(input: Operand, dim: int = -1, *_: Any, **__: Any) -> Ways | None:
    return None if isinstance(dim, bool) else _along(input, dim, 1)


@rule("msort")
def _msort(input: Operand) -> Ways:
    return _along(input, 0, 1)


@rule("topk")
def _topk(input: Operand, k: int, dim: int = -1, *_: Any, **__: Any) -> Ways:
    del k
    return _along(input, dim, 2)


@rule("kthvalue")
def _kthvalue(input: Operand, k: int, dim: int = -1, keepdim: bool = False) -> Ways:
    del k
    return _along(input, dim, 2, keepdim)


@rule("isin")
def _isin(elements: Any, test_elements: Any, **_: Any) -> Ways | None:
    """Each element beside all of the others: only the elements may be cut."""
    operands = [value for value in (elements, test_elements) if isinstance(value, Operand)]
    if not isinstance(elements, Operand):
        return None
    labels = list(range(elements.ndim))
    ins: list[Labels] = [labels, *([None] * other.ndim for other in operands[1:])]
    return Ways(index_ways(operands, ins, [labels]))


@rule("bucketize")
def _bucketize(input: Any, boundaries: Operand, **_: Any) -> Ways | None:
    if not isinstance(input, Operand):
        return None
    labels = list(range(input.ndim))
    return Ways(index_ways([input, boundaries], [labels, [None]], [labels]))
