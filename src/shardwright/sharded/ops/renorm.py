"""`max_norm` of embeddings: scale rows in place, on the ranks that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from shardwright.sharded.base.tensor_base import ShardedTensorBase
from shardwright.sharded.ops.route import Route, deliver, spread

__all__ = ["renormalise"]


def renormalise(
    table: ShardedTensorBase,
    route: Route,
    shards: Sequence[Tensor],
    rows: Sequence[Tensor],
    max_norm: float,
    order: float,
) -> None:
    """Scale the rows that any rank looks up to at most `max_norm`, as torch's embeddings do.

    `rows` are those looked up in each shard. If columns are sharded, the norms of the pieces are sent to the ranks that
    look up the row, which return the scale; all of them compute the same.
    """
    widths = table._table.sizes[:, 1]
    with torch.no_grad():
        if ((widths == table.shape[1]) | (widths == 0)).all():
            for shard, looked_up in zip(shards, rows, strict=True):
                if shard.shape[1]:
                    torch.embedding_renorm_(shard, looked_up, max_norm, order)
            return
        pieces = [shard[looked_up] for shard, looked_up in zip(shards, rows, strict=True)]
        narrow, like = _one_column_per_piece(route, table), torch.empty(0, dtype=torch.float64, device=table.device)
        norms = [_norms(piece, order, like.dtype) for piece in pieces]
        norm = _combined(deliver(narrow, norms, like), narrow, order)
        scale = torch.where(norm > max_norm, max_norm / (norm + 1e-7), 1.0)
        scales, _ = spread(narrow, scale[:, None].expand(-1, narrow.columns))
        for shard, looked_up, piece, factor in zip(shards, rows, pieces, scales, strict=True):
            if shard.shape[1]:
                # A row that several ranks look up is written several times, with the same values.
                shard.index_copy_(0, looked_up, (piece * factor).to(shard.dtype))


def _one_column_per_piece(route: Route, table: ShardedTensorBase) -> Route:
    """Return a route that carries one number per piece of a row instead of its columns."""
    offsets, widths = table._table.offsets[:, 1], table._table.sizes[:, 1]
    starts = np.unique(offsets[widths > 0]).tolist()
    column = {start: number for number, start in enumerate(starts)}
    parts = [part._replace(first=column[part.first], last=column[part.first] + 1) for part in route.parts]
    slots = [slot._replace(width=min(slot.width, 1)) for slot in route.slots]
    return replace(route, columns=len(starts), parts=parts, slots=slots)


def _norms(piece: Tensor, order: float, dtype: torch.dtype) -> Tensor:
    if not piece.shape[1]:
        return piece.to(dtype)
    norms: Tensor = torch.linalg.vector_norm(piece, order, dim=1, keepdim=True, dtype=dtype)
    return norms


def _combined(norms: Tensor, route: Route, order: float) -> Tensor:
    """Return the norm of each row, given the norms of its pieces; 0 marks a missing piece."""
    if order == 0:
        return norms.sum(1)
    if order < 0:  # a minimum, for which the zeros of missing pieces matter
        absent = torch.ones_like(norms, dtype=torch.bool)
        for part in route.parts:
            absent[part.start : part.stop, part.first] = False
        norms = norms.masked_fill(absent, torch.inf)
    combined: Tensor = torch.linalg.vector_norm(norms, order, dim=1)
    return combined
