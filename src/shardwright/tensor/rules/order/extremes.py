"""Extremes along a sharded dimension: every rank finds its own, and only those are exchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwright import comm
from shardwright.layout import Layout
from shardwright.tensor.base.registry import composite
from shardwright.tensor.base.tagging import no_torch_function, tag, tag_replicated
from shardwright.tensor.redistribute.implicit import completed
from shardwright.tensor.rules.reduction.reduce import sharded_extreme
from shardwright.tensor.rules.shared.flat_index import global_flat_index
from shardwright.tensor.rules.shared.shards import Shards, flat_shards_of, reduced, shards_of

__all__ = ["kth_near_end"]


def _find_in_shard(find: Callable[[Tensor], Any], shard: Tensor, shards: Shards) -> tuple[Tensor, Tensor]:
    """Find in this rank's shard; return values and global indices. Empty shards give empty results."""
    if shard.shape[shards.dim]:
        values, indices = find(shard)
        return values, indices + shards.start
    return shard.view_as(shard), torch.empty(shard.shape, dtype=torch.long, device=shard.device)


def _tagged(values: Tensor, indices: Tensor, layout: Layout, dim: int, keepdim: bool) -> tuple[Any, Any]:
    """Tag both as DTensors, replicated along the dimension."""
    target = reduced(layout, dim, keepdim, values.shape[dim])
    both = (values, indices) if keepdim else (values.squeeze(dim), indices.squeeze(dim))
    return tag(both[0], target), tag(both[1], target)


def _extreme_along(name: str, input: Any, dim: Any, keepdim: bool) -> tuple[Any, Any] | None:
    """`max` or `min` along a sharded dimension; None if it is not sharded."""
    shards = shards_of(input._layout, dim)
    if shards is None or not input.shape[shards.dim]:
        return None
    input = completed(name, input)
    find: Any = getattr(torch, name)
    with no_torch_function():
        own, own_indices = _find_in_shard(lambda shard: find(shard, shards.dim, keepdim=True), input, shards)
        values, indices = shards.gather(name, own), shards.gather(name, own_indices)
        best, at = find(values, shards.dim, keepdim=True)
        return _tagged(best, indices.gather(shards.dim, at), input._layout, shards.dim, keepdim)


def _extreme(name: str) -> Callable[..., Any]:
    global_extreme = sharded_extreme(f"a{name}", select_nan=True)

    def compose(input: Any, other: Any = None, keepdim: bool = False, *, dim: Any = None) -> Any:
        over = other if dim is None else dim
        if over is None:
            return global_extreme(input)
        result = _extreme_along(name, input, over, keepdim)
        return NotImplemented if result is None else getattr(torch.return_types, name)(result)

    return compose


def _arg_extreme(name: str) -> Callable[..., Any]:
    def compose(input: Any, dim: Any = None, keepdim: bool = False) -> Any:
        if dim is None:
            return _flat_arg_extreme(name, input, keepdim)
        result = _extreme_along(name, input.detach(), dim, keepdim)
        return NotImplemented if result is None else result[1]

    return compose


for _name in ("max", "min"):
    composite(_name)(_extreme(_name))
    composite(f"arg{_name}")(_arg_extreme(_name))


def _flat_arg_extreme(name: str, input: Any, keepdim: bool) -> Any:
    """Return the flat index of the extreme of the global tensor; the first, if there are several."""
    input = completed(f"arg{name}", input.detach())
    layout = input._layout
    shards = flat_shards_of(layout)
    if shards is None or 0 in layout.shape:
        return NotImplemented
    find: Any = getattr(torch, name)
    with no_torch_function():
        local = input.reshape(-1)
        value, index = _find_in_shard(lambda shard: find(shard, 0, keepdim=True), local, shards)
        index = global_flat_index(index, layout.region(comm.rank()), layout.shape) if local.numel() else index
        values, indices = shards.gather(f"arg{name}", value), shards.gather(f"arg{name}", index)
        indices, order = indices.sort()
        result = indices[find(values[order], 0, keepdim=True)[1]]
    shape = (1,) * layout.ndim if keepdim else ()
    return tag_replicated(result.reshape(shape), layout.mesh)


@composite("aminmax")
def _aminmax(input: Any, *, dim: Any = None, keepdim: bool = False) -> Any:
    over = tuple(range(input.ndim)) if dim is None else dim
    both = (torch.amin(input, over, keepdim), torch.amax(input, over, keepdim))
    return torch.return_types.aminmax(both)


def _is_cheaper(layout: Layout, shards: Shards, rows: int) -> bool:
    """True if gathering this many rows per shard costs less than resharding along another dimension."""
    others = any(d != shards.dim and size >= len(shards.sizes) for d, size in enumerate(layout.shape))
    length = layout.shape[shards.dim]
    return sum(min(rows, size) for size in shards.sizes) < (length // len(shards.sizes) if others else length)


def _best_rows(name: str, input: Any, shards: Shards, rows: int, largest: bool) -> tuple[Tensor, Tensor]:
    """Return the best `rows` rows of all shards, in stable order, and their indices."""

    def find(shard: Tensor) -> Any:
        return shard.topk(min(rows, shard.shape[shards.dim]), shards.dim, largest)

    own, own_indices = _find_in_shard(find, input, shards)
    values, indices = shards.gather(name, own, rows), shards.gather(name, own_indices, rows)
    values, order = values.sort(stable=True, dim=shards.dim, descending=largest)
    return values.narrow(shards.dim, 0, rows), indices.gather(shards.dim, order).narrow(shards.dim, 0, rows)


@composite("topk")
def _topk(input: Any, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    del sorted  # always sorted
    shards = shards_of(input._layout, dim)
    if shards is None or not isinstance(k, int) or not 0 < k <= input.shape[shards.dim]:
        return NotImplemented
    if not _is_cheaper(input._layout, shards, k):
        return NotImplemented
    input = completed("topk", input)
    with no_torch_function():
        values, indices = _best_rows("topk", input, shards, k, largest)
        return torch.return_types.topk(_tagged(values, indices, input._layout, shards.dim, keepdim=True))


def kth_near_end(input: Any, k: int, shards: Shards, keepdim: bool) -> tuple[Any, Any] | None:
    """Return the k-th smallest along a sharded dimension if it is near an end; else None."""
    size = input.shape[shards.dim]
    largest = size - k + 1 < k
    rows = min(k, size - k + 1)
    if not _is_cheaper(input._layout, shards, rows):
        return None
    input = completed("kthvalue", input)
    with no_torch_function():
        values, indices = (
            t.narrow(shards.dim, rows - 1, 1) for t in _best_rows("kthvalue", input, shards, rows, largest)
        )
        return _tagged(values, indices, input._layout, shards.dim, keepdim)
