"""Context-parallel attention of DTensors: lay them out, and compute on the local tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from shardwright import comm
from shardwright.errors import TensorError, UnsupportedError
from shardwright.layout import Layout, Placement, Replicate
from shardwright.parallel.context.gather import Ring, attend_blocks
from shardwright.parallel.context.heads import attend_by_heads
from shardwright.parallel.context.layouts import AttentionLayouts, attention_layouts, context_dim
from shardwright.parallel.context.mask import Mask
from shardwright.tensor.base.capture import is_capturing
from shardwright.tensor.base.copied import refuse_stale
from shardwright.tensor.base.sequence_attention import SequenceAttention
from shardwright.tensor.base.tagging import DTensorBase, alias, no_torch_function, tag
from shardwright.tensor.gradients.below_autograd import expect_plain_roots
from shardwright.tensor.redistribute.autograd import redistribute_local

__all__ = ["Mode", "attend", "scaled_dot_product_attention_by"]

Mode: TypeAlias = Literal["heads", "gather"]


def attend(mode: Mode, query: Any, key: Any, value: Any, mask: Mask, scale: float | None = None) -> Any:
    """Return the attention of DTensors whose sequences are sharded over `cp`, in the layout of the query.

    NotImplemented if the sequence of the queries is not sharded. Shapes are (batch, heads, positions, features); there
    may be fewer heads of keys and values than of queries, each for a group of adjacent query heads.
    """
    if not all(isinstance(each, DTensorBase) for each in (query, key, value)):
        return NotImplemented
    query, key, value = _cast((query, key, value))
    mesh = query._layout.mesh
    over, rank = context_dim(mesh), comm.rank()
    if over is None or rank not in mesh or {key._layout.mesh, value._layout.mesh} != {mesh}:
        return NotImplemented
    layouts = attention_layouts(query._layout, key._layout, value._layout, rank)
    if layouts is None or (mask.causal and query.shape[2] != key.shape[2]):
        return NotImplemented
    _check(mode, layouts, mesh.shape[over])
    for each in (query, key, value):
        refuse_stale("attention", each)
    with no_torch_function():
        rows, keys, values = (
            _local(each, target)
            for each, target in ((query, layouts.query), (key, layouts.key), (value, layouts.value))
        )
        ring = Ring(comm.group_along(mesh, over), layouts.query_positions, layouts.key_positions)
        own = replace(mask, padding=_rows(mask.padding, layouts), segments=_rows(mask.segments, layouts))
        if layouts.key_heads is not None:
            index = torch.tensor(layouts.key_heads, device=keys.device)
            keys, values = keys.index_select(1, index), values.index_select(1, index)
        compute = attend_by_heads if mode == "heads" else attend_blocks
        out = compute(rows, keys, values, own, ring, query.shape[-1] ** -0.5 if scale is None else float(scale))
        return tag(alias(out) if out.grad_fn is None else out, layouts.out)


def _cast(tensors: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
    """Return query, key and value in one dtype: that of autocast, if it is enabled, as for torch's operator."""
    kind = tensors[0].device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        first, second, third = (each.to(dtype) for each in tensors)
        return first, second, third
    dtypes = [each.dtype for each in tensors]
    if len(set(dtypes)) > 1:
        raise TensorError(f"attention: query, key and value must have the same dtype, got {dtypes}")
    return tensors


def _check(mode: Mode, layouts: AttentionLayouts, ranks: int) -> None:
    if is_capturing():
        raise UnsupportedError("sw.compile cannot capture context-parallel attention: compile other parts of the model")
    if mode == "heads" and layouts.fewest_heads < ranks:
        raise UnsupportedError(
            f'ContextParallel("heads"): {layouts.fewest_heads} heads of attention cannot be exchanged among {ranks} '
            'ranks along cp: use ContextParallel("gather"), or a cp of at most that many ranks'
        )


def _local(tensor: DTensorBase, target: Layout) -> Tensor:
    expect_plain_roots()
    moved = redistribute_local(tensor, tensor._layout, target)
    return moved.view_as(moved) if moved is tensor else moved


def _rows(values: Tensor | None, layouts: AttentionLayouts) -> Tensor | None:
    """Return the values of this rank's samples at all positions, as a plain tensor."""
    if values is None:
        return None
    if not isinstance(values, DTensorBase):
        raise UnsupportedError(
            "context-parallel attention: a mask must be a DTensor: pass it with the batch through sw.shard_batch"
        )
    mesh, shape = values._layout.mesh, values._layout.shape
    placements: Sequence[Placement] = layouts.rows
    if shape[0] == 1 and layouts.query.shape[0] != 1:
        placements = [Replicate()] * mesh.ndim
    return _local(values, Layout(mesh, placements, shape, layouts.query.order))


def scaled_dot_product_attention_by(mode: Mode) -> SequenceAttention:
    """Return a function with the arguments of `F.scaled_dot_product_attention`, for `attend_sequences_by`."""
    return partial(_scaled_dot_product_attention, mode)


def _scaled_dot_product_attention(
    mode: Mode,
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
    del enable_gqa  # heads that differ without it are an error of torch, which the rule raises
    if not isinstance(query, DTensorBase):
        return NotImplemented
    layout = query._layout
    over = context_dim(layout.mesh)
    if over is None or not layout.placements[over].is_shard(layout.ndim - 2):
        return NotImplemented
    refuse_dropout(dropout_p)
    if attn_mask is not None:
        raise UnsupportedError(
            f"context-parallel attention: an attn_mask of shape {tuple(attn_mask.shape)} would need all pairs of "
            "positions on every rank: use is_causal=True without a mask, or a mesh without cp"
        )
    return attend(mode, query, key, value, Mask(causal=is_causal), scale)


def refuse_dropout(probability: float) -> None:
    """Raise `UnsupportedError` if attention weights are to be dropped: every rank sees other pairs of positions."""
    if probability:
        raise UnsupportedError(
            f"context-parallel attention: dropout of attention weights ({probability}) is not supported: set it to 0 "
            "(attention_dropout or attn_pdrop in a config of transformers)"
        )
