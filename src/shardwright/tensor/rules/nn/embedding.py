"""Embedding: rows of a table by index. A rank that holds some of the rows looks up those, and the sum is the result."""

from __future__ import annotations

from typing import Any

import torch

from shardwright.errors import UnsupportedError
from shardwright.tensor.base.registry import composite, rule
from shardwright.tensor.base.strategy import Labels, Local, LocalContext, Operand, Strategies, index_strategies
from shardwright.tensor.rules.shared.index_range import check_range

__all__ = ["refuse_sparse"]


@rule("embedding")
def _embedding(
    weight: Operand,
    indices: Operand,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    **functional: Any,
) -> Strategies | None:
    if functional:
        return None  # nn.functional's has more arguments, and its body calls torch's, which names the table first
    refuse_sparse("embedding", sparse)
    batch = list(range(indices.ndim))
    rows, columns = "rows", "columns"
    # Frequencies are those of the whole batch, and a rank counts what it sees.
    whole = {rows, *batch} if scale_grad_by_freq else set()
    at = index_strategies([weight, indices], [[rows, columns], batch], [[*batch, columns]], terms=[[0]], whole=whole)
    return Strategies(at, run=lambda context: _rows(context, weight.shape[0], padding_idx))


def refuse_sparse(name: str, sparse: bool) -> None:
    """Refuses a gradient that only names the rows that were looked up."""
    if sparse:
        raise UnsupportedError(
            f"{name}: sparse=True asks for a sparse gradient, which a DTensor cannot hold: leave it out; the gradient "
            "of a table sharded by rows is no larger than the shard"
        )


def _rows(context: LocalContext, count: int, padding_idx: int) -> Local | None:
    layout = context.ins[0]
    if not layout.cut_by(0):
        return None
    region = layout.region(context.rank)
    first, rows = region.offset[0], region.size[0]
    padding = padding_idx - first if first <= padding_idx < first + rows else -1

    def local(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        weight = args[0] if args else kwargs["weight"]
        indices = args[1] if len(args) > 1 else kwargs["indices"]
        check_range("embedding", indices, count)
        if not rows:  # still a function of the table: every rank has the same graph
            return weight.sum(0, dtype=weight.dtype).expand(*indices.shape, -1).clone()
        inside = (indices >= first) & (indices < first + rows)
        found = torch.embedding(weight, torch.where(inside, indices - first, 0), padding)
        return found.masked_fill(~inside.unsqueeze(-1), 0)

    return local


@rule("one_hot")
def _one_hot(input: Operand, num_classes: int = -1) -> Strategies | None:
    if num_classes == -1:
        return None
    labels: Labels = list(range(input.ndim))
    return Strategies(index_strategies([input], [labels], [[*labels, None]]), shapes=((*input.shape, num_classes),))


@composite("one_hot")
def _one_hot_classes(input: Any, num_classes: int = -1) -> Any:
    """Without a number of classes, it is the largest index that counts, wherever it is."""
    if num_classes != -1 or 0 in input.shape:
        return NotImplemented
    return torch.nn.functional.one_hot(input, int(input.max().item()) + 1)
