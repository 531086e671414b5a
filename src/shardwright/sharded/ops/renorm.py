"""Scaling down rows that are too long, in place, on the ranks that hold them: what `max_norm` asks for."""

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
    table: ShardedTensorBase, route: Route, shards: Sequence[Tensor], rows: Sequence[Tensor], most: float, order: float
) -> None:
    """Scales the rows that any rank looks up to the norm `most`, where theirs is larger, as torch's embeddings do.

    `rows` are those looked up in each shard. Where rows are cut by columns, the pieces' norms go to the ranks that ask
    for the row, which send back by how much it is scaled: every asker of a row finds the same.
    """
    widths = table._table.sizes[:, 1]
    with torch.no_grad():
        if ((widths == table.shape[1]) | (widths == 0)).all():
            for shard, ours in zip(shards, rows, strict=True):
                if shard.shape[1]:
                    torch.embedding_renorm_(shard, ours, most, order)
            return
        pieces = [shard[ours] for shard, ours in zip(shards, rows, strict=True)]
        narrow, like = _one_column_a_piece(route, table), torch.empty(0, dtype=torch.float64, device=table.device)
        norms = [_norms(piece, order, like.dtype) for piece in pieces]
        norm = _combined(deliver(narrow, norms, like), narrow, order)
        scale = torch.where(norm > most, most / (norm + 1e-7), 1.0)
        scales, _ = spread(narrow, scale[:, None].expand(-1, narrow.columns))
        for shard, ours, piece, factor in zip(shards, rows, pieces, scales, strict=True):
            if shard.shape[1]:
                # A row that several ranks ask for is written several times, with the same values.
                shard.index_copy_(0, ours, (piece * factor).to(shard.dtype))


def _one_column_a_piece(route: Route, table: ShardedTensorBase) -> Route:
    """The route by which one number goes with each piece of a row, in place of its columns."""
    offsets, widths = table._table.offsets[:, 1], table._table.sizes[:, 1]
    starts = np.unique(offsets[widths > 0]).tolist()
    place = {start: number for number, start in enumerate(starts)}
    parts = [part._replace(first=place[part.first], last=place[part.first] + 1) for part in route.parts]
    slots = [slot._replace(width=min(slot.width, 1)) for slot in route.slots]
    return replace(route, columns=len(starts), parts=parts, slots=slots)


def _norms(piece: Tensor, order: float, dtype: torch.dtype) -> Tensor:
    if not piece.shape[1]:
        return piece.to(dtype)
    found: Tensor = torch.linalg.vector_norm(piece, order, dim=1, keepdim=True, dtype=dtype)
    return found


def _combined(norms: Tensor, route: Route, order: float) -> Tensor:
    """The norm of each row from those of its pieces; where it has no piece, there is a zero."""
    if order == 0:
        return norms.sum(1)
    if order < 0:  # only here do zeros count: the norm is a kind of minimum
        absent = torch.ones_like(norms, dtype=torch.bool)
        for part in route.parts:
            absent[part.start : part.stop, part.first] = False
        norms = norms.masked_fill(absent, torch.inf)
    found: Tensor = torch.linalg.vector_norm(norms, order, dim=1)
    return found
