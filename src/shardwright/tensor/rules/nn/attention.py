"""Attention: batch and heads are independent; queries too, with an explicit causal mask for their rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf, prod
from typing import Any

import torch

from shardwright.layout import Shard
from shardwright.tensor.base.registry import composite, rule
from shardwright.tensor.base.sequence_attention import sequence_attention
from shardwright.tensor.base.strategy import (
    Labels,
    Local,
    LocalContext,
    Operand,
    Strategies,
    Strategy,
    index_strategies,
)
from shardwright.tensor.base.tagging import tag_replicated

__all__: list[str] = []

HEADS, QUERIES = "heads", "queries"


@rule("scaled_dot_product_attention")
def _attention(
    query: Operand,
    key: Operand,
    value: Operand,
    attn_mask: Operand | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Strategies:
    """Keys and values are replicated along their sequence."""
    del dropout_p, scale
    operands = [operand for operand in (query, key, value, attn_mask) if operand is not None]
    above = -3 if enable_gqa else -2
    batch = torch.broadcast_shapes(  # type: ignore[no-untyped-call]  # untyped in torch
        *(operand.shape[:above] for operand in (query, key, value))
    )
    sizes = (*batch, *query.shape[above:-1], None)
    names: list[Any] = [*range(len(sizes) - 3), HEADS, QUERIES, None][-len(sizes) :]

    def labelled(operand: Operand, last: Labels) -> Labels:
        own = operand.shape[: operand.ndim - len(last)]
        labels = names[len(names) - operand.ndim : len(names) - len(last)]
        full = sizes[len(sizes) - operand.ndim : len(sizes) - len(last)]
        grouped = enable_gqa and operand in (key, value)
        return [
            label if size == wanted or (grouped and label == HEADS) else None
            for label, size, wanted in zip(labels, own, full, strict=True)
        ] + list(last)

    ins = [labelled(query, [QUERIES, None]), labelled(key, [None, None]), labelled(value, [None, "features"])]
    if attn_mask is not None:
        ins.append(labelled(attn_mask, [None]))
    at = index_strategies(operands, ins, [[*names[:-1], "features"]], terms=[[2]])
    if enable_gqa:
        at = _complete_groups(at, operands[:3], key.shape[-3])
    return Strategies(at, run=partial(_local_attention, is_causal=is_causal))


def _complete_groups(
    at: Callable[[int], list[Strategy]], operands: list[Operand], groups: int
) -> Callable[[int], list[Strategy]]:
    """Heads of queries and keys are sharded together only if every rank gets complete groups of both."""
    mesh = operands[0].layout.mesh

    def shards_heads(operand: Operand, mesh_dim: int) -> bool:
        placement = operand.layout.placements[mesh_dim]
        return placement.is_shard() and placement.dim == operand.ndim - 3  # type: ignore[attr-defined]  # shards have one

    def filtered(mesh_dim: int) -> list[Strategy]:
        head_mesh_dims = [m for m in range(mesh.ndim) if any(shards_heads(operand, m) for operand in operands)]
        divides = mesh_dim in head_mesh_dims and groups % prod(mesh.shape[m] for m in head_mesh_dims) == 0
        heads = operands[0].ndim - 3
        kept = []
        for strategy in at(mesh_dim):
            placement = strategy.ins[0]
            if not placement.is_shard(heads) or (divides and isinstance(placement, Shard)):
                kept.append(strategy)
        return kept

    return filtered


def _local_attention(context: LocalContext, is_causal: bool) -> Local | None:
    """Return a local call for ranks without queries, and for queries that start in the middle of a causal mask."""
    layout = context.ins[0]
    region = layout.region(context.rank)
    is_empty = 0 in context.outs[0].local_shape(context.rank)
    if not is_empty and not (is_causal and layout.cut_by(layout.ndim - 2)):
        return None

    def local(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        named = [kwargs[name] for name in ("query", "key", "value") if name in kwargs]
        query, key, value, *attn_mask = list(args) + named
        scale, grouped = kwargs.get("scale"), kwargs.get("enable_gqa", False)
        if is_empty:  # torch's result would not depend on the inputs: every rank has the same graph
            return _explicit_attention(
                query, key, value, attn_mask[0] if attn_mask else kwargs.get("attn_mask"), 0.0, scale, grouped
            )
        rows = torch.arange(region.offset[-2], region.offset[-2] + region.size[-2], device=query.device)
        causal_mask = rows[:, None] >= torch.arange(key.shape[-2], device=query.device)
        return func(query, key, value, causal_mask, scale=scale, enable_gqa=grouped)

    return local


@composite("scaled_dot_product_attention")
def _attention_composed(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Offer it to the function that computes attention on sharded sequences, if one is set.

    With dropout, compose: torch's kernel would draw different numbers on every rank.
    """
    over_sequences = sequence_attention()
    if over_sequences is not None:
        result = over_sequences(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if result is not NotImplemented:
            return result
    if dropout_p == 0:
        return NotImplemented
    if is_causal:
        attn_mask = _lower_triangle(query, key)
    return _explicit_attention(query, key, value, attn_mask, dropout_p, scale, enable_gqa)


def _explicit_attention(
    query: Any, key: Any, value: Any, mask: Any, dropout_p: float, scale: float | None, enable_gqa: bool
) -> Any:
    """Compute attention by its definition, on DTensors or local tensors."""
    if enable_gqa:
        key, value = (_repeat_heads(x, query.shape[-3] // max(x.shape[-3], 1)) for x in (key, value))
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if mask is None:
        weights = torch.softmax(scores, -1)
    else:
        scores = scores.masked_fill(mask.logical_not(), -inf) if mask.dtype is torch.bool else scores + mask
        # A fully masked query gives zeros, as in torch.
        fully_masked = (scores.detach() == -inf).all(dim=-1, keepdim=True)
        weights = torch.softmax(scores.masked_fill(fully_masked, 0.0), -1).masked_fill(fully_masked, 0.0)
    return torch.dropout(weights, dropout_p, dropout_p > 0) @ value


def _repeat_heads(heads: Any, times: int) -> Any:
    """Repeat every head `times` times, adjacent to each other."""
    wider = heads.unsqueeze(-3)
    return wider.expand(*wider.shape[:-3], times, *wider.shape[-2:]).flatten(-4, -3)


def _lower_triangle(query: Any, key: Any) -> Any:
    mesh, shape = query._layout.mesh, (query.shape[-2], key.shape[-2])
    mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril()
    return tag_replicated(mask, mesh)
