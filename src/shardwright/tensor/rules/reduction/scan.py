"""Scans along a cut dimension: every rank scans its own piece, behind the totals of the pieces before it.

The totals of all pieces, a row each, are all that moves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwright.tensor.base.registry import composite
from shardwright.tensor.base.tagging import no_torch_function, tag
from shardwright.tensor.redistribute.implicit import completed
from shardwright.tensor.rules.shared.pieces import pieces_of

__all__: list[str] = []

Total = Callable[[Tensor, int, Any], Tensor]


def _scan(name: str, total: Total, linear: bool = False) -> Callable[..., Any]:
    """A scan by an operation of which every piece has a total: the scan goes on from the totals before it."""
    scan: Any = getattr(torch, name)

    def compose(input: Any, dim: Any = None, *, dtype: Any = None) -> Any:
        cut = pieces_of(input._layout, dim)
        if cut is None or (name == "logcumsumexp" and not (input.is_floating_point() or input.is_complex())):
            return NotImplemented
        input = completed(name, input if dtype is None else input.to(dtype), sums=linear)
        with no_torch_function():
            mine = total(input, cut.dim, dtype)
            ahead = cut.gathered(name, mine, entered=True).narrow(cut.dim, 0, cut.before())
            behind = torch.cat([ahead, input.to(mine.dtype)], cut.dim)
            scanned = scan(behind, cut.dim) if dtype is None else scan(behind, cut.dim, dtype=dtype)
            own = scanned.narrow(cut.dim, ahead.shape[cut.dim], input.shape[cut.dim])
            return tag(own.contiguous(), input._layout)

    return compose


composite("cumsum")(_scan("cumsum", lambda x, dim, dtype: x.sum(dim, keepdim=True, dtype=dtype), linear=True))
composite("cumprod")(_scan("cumprod", lambda x, dim, dtype: x.prod(dim, keepdim=True, dtype=dtype)))
composite("logcumsumexp")(_scan("logcumsumexp", lambda x, dim, _: x.logsumexp(dim, keepdim=True)))


def _extreme_scan(name: str) -> Callable[..., Any]:
    scan: Any = getattr(torch, name)

    def compose(input: Any, dim: Any = None) -> Any:
        cut = pieces_of(input._layout, dim)
        if cut is None:
            return NotImplemented
        input = completed(name, input)
        with no_torch_function():
            size = input.shape[cut.dim]
            last = slice(max(size - 1, 0), size)
            values, indices = (each.movedim(cut.dim, 0)[last].movedim(0, cut.dim) for each in scan(input, cut.dim))
            ahead = cut.gathered(name, values, entered=True).narrow(cut.dim, 0, cut.before())
            places = cut.gathered(name, indices + cut.start).narrow(cut.dim, 0, cut.before())
            found, where = scan(torch.cat([ahead, input], cut.dim), cut.dim)
            own = torch.arange(cut.start, cut.start + size, device=where.device)
            own = own.reshape(-1, *[1] * (input.ndim - cut.dim - 1)).expand(input.shape)
            where = torch.cat([places, own], cut.dim).gather(cut.dim, where)
            both = [t.narrow(cut.dim, ahead.shape[cut.dim], size).contiguous() for t in (found, where)]
            tagged = [tag(each, input._layout) for each in both]
        return getattr(torch.return_types, name)(tagged)

    return compose


composite("cummax")(_extreme_scan("cummax"))
composite("cummin")(_extreme_scan("cummin"))
