"""Halo exchange: each rank gathers the window of a sharded tensor that its part of an operator reads.

Windows overlap, so they are not a layout; apart from that, this works like a redistribution: exactly the missing rows
are sent, from whichever rank holds them, and the backward applies the adjoint (gradients of halo rows are sent back to
their owner and added up), whose own backward gathers the halo again.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwright import comm
from shardwright.comm.packing import pack, unpack
from shardwright.errors import CommError
from shardwright.layout import Layout, Placement, Ragged, Region, Shard
from shardwright.tensor.base import divergence, policy, trace
from shardwright.tensor.base.capture import capture_call, is_capturing
from shardwright.tensor.redistribute.schedule import Message, Schedule

__all__ = ["Halo", "gather_halo"]


class Halo(NamedTuple):
    """A layout, and the window that each rank needs, in the mesh's order of ranks."""

    layout: Layout
    windows: tuple[Region, ...]

    def window(self, rank: int) -> Region:
        """Return the window of a rank."""
        return self.windows[self.layout.mesh.position(rank)]


def gather_halo(local: Tensor, halo: Halo, name: str) -> Tensor:
    """Return this rank's window, differentiably, for the operator of this name. Collective over the mesh."""
    rank = comm.rank()
    if not _communicates(halo) and halo.window(rank) == halo.layout.region(rank):
        return local
    if is_capturing():
        return capture_call(gather_halo, local, halo, name)  # type: ignore[no-any-return]  # it is this function's
    policy.check(name, [(halo.layout, _as_layout(halo))])
    if not (local.requires_grad and torch.is_grad_enabled()):
        return _gather(local, halo)
    window: Tensor = GatherHalo.apply(local, halo)  # type: ignore[no-untyped-call]  # torch's apply is untyped
    return window


class GatherHalo(torch.autograd.Function):
    """Gather windows from shards; the backward is `ReduceHalo`."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, halo: Halo) -> Tensor:
        ctx.halo = halo
        return _gather(local, halo)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ReduceHalo.apply(gradient, ctx.halo), None  # type: ignore[no-untyped-call]  # torch's apply is untyped


class ReduceHalo(torch.autograd.Function):
    """Reduce windows to shards, adding up rows that several ranks hold; the backward is `GatherHalo`."""

    @staticmethod
    def forward(ctx: Any, windowed: Tensor, halo: Halo) -> Tensor:
        ctx.halo = halo
        return _reduce(windowed, halo)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return GatherHalo.apply(gradient, ctx.halo), None  # type: ignore[no-untyped-call]  # torch's apply is untyped


def _gather(local: Tensor, halo: Halo) -> Tensor:
    rank = comm.rank()
    own, window, mine = halo.layout.region(rank), halo.window(rank), _schedule(halo, rank)
    _note(halo, mine.receives, local)
    out = torch.empty(window.size, dtype=local.dtype, device=local.device)
    if local.is_meta and not comm.is_simulated():
        return out
    plain = _plain(local)
    if mine.kept is not None:
        out[mine.kept.slices(window)] = plain[mine.kept.slices(own)]
    received = {message.peer: out.new_empty(message.volume) for message in mine.receives}
    _exchange(halo, {message.peer: pack(plain, own, message.boxes) for message in mine.sends}, received)
    for message in mine.receives:
        unpack(received[message.peer], out, window, message.boxes)
    return out


def _reduce(windowed: Tensor, halo: Halo) -> Tensor:
    rank = comm.rank()
    own, window, mine = halo.layout.region(rank), halo.window(rank), _schedule(halo, rank)
    _note(halo, mine.sends, windowed)
    out = torch.zeros(own.size, dtype=windowed.dtype, device=windowed.device)
    if windowed.is_meta and not comm.is_simulated():
        return out
    plain = _plain(windowed)
    if mine.kept is not None:
        out[mine.kept.slices(own)] = plain[mine.kept.slices(window)]
    received = {message.peer: out.new_empty(message.volume) for message in mine.sends}
    _exchange(halo, {message.peer: pack(plain, window, message.boxes) for message in mine.receives}, received)
    for message in mine.sends:
        parts = torch.split(received[message.peer], [box.volume for box in message.boxes])
        for box, part in zip(message.boxes, parts, strict=True):
            out[box.slices(own)] += part.view(box.size)
    return out


def _plain(tensor: Tensor) -> Tensor:
    """Return plain values: materialize zeros, conjugation and negation."""
    return tensor.clone() if tensor._is_zerotensor() else tensor.detach().resolve_conj().resolve_neg()


def _exchange(halo: Halo, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> None:
    if not _communicates(halo):
        return
    target = _as_layout(halo)
    divergence.check_same_program(halo.layout, target)
    everyone = comm.world()
    index = {rank: number for number, rank in enumerate(everyone.ranks)}
    try:
        comm.exchange(
            {index[peer]: tensor for peer, tensor in sends.items()},
            {index[peer]: tensor for peer, tensor in receives.items()},
            everyone,
        )
    except CommError as error:
        raise divergence.post_mortem(halo.layout, target, error) from None


def _note(halo: Halo, received: tuple[Message, ...], local: Tensor) -> None:
    if trace.current() is not None and _communicates(halo):
        volume = sum(message.volume for message in received) * local.element_size()
        trace.record_redistribution(halo.layout, _as_layout(halo), volume, torch._C._current_graph_task_id() != -1)


@lru_cache(maxsize=1024)
def _communicates(halo: Halo) -> bool:
    """Return whether any rank receives anything; the same on all ranks."""
    return any(_lacking(halo, rank) for rank in halo.layout.mesh.ranks)


@lru_cache(maxsize=1024)
def _as_layout(halo: Halo) -> Layout:
    """Return the windows side by side as a layout, for traces and error messages."""
    layout = halo.layout
    placements: list[Placement] = list(layout.placements)
    shape = list(layout.shape)
    for dim in range(layout.ndim):
        mesh_dims = layout.cut_by(dim)
        if not mesh_dims or not _communicates(halo):
            continue
        sizes = [0] * layout.mesh.shape[mesh_dims[0]]
        for rank in _along(layout, layout.mesh.ranks[0], mesh_dims):
            sizes[layout.mesh.coordinate(rank)[mesh_dims[0]]] += halo.window(rank).size[dim]
        placements[mesh_dims[0]], shape[dim] = Ragged(dim, sizes), sum(sizes)
    return Layout(layout.mesh, placements, shape, layout.order)


def _along(layout: Layout, rank: int, mesh_dims: tuple[int, ...]) -> list[int]:
    """Return the ranks that differ from this one along these mesh dimensions at most."""
    coordinate = layout.mesh.coordinate(rank)
    index = tuple(slice(None) if m in mesh_dims else coordinate[m] for m in range(layout.mesh.ndim))
    ranks: list[int] = layout.mesh.array[index].reshape(-1).tolist()
    return ranks


def _sharding_dims(layout: Layout) -> tuple[int, ...]:
    return tuple(m for m, placement in enumerate(layout.placements) if isinstance(placement, Shard | Ragged))


@lru_cache(maxsize=4096)
def _lacking(halo: Halo, rank: int) -> tuple[tuple[int, Region], ...]:
    """Return the boxes of a rank's window outside its own region, each with the rank that sends it.

    If several ranks hold a box, the sender is the one that differs from the receiver along sharding mesh dimensions
    only: replicas, and sets of partial values, exchange among themselves.
    """
    window, own = halo.window(rank), halo.layout.region(rank)
    if window.is_empty:
        return ()
    peers = set(_along(halo.layout, rank, _sharding_dims(halo.layout)))
    return tuple(
        (next(peer for peer in ranks if peer in peers), part)
        for box in ((window,) if own.is_empty else window.subtract(own))
        for part, ranks in halo.layout.holders(box)
    )


@lru_cache(maxsize=1024)
def _schedule(halo: Halo, rank: int) -> Schedule:
    """Return what a rank keeps, receives and sends. Pure, and without communication."""
    window, own = halo.window(rank), halo.layout.region(rank)
    kept = None if window.is_empty or own.is_empty else window.intersect(own)
    receives: dict[int, list[Region]] = {}
    for peer, box in _lacking(halo, rank):
        receives.setdefault(peer, []).append(box)
    sends: dict[int, list[Region]] = {}
    for peer in _along(halo.layout, rank, _sharding_dims(halo.layout)):
        for sender, box in _lacking(halo, peer):
            if sender == rank:
                sends.setdefault(peer, []).append(box)
    return Schedule(kept, _messages(receives), _messages(sends))


def _messages(boxes: dict[int, list[Region]]) -> tuple[Message, ...]:
    return tuple(Message(peer, tuple(of_peer)) for peer, of_peer in sorted(boxes.items()))
