"""Triangles and diagonals of matrices."""

from __future__ import annotations

from typing import Any

from shardwright.tensor.registry import composite, rule
from shardwright.tensor.rules.notation import Label, Local, Operand, Situation, Ways, index_ways
from shardwright.tensor.rules.pick import first_tensor

__all__: list[str] = []


@rule("tril", "triu")
def _triangle(input: Operand, diagonal: int = 0) -> Ways:
    """A shard's own diagonal is the whole one, moved by where the shard begins."""

    def run(situation: Situation) -> Local:
        row, column = situation.ins[0].region(situation.rank).offset[-2:]
        return lambda func, args, kwargs: func(first_tensor(args, kwargs), diagonal + row - column)

    labels = list(range(input.ndim))
    return Ways(index_ways([input], [labels], [labels], terms=[[0]]), run=run if input.ndim > 1 else None)


def _drawn(input: Operand, dim1: int, dim2: int) -> Ways:
    drawn = (input.dim(dim1), input.dim(dim2))
    labels: list[Label] = [None if d in drawn else d for d in range(input.ndim)]
    out = [label for label in labels if label is not None]
    return Ways(index_ways([input], [labels], [[*out, None]], terms=[[0]], reduction=None), fresh=False)


@rule("diagonal")
def _diagonal(input: Operand, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Ways:
    del offset
    return _drawn(input, dim1, dim2)


@rule("linalg_diagonal")
def _linalg_diagonal(A: Operand, *, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Ways:  # noqa: N803  # torch's name
    del offset
    return _drawn(A, dim1, dim2)


@rule("diag_embed")
def _diag_embed(input: Operand, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Ways:
    del offset
    new = {dim1 % (input.ndim + 1), dim2 % (input.ndim + 1)}
    rest = iter(range(input.ndim))
    out: list[Label] = [None if d in new else next(rest) for d in range(input.ndim + 1)]
    labels: list[Label] = [*range(input.ndim - 1), None]
    return Ways(index_ways([input], [labels], [out], terms=[[0]], reduction=None))


@rule("diag", "diagflat")
def _diag(input: Operand, diagonal: int = 0, *, offset: int = 0) -> Ways:
    del diagonal, offset
    return Ways(index_ways([input], [[None] * input.ndim], [[]], terms=[[0]], reduction=None))


@composite("trace")
def _trace(input: Any) -> Any:
    return input.diagonal().sum() if input.ndim == 2 else NotImplemented
