"""Scans along a sharded dimension: every rank scans its shard, starting from the totals of the shards before it.

Only the totals are communicated, one row per shard.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwright.tensor.base.registry import composite
from shardwright.tensor.base.tagging import no_torch_function, tag
from shardwright.tensor.redistribute.implicit import completed
from shardwright.tensor.rules.shared.shards import shards_of

__all__: list[str] = []

Total = Callable[[Tensor, int, Any], Tensor]


def _scan(name: str, total: Total, linear: bool = False) -> Callable[..., Any]:
    """Return a scan whose shards have a total: every shard continues from the totals before it."""
    scan: Any = getattr(torch, name)

    def compose(input: Any, dim: Any = None, *, dtype: Any = None) -> Any:
        shards = shards_of(input._layout, dim)
        if shards is None or (name == "logcumsumexp" and not (input.is_floating_point() or input.is_complex())):
            return NotImplemented
        input = completed(name, input if dtype is None else input.to(dtype), sums=linear)
        with no_torch_function():
            mine = total(input, shards.dim, dtype)
            totals = shards.gather(name, mine, entered=True).narrow(shards.dim, 0, shards.before())
            extended = torch.cat([totals, input.to(mine.dtype)], shards.dim)
            scanned = scan(extended, shards.dim) if dtype is None else scan(extended, shards.dim, dtype=dtype)
            own = scanned.narrow(shards.dim, totals.shape[shards.dim], input.shape[shards.dim])
            return tag(own.contiguous(), input._layout)

    return compose


composite("cumsum")(_scan("cumsum", lambda x, dim, dtype: x.sum(dim, keepdim=True, dtype=dtype), linear=True))
composite("cumprod")(_scan("cumprod", lambda x, dim, dtype: x.prod(dim, keepdim=True, dtype=dtype)))
composite("logcumsumexp")(_scan("logcumsumexp", lambda x, dim, _: x.logsumexp(dim, keepdim=True)))


def _extreme_scan(name: str) -> Callable[..., Any]:
    scan: Any = getattr(torch, name)

    def compose(input: Any, dim: Any = None) -> Any:
        shards = shards_of(input._layout, dim)
        if shards is None:
            return NotImplemented
        input = completed(name, input)
        with no_torch_function():
            size = input.shape[shards.dim]
            last = slice(max(size - 1, 0), size)
            values, indices = (
                result.movedim(shards.dim, 0)[last].movedim(0, shards.dim) for result in scan(input, shards.dim)
            )
            totals = shards.gather(name, values, entered=True).narrow(shards.dim, 0, shards.before())
            total_indices = shards.gather(name, indices + shards.start).narrow(shards.dim, 0, shards.before())
            scanned, positions = scan(torch.cat([totals, input], shards.dim), shards.dim)
            own = torch.arange(shards.start, shards.start + size, device=positions.device)
            own = own.reshape(-1, *[1] * (input.ndim - shards.dim - 1)).expand(input.shape)
            positions = torch.cat([total_indices, own], shards.dim).gather(shards.dim, positions)
            both = [t.narrow(shards.dim, totals.shape[shards.dim], size).contiguous() for t in (scanned, positions)]
            tagged = [tag(result, input._layout) for result in both]
        return getattr(torch.return_types, name)(tagged)

    return compose


composite("cummax")(_extreme_scan("cummax"))
composite("cummin")(_extreme_scan("cummin"))
