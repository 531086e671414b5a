"""Send rows of a tensor to the ranks that want them: an uneven all-to-all exchange, whose gradient is the reverse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright import comm

__all__ = ["send_rows"]


def send_rows(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: comm.Group) -> Tensor:
    """Return the rows that all ranks send to this one, in rank order, differentiably.

    The first `sent[0]` rows go to the first rank, and so on; `received` are the numbers of rows from each.

    >>> send_rows(torch.ones(2, 3), [2], [2], comm.world()).shape
    torch.Size([2, 3])
    """
    result: Tensor = _SendRows.apply(rows, tuple(sent), tuple(received), group)  # type: ignore[no-untyped-call]  # torch's is untyped
    return result


class _SendRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: tuple[int, ...], received: tuple[int, ...], group: comm.Group) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        shapes = [(count, *rows.shape[1:]) for count in received]
        return torch.cat(comm.all_to_all(list(torch.split(rows, list(sent))), shapes, group))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        returned = _SendRows.apply(gradient, ctx.received, ctx.sent, ctx.group)  # type: ignore[no-untyped-call]  # likewise
        return returned, None, None, None
