"""Attention with keys and values gathered block by block: no rank ever holds all of them.

In step t a rank computes with the block of the rank t places before it, while the next one is received. A block goes
straight from its owner to a rank that needs it; ranks whose queries see none of its keys neither receive nor compute.
Backward gathers the blocks again, and sends the gradient of each to its owner.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardwright import comm
from shardwright.errors import UnsupportedError
from shardwright.parallel.context.blocks import Merged, add_block, block_gradients, grouped
from shardwright.parallel.context.mask import Mask, key_range

__all__ = ["Ring", "attend_blocks"]


@dataclass(frozen=True, slots=True)
class Ring:
    """The ranks among which a sequence is sharded, and the positions that each has of the queries and of the keys.

    >>> Ring.alone(4, 6).keys
    (range(0, 6),)
    """

    group: comm.Group
    queries: tuple[range, ...]
    keys: tuple[range, ...]

    @classmethod
    def alone(cls, queries: int, keys: int) -> Ring:
        """Return the ring of a rank that holds the whole sequence."""
        return cls(comm.subgroup([comm.world().global_rank]), (range(queries),), (range(keys),))

    def needs(self, rank: int, owner: int, mask: Mask) -> bool:
        """Return whether the queries of a rank see any key of an owner's block."""
        return bool(key_range(mask, self.queries[rank], self.keys[owner]))


def attend_blocks(query: Tensor, key: Tensor, value: Tensor, mask: Mask, ring: Ring, scale: float) -> Tensor:
    """Return the attention of this rank's queries to all keys, differentiably.

    Local tensors have the shape (batch, heads, positions, features); query heads are a multiple of key heads.

    >>> q, k, v = torch.randn(3, 1, 2, 5, 4)
    >>> expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> bool(torch.allclose(attend_blocks(q, k, v, Mask(causal=True), Ring.alone(5, 5), 0.5), expected, atol=1e-6))
    True
    """
    result: Tensor = _AttendBlocks.apply(query, key, value, mask, ring, scale)  # type: ignore[no-untyped-call]  # torch's is untyped
    return result


class _AttendBlocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Mask, ring: Ring, scale: float) -> Tensor:
        rows, own = grouped(query, key.shape[1]), ring.queries[ring.group.rank]
        merged = Merged.empty(rows, value.shape[-1])
        for owner, block in _blocks(ring, mask, key, value):
            if block is not None:
                add_block(merged, rows, *block, mask, own, ring.keys[owner], scale)
            del block  # before the next but one is received
        out = merged.out.flatten(1, 2).to(query.dtype)
        ctx.save_for_backward(query, key, value, out, merged.lse)
        ctx.mask, ctx.ring, ctx.scale = mask, ring, scale
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "attention with keys gathered block by block has no gradient of its gradient (create_graph=True): use "
                'ContextParallel("heads")'
            )
        query, key, value, out, lse = ctx.saved_tensors
        ring: Ring = ctx.ring
        rows, upper = grouped(query, key.shape[1]), grouped(gradient, key.shape[1])
        results = grouped(out, key.shape[1])
        delta = (results.to(lse.dtype) * upper).sum(-1)
        query_gradient = torch.zeros(rows.shape, dtype=lse.dtype, device=query.device)
        own = ring.queries[ring.group.rank]
        gradients = _BlockGradients(ring, ctx.mask, key, value, lse.dtype)
        for owner, block in _blocks(ring, ctx.mask, key, value):
            computed = None
            if block is not None:
                computed = block_gradients(
                    upper, results, delta, lse, rows, *block, ctx.mask, own, ring.keys[owner], ctx.scale, query_gradient
                )
            gradients.return_to(owner, computed)
            del block, computed
        key_gradient, value_gradient = gradients.finish()
        whole = query_gradient.flatten(1, 2).to(query.dtype)
        return whole, key_gradient.to(key.dtype), value_gradient.to(value.dtype), None, None, None


def _blocks(ring: Ring, mask: Mask, key: Tensor, value: Tensor) -> Iterator[tuple[int, tuple[Tensor, Tensor] | None]]:
    """Yield every rank and its block of keys and values, this one first; None for a block that is not needed here.

    The next block is received while the caller computes with one: at most two blocks of others exist at a time.
    """
    group, me = ring.group, ring.group.rank
    packed = _packed(key, value) if group.size > 1 else None

    def start(step: int) -> tuple[comm.Pending[None] | None, Tensor | None]:
        if step >= group.size:
            return None, None
        assert packed is not None
        owner, other = (me - step) % group.size, (me + step) % group.size
        sends = {other: packed} if ring.needs(other, me, mask) else {}
        receives = {}
        if ring.needs(me, owner, mask):
            elements = sum(prod(shape) for shape in _shapes(key, value, len(ring.keys[owner])))
            receives[owner] = torch.empty(elements, dtype=packed.dtype, device=packed.device)
        return comm.start_exchange(sends, receives, group), receives.get(owner)

    following = start(1)
    yield me, (key, value) if ring.needs(me, me, mask) else None
    for step in range(1, group.size):
        pending, buffer = following
        assert pending is not None
        pending.wait()
        following = start(step + 1)
        owner = (me - step) % group.size
        block = None if buffer is None else _unpacked(buffer, _shapes(key, value, len(ring.keys[owner])))
        del buffer, pending
        yield owner, block
        del block


class _BlockGradients:
    """The gradients of this rank's block of keys and values: its own share, and those that the others return to it."""

    def __init__(self, ring: Ring, mask: Mask, key: Tensor, value: Tensor, dtype: torch.dtype) -> None:
        self._ring, self._mask = ring, mask
        self._shapes = _shapes(key, value, key.shape[-2])
        self._total = torch.zeros(sum(map(prod, self._shapes)), dtype=dtype, device=key.device)
        self._pending: tuple[comm.Pending[None], Tensor | None] | None = None

    def return_to(self, owner: int, gradients: tuple[Tensor, Tensor] | None) -> None:
        """Send the gradients of an owner's block to it, and receive those of this rank's block from another."""
        ring, me = self._ring, self._ring.group.rank
        packed = None if gradients is None else _packed(*gradients)
        if owner == me:
            if packed is not None:
                self._total += packed
            return
        self._land()
        other = (2 * me - owner) % ring.group.size  # the one for which this rank is as far behind
        received = torch.empty_like(self._total) if ring.needs(other, me, self._mask) else None
        pending = comm.start_exchange(
            {} if packed is None else {owner: packed}, {} if received is None else {other: received}, ring.group
        )
        self._pending = pending, received

    def finish(self) -> tuple[Tensor, Tensor]:
        """Return the sums, of keys and of values."""
        self._land()
        return _unpacked(self._total, self._shapes)

    def _land(self) -> None:
        if self._pending is not None:
            pending, received = self._pending
            pending.wait()
            if received is not None:
                self._total += received
            self._pending = None


def _packed(first: Tensor, second: Tensor) -> Tensor:
    return torch.cat([first.reshape(-1), second.reshape(-1)])


def _unpacked(packed: Tensor, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> tuple[Tensor, Tensor]:
    first, second = shapes
    return packed[: prod(first)].view(first), packed[prod(first) :].view(second)


def _shapes(key: Tensor, value: Tensor, positions: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of keys and values of a block with so many positions."""
    first, second = ((*each.shape[:-2], positions, each.shape[-1]) for each in (key, value))
    return first, second
