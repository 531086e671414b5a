"""Torch's flash attention for one block of keys, where it computes what `blocks` does: on CUDA, in half precision.

Its kernels return the log-sum-exp of each query, by which blocks are merged, and their backward takes that over all
blocks. They know only blocks of which every query sees everything, and causal ones whose queries are their own keys.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from shardwright.parallel.context.mask import Mask

__all__ = ["Seen", "flash_block", "flash_gradients", "seen_by_flash"]

Seen: TypeAlias = Literal["all", "causal"]

_MAX_FEATURES = 256
_HALF = (torch.bfloat16, torch.float16)


def seen_by_flash(query: Tensor, key: Tensor, value: Tensor, mask: Mask, queries: range, keys: range) -> Seen | None:
    """Return what the queries see of a block of keys; None if the kernels do not compute it.

    >>> rows = torch.ones(1, 1, 1, 2, 8)
    >>> seen_by_flash(rows, rows[:, 0], rows[:, 0], Mask(), range(2), range(2)) is None  # not on CUDA
    True
    """
    if not (query.is_cuda and query.dtype in _HALF and mask.is_simple and query.numel() and key.numel()):
        return None
    if query.shape[-1] != value.shape[-1] or query.shape[-1] > _MAX_FEATURES or query.shape[-1] % 8:
        return None
    if not mask.causal or keys.stop <= queries.start + 1:
        return "all"
    return "causal" if queries == keys else None


def flash_block(query: Tensor, key: Tensor, value: Tensor, seen: Seen, scale: float) -> tuple[Tensor, Tensor]:
    """Return the attention to one block of keys, and the log-sum-exp of each query; queries are in groups."""
    result = torch.ops.aten._scaled_dot_product_flash_attention(
        query.flatten(1, 2), key, value, 0.0, seen == "causal", False, scale=scale
    )
    out, lse = result[:2]
    return out.view(query.shape), lse.view(query.shape[:-1])


def flash_gradients(
    gradient: Tensor, out: Tensor, lse: Tensor, query: Tensor, key: Tensor, value: Tensor, seen: Seen, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values of one block, given the result over all blocks."""
    unused = torch.zeros(2, dtype=torch.uint64, device=query.device)  # the state of random numbers: there is no dropout
    first, second, third = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        gradient.flatten(1, 2).to(query.dtype),
        query.flatten(1, 2),
        key,
        value,
        out.flatten(1, 2),
        lse.flatten(1, 2),
        None,
        None,
        query.shape[-2],
        key.shape[-2],
        0.0,
        seen == "causal",
        unused,
        unused[:1],
        scale=scale,
    )
    return first.view(query.shape), second, third
