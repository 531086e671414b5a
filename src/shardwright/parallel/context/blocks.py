"""Attention of a block of queries to blocks of keys, one after the other, with a running log-sum-exp.

The result of each block is weighted by the sum of its exponentials, so blocks can be merged in any order. Scores are
computed for a few rows at a time: no tensor of all pairs of positions exists. In backward the weights are computed
again from the log-sum-exp over all blocks.

Queries have the shape (batch, key heads, group, positions, features): the query heads of a group share a key head.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from shardwright.parallel.context.flash import flash_block, flash_gradients, seen_by_flash
from shardwright.parallel.context.mask import Mask, key_range, tile_mask

__all__ = ["Merged", "accumulation_dtype", "add_block", "block_gradients", "grouped"]

MAX_TILE_BYTES = 1 << 25  # of the scores that are computed at a time


class Merged(NamedTuple):
    """The attention to the blocks so far, and the logarithm of the sum of exponentials, for each query."""

    out: Tensor
    lse: Tensor

    @classmethod
    def empty(cls, query: Tensor, features: int) -> Merged:
        """Return the attention to no keys: zeros."""
        dtype, shape = accumulation_dtype(query.dtype), query.shape[:-1]
        out = torch.zeros((*shape, features), dtype=dtype, device=query.device)
        return cls(out, torch.full(shape, -inf, dtype=dtype, device=query.device))


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums are computed: at least float32.

    >>> accumulation_dtype(torch.bfloat16), accumulation_dtype(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.promote_types(dtype, torch.float32)


def grouped(query: Tensor, key_heads: int) -> Tensor:
    """Return a query (batch, heads, positions, features) with its heads in groups that share a key head."""
    group = query.shape[1] // key_heads if key_heads else 0
    return query.reshape(query.shape[0], key_heads, group, *query.shape[2:])


def add_block(
    merged: Merged, query: Tensor, key: Tensor, value: Tensor, mask: Mask, queries: range, keys: range, scale: float
) -> None:
    """Add the attention to one block of keys to `merged`, in place. `queries` and `keys` are their positions."""
    seen = seen_by_flash(query, key, value, mask, queries, keys)
    if seen is not None:
        block, block_lse = flash_block(query, key, value, seen, scale)
        both = torch.logaddexp(merged.lse, block_lse)
        merged.out.mul_((merged.lse - both).exp_().unsqueeze(-1))
        merged.out.addcmul_(block.to(merged.out.dtype), (block_lse - both).exp_().unsqueeze(-1))
        merged.lse.copy_(both)
        return
    for rows, columns in _tiles(query, mask, queries, keys):
        scores = _scores(query, key, mask, queries, keys, rows, columns, scale)
        own, before = slice(rows.start - queries.start, rows.stop - queries.start), merged.lse
        largest = scores.amax(-1, keepdim=True)
        largest.masked_fill_(largest == -inf, 0.0)
        weights = scores.sub_(largest).exp_()
        total = weights.sum(-1, keepdim=True)
        lse = (total.log() + largest).squeeze(-1)
        joined = torch.logaddexp(before[..., own], lse)
        reference = joined.masked_fill(joined == -inf, 0.0)
        values = _product(weights, _columns(value, keys, columns).to(weights.dtype))
        out = merged.out[..., own, :]
        out.mul_((before[..., own] - reference).exp_().unsqueeze(-1))
        out.addcmul_(values, (largest.squeeze(-1) - reference).exp_().unsqueeze(-1))
        before[..., own] = joined


def block_gradients(
    gradient: Tensor,
    out: Tensor,
    delta: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    queries: range,
    keys: range,
    scale: float,
    query_gradient: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of one block of keys and values, and add that of the queries to `query_gradient`.

    `out` is the result over all blocks, and `delta` the sum of it times its gradient, for each query.
    """
    dtype = query_gradient.dtype
    seen = seen_by_flash(query, key, value, mask, queries, keys)
    if seen is not None:
        own_gradient, *others = flash_gradients(gradient, out, lse, query, key, value, seen, scale)
        query_gradient += own_gradient
        return others[0].to(dtype), others[1].to(dtype)
    key_gradient = torch.zeros(key.shape, dtype=dtype, device=key.device)
    value_gradient = torch.zeros(value.shape, dtype=dtype, device=value.device)
    for rows, columns in _tiles(query, mask, queries, keys):
        own = slice(rows.start - queries.start, rows.stop - queries.start)
        scores = _scores(query, key, mask, queries, keys, rows, columns, scale)
        reference = lse[..., own, None]
        weights = scores.sub_(reference.masked_fill(reference == -inf, 0.0)).exp_()
        upper = gradient[..., own, :].to(dtype)
        _columns(value_gradient, keys, columns).add_(_gathered_product(weights, upper))
        change = _product(upper, _columns(value, keys, columns).to(dtype).transpose(-2, -1))
        change.sub_(delta[..., own, None]).mul_(weights).mul_(scale)
        query_gradient[..., own, :] += _product(change, _columns(key, keys, columns).to(dtype))
        _columns(key_gradient, keys, columns).add_(_gathered_product(change, query[..., own, :].to(dtype)))
    return key_gradient, value_gradient


def _tiles(query: Tensor, mask: Mask, queries: range, keys: range) -> Iterator[tuple[range, range]]:
    """Yield the positions of queries and keys to compute at a time, leaving out keys that none of the queries sees."""
    batch, heads, group = query.shape[:3]
    if not batch * heads * group:
        return
    row = batch * heads * group * max(len(keys), 1) * accumulation_dtype(query.dtype).itemsize
    rows = max(1, MAX_TILE_BYTES // row)
    for start in range(queries.start, queries.stop, rows):
        own = range(start, min(start + rows, queries.stop))
        columns = key_range(mask, own, keys)
        if columns:
            yield own, columns


def _scores(
    query: Tensor, key: Tensor, mask: Mask, queries: range, keys: range, rows: range, columns: range, scale: float
) -> Tensor:
    dtype = accumulation_dtype(query.dtype)
    own = query[..., rows.start - queries.start : rows.stop - queries.start, :].to(dtype)
    scores = _product(own * scale, _columns(key, keys, columns).to(dtype).transpose(-2, -1))
    visible = tile_mask(mask, rows, columns, query.device)
    return scores if visible is None else scores.masked_fill_(~visible, -inf)


def _columns(tensor: Tensor, keys: range, columns: range) -> Tensor:
    return tensor[..., columns.start - keys.start : columns.stop - keys.start, :]


def _product(rows: Tensor, matrix: Tensor) -> Tensor:
    """Multiply rows of all query heads of a group, (batch, heads, group, rows, n), by a matrix of their key head."""
    merged = rows.flatten(2, 3) @ matrix
    return merged.view(*rows.shape[:4], matrix.shape[-1])


def _gathered_product(rows: Tensor, others: Tensor) -> Tensor:
    """Return the products of the transposed rows with others, summed over the query heads of a group."""
    return rows.flatten(2, 3).transpose(-2, -1) @ others.flatten(2, 3)
