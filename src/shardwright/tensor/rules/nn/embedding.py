"""Embedding: a rank that holds some rows of the table looks up those, and the result is a partial sum."""

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
        return None  # nn.functional's has more arguments; its body calls torch's, which takes the table first
    refuse_sparse("embedding", sparse)
    batch = list(range(indices.ndim))
    rows, columns = "rows", "columns"
    # Frequencies are of the global batch, but a rank counts only its shard.
    whole = {rows, *batch} if scale_grad_by_freq else set()
    at = index_strategies([weight, indices], [[rows, columns], batch], [[*batch, columns]], terms=[[0]], whole=whole)
    return Strategies(at, run=lambda context: _local_rows(context, weight.shape[0], padding_idx))


def refuse_sparse(name: str, sparse: bool) -> None:
    """Raise UnsupportedError if a sparse gradient is requested."""
    if sparse:
        raise UnsupportedError(
            f"{name}: sparse=True is not supported: a DTensor cannot hold a sparse gradient. Omit it; the gradient "
            "of a table sharded by rows is only as large as the shard"
        )


def _local_rows(context: LocalContext, count: int, padding_idx: int) -> Local | None:
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
        if not rows:  # still depends on the table: every rank has the same graph
            return weight.sum(0, dtype=weight.dtype).expand(*indices.shape, -1).clone()
        inside = (indices >= first) & (indices < first + rows)
        looked_up = torch.embedding(weight, torch.where(inside, indices - first, 0), padding)
        return looked_up.masked_fill(~inside.unsqueeze(-1), 0)

    return local


@rule("one_hot")
def _one_hot(input: Operand, num_classes: int = -1) -> Strategies | None:
    if num_classes == -1:
        return None
    labels: Labels = list(range(input.ndim))
    return Strategies(index_strategies([input], [labels], [[*labels, None]]), shapes=((*input.shape, num_classes),))


@composite("one_hot")
def _one_hot_of_max(input: Any, num_classes: int = -1) -> Any:
    """Without num_classes, it is the global maximum plus one."""
    if num_classes != -1 or 0 in input.shape:
        return NotImplemented
    return torch.nn.functional.one_hot(input, int(input.max().item()) + 1)
