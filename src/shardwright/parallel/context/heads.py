"""Attention by heads: all-to-all exchanges give every rank whole sequences of some heads, and give the result back.

One exchange takes queries, keys and values together from shards of the sequence to shards of the heads, and another one
the result back. Each is the other's gradient. If there are fewer key heads than ranks, several ranks get the same one,
and their gradients of it are added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from shardwright import comm
from shardwright.parallel.context.gather import Ring, attend_blocks
from shardwright.parallel.context.mask import Mask

__all__ = ["HeadRanges", "attend_by_heads"]


@dataclass(frozen=True, slots=True)
class HeadRanges:
    """The query heads and the key heads that each rank computes.

    >>> HeadRanges.split(6, 2, 4)
    HeadRanges(queries=(range(0, 2), range(2, 4), range(4, 5), range(5, 6)), keys=(range(0, 1), range(0, 2), ...))
    """

    queries: tuple[range, ...]
    keys: tuple[range, ...]

    @classmethod
    def split(cls, query_heads: int, key_heads: int, ranks: int) -> HeadRanges:
        """Split heads as evenly as possible: by key heads if there is one for each rank, else by query heads."""
        group = query_heads // key_heads
        if key_heads >= ranks:
            keys = _even(key_heads, ranks)
            return cls(tuple(range(own.start * group, own.stop * group) for own in keys), keys)
        queries = _even(query_heads, ranks)
        return cls(queries, tuple(range(own.start // group, (own.stop - 1) // group + 1) for own in queries))


def _even(count: int, ranks: int) -> tuple[range, ...]:
    few, more = divmod(count, ranks)
    starts = [index * few + min(index, more) for index in range(ranks + 1)]
    return tuple(range(starts[index], starts[index + 1]) for index in range(ranks))


def attend_by_heads(query: Tensor, key: Tensor, value: Tensor, mask: Mask, ring: Ring, scale: float) -> Tensor:
    """Return the attention of this rank's queries to all keys, differentiably; tensors are as for `attend_blocks`.

    >>> q, k, v = torch.randn(3, 1, 2, 5, 4)
    >>> expected = scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> bool(torch.allclose(attend_by_heads(q, k, v, Mask(causal=True), Ring.alone(5, 5), 0.5), expected, atol=1e-6))
    True
    """
    ranges = HeadRanges.split(query.shape[1], key.shape[1], ring.group.size)
    there = _Exchange(ring.group, (ranges.queries, ranges.keys, ranges.keys), (ring.queries, ring.keys, ring.keys))
    back = _Exchange(ring.group, (ranges.queries,), (ring.queries,))
    queries, keys, values = _ToHeads.apply(there, query, key, value)  # type: ignore[no-untyped-call]  # torch's is untyped
    group = query.shape[1] // key.shape[1]
    own, own_keys = ranges.queries[ring.group.rank], ranges.keys[ring.group.rank]
    if len(own) != group * len(own_keys):  # a rank has some of the query heads that share a key head
        index = torch.tensor([head // group - own_keys.start for head in own], device=key.device)
        keys, values = keys.index_select(1, index), values.index_select(1, index)
    result = _attend(queries, keys, values, mask, scale)
    (returned,) = _ToSequence.apply(back, result)  # type: ignore[no-untyped-call]  # likewise
    attended: Tensor = returned
    return attended


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Mask, scale: float) -> Tensor:
    """Return the attention of whole sequences, by torch's kernels if they need no mask of all pairs."""
    if mask.is_simple and query.numel():
        grouped = query.shape[1] != key.shape[1]
        return scaled_dot_product_attention(query, key, value, is_causal=mask.causal, scale=scale, enable_gqa=grouped)
    return attend_blocks(query, key, value, mask, Ring.alone(query.shape[2], key.shape[2]), scale)


@dataclass(frozen=True, slots=True)
class _Exchange:
    """Tensors that are exchanged together: the heads of each rank on one side, its positions on the other."""

    group: comm.Group
    heads: tuple[tuple[range, ...], ...]  # of each tensor, by rank
    positions: tuple[tuple[range, ...], ...]

    def to_heads(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return this rank's heads at all positions, given all heads at its positions."""
        me, ranks = self.group.rank, range(self.group.size)
        sends = [
            _pack([each[:, own[peer].start : own[peer].stop] for each, own in zip(tensors, self.heads, strict=True)])
            for peer in ranks
        ]
        shapes = [[_shape(each, len(own[me]), len(at[peer])) for each, own, at in self._zip(tensors)] for peer in ranks]
        received = self._all_to_all(sends, shapes)
        return [torch.cat([pieces[index] for pieces in received], 2) for index in range(len(tensors))]

    def to_sequence(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return all heads at this rank's positions, given its own at all of them; those of several ranks add up."""
        me, ranks = self.group.rank, range(self.group.size)
        sends = [
            _pack([each[:, :, at[peer].start : at[peer].stop] for each, _, at in self._zip(tensors)]) for peer in ranks
        ]
        shapes = [[_shape(each, len(own[peer]), len(at[me])) for each, own, at in self._zip(tensors)] for peer in ranks]
        received = self._all_to_all(sends, shapes)
        results = []
        for index, (each, own, at) in enumerate(self._zip(tensors)):
            pieces = [parts[index] for parts in received]
            if all(own[peer].start == own[peer - 1].stop for peer in ranks[1:]):
                results.append(torch.cat(pieces, 1))
                continue
            total = each.new_zeros(_shape(each, max(heads.stop for heads in own), len(at[me])))
            for heads, piece in zip(own, pieces, strict=True):
                total[:, heads.start : heads.stop] += piece
            results.append(total)
        return results

    def _zip(self, tensors: Sequence[Tensor]) -> list[tuple[Tensor, tuple[range, ...], tuple[range, ...]]]:
        return list(zip(tensors, self.heads, self.positions, strict=True))

    def _all_to_all(self, sends: list[Tensor], shapes: list[list[tuple[int, ...]]]) -> list[list[Tensor]]:
        elements = [[prod(shape) for shape in of_peer] for of_peer in shapes]
        received = comm.all_to_all(sends, [(sum(counts),) for counts in elements], self.group)
        return [
            [piece.view(shape) for piece, shape in zip(torch.split(packed, counts), of_peer, strict=True)]
            for packed, counts, of_peer in zip(received, elements, shapes, strict=True)
        ]


def _pack(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _shape(tensor: Tensor, heads: int, positions: int) -> tuple[int, ...]:
    return (tensor.shape[0], heads, positions, tensor.shape[3])


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: _Exchange, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        return tuple(exchange.to_heads(tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_ToSequence.apply(ctx.exchange, *gradients)  # type: ignore[no-untyped-call]  # likewise


class _ToSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: _Exchange, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        return tuple(exchange.to_sequence(tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_ToHeads.apply(ctx.exchange, *gradients)  # type: ignore[no-untyped-call]  # likewise
