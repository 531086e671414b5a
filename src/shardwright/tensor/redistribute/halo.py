"""Rows from neighbours: each rank gets the window of a cut tensor that its part of an operator looks at.

Windows overlap, so this is no movement between layouts; else it is one: exactly the missing rows travel, wherever they
are, and the backward pass applies the adjoint (the gradients of borrowed rows go home and are added up), whose own
backward pass borrows again.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwright import comm
from shardwright.errors import CommError
from shardwright.layout import Layout, Placement, Ragged, Region, Shard
from shardwright.tensor.base import divergence, policy, trace
from shardwright.tensor.base.capture import as_step, is_recording
from shardwright.tensor.redistribute.packing import pack, unpack
from shardwright.tensor.redistribute.schedule import Message, Schedule

__all__ = ["Halo", "gather_halo"]


class Halo(NamedTuple):
    """A layout, and the window that each rank wants to see, in the mesh's order of ranks."""

    layout: Layout
    windows: tuple[Region, ...]

    def window(self, rank: int) -> Region:
        """What this rank wants."""
        return self.windows[self.layout.mesh.position(rank)]


def gather_halo(local: Tensor, halo: Halo, name: str) -> Tensor:
    """This rank's window, differentiably, for the operator of this name. All ranks of the mesh take part."""
    rank = comm.rank()
    if not _moves(halo) and halo.window(rank) == halo.layout.region(rank):
        return local
    if is_recording():
        return as_step(gather_halo, local, halo, name)  # type: ignore[no-any-return]  # it is this function's
    policy.check(name, [(halo.layout, _spelled(halo))])
    if not (local.requires_grad and torch.is_grad_enabled()):
        return _borrow(local, halo)
    widened: Tensor = GatherHalo.apply(local, halo)  # type: ignore[no-untyped-call]  # torch's apply is untyped
    return widened


class GatherHalo(torch.autograd.Function):
    """Own rows to windows; gradients of windows go home."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, halo: Halo) -> Tensor:
        ctx.halo = halo
        return _borrow(local, halo)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ReduceHalo.apply(gradient, ctx.halo), None  # type: ignore[no-untyped-call]  # torch's apply is untyped


class ReduceHalo(torch.autograd.Function):
    """Windows to own rows, what several ranks have of a row added up."""

    @staticmethod
    def forward(ctx: Any, windowed: Tensor, halo: Halo) -> Tensor:
        ctx.halo = halo
        return _give_back(windowed, halo)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return GatherHalo.apply(gradient, ctx.halo), None  # type: ignore[no-untyped-call]  # torch's apply is untyped


def _borrow(local: Tensor, halo: Halo) -> Tensor:
    rank = comm.rank()
    own, window, mine = halo.layout.region(rank), halo.window(rank), _schedule(halo, rank)
    _note(halo, mine.receives, local)
    out = torch.empty(window.size, dtype=local.dtype, device=local.device)
    if local.is_meta:
        return out
    plain = _plain(local)
    if mine.kept is not None:
        out[mine.kept.slices(window)] = plain[mine.kept.slices(own)]
    landed = {message.peer: out.new_empty(message.volume) for message in mine.receives}
    _exchange(halo, {message.peer: pack(plain, own, message.boxes) for message in mine.sends}, landed)
    for message in mine.receives:
        unpack(landed[message.peer], out, window, message.boxes)
    return out


def _give_back(windowed: Tensor, halo: Halo) -> Tensor:
    rank = comm.rank()
    own, window, mine = halo.layout.region(rank), halo.window(rank), _schedule(halo, rank)
    _note(halo, mine.sends, windowed)
    out = torch.zeros(own.size, dtype=windowed.dtype, device=windowed.device)
    if windowed.is_meta:
        return out
    plain = _plain(windowed)
    if mine.kept is not None:
        out[mine.kept.slices(own)] = plain[mine.kept.slices(window)]
    landed = {message.peer: out.new_empty(message.volume) for message in mine.sends}
    _exchange(halo, {message.peer: pack(plain, window, message.boxes) for message in mine.receives}, landed)
    for message in mine.sends:
        parts = torch.split(landed[message.peer], [box.volume for box in message.boxes])
        for box, part in zip(message.boxes, parts, strict=True):
            out[box.slices(own)] += part.view(box.size)
    return out


def _plain(tensor: Tensor) -> Tensor:
    """The numbers themselves, also where autograd has put off making them."""
    return tensor.clone() if tensor._is_zerotensor() else tensor.detach().resolve_conj().resolve_neg()


def _exchange(halo: Halo, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> None:
    if not _moves(halo):
        return
    target = _spelled(halo)
    divergence.compare_notes(halo.layout, target)
    everyone = comm.world()
    place = {rank: number for number, rank in enumerate(everyone.ranks)}
    try:
        comm.exchange(
            {place[peer]: tensor for peer, tensor in sends.items()},
            {place[peer]: tensor for peer, tensor in receives.items()},
            everyone,
        )
    except CommError as error:
        raise divergence.post_mortem(halo.layout, target, error) from None


def _note(halo: Halo, received: tuple[Message, ...], local: Tensor) -> None:
    if trace.current() is not None and _moves(halo):
        volume = sum(message.volume for message in received) * local.element_size()
        trace.note_redistribution(halo.layout, _spelled(halo), volume, torch._C._current_graph_task_id() != -1)


@lru_cache(maxsize=1024)
def _moves(halo: Halo) -> bool:
    """Whether any rank borrows anything: what all ranks must agree on."""
    return any(_lacking(halo, rank) for rank in halo.layout.mesh.ranks)


@lru_cache(maxsize=1024)
def _spelled(halo: Halo) -> Layout:
    """The windows side by side, as a layout says it: for those who read a trace, or a refusal."""
    layout = halo.layout
    placements: list[Placement] = list(layout.placements)
    shape = list(layout.shape)
    for dim in range(layout.ndim):
        cutting = layout.cut_by(dim)
        if not cutting or not _moves(halo):
            continue
        sizes = [0] * layout.mesh.shape[cutting[0]]
        for rank in _alongside(layout, layout.mesh.ranks[0], cutting):
            sizes[layout.mesh.coordinate(rank)[cutting[0]]] += halo.window(rank).size[dim]
        placements[cutting[0]], shape[dim] = Ragged(dim, sizes), sum(sizes)
    return Layout(layout.mesh, placements, shape, layout.order)


def _alongside(layout: Layout, rank: int, mesh_dims: tuple[int, ...]) -> list[int]:
    """The ranks that differ from this one along these mesh dimensions at most."""
    here = layout.mesh.coordinate(rank)
    where = tuple(slice(None) if m in mesh_dims else here[m] for m in range(layout.mesh.ndim))
    ranks: list[int] = layout.mesh.array[where].reshape(-1).tolist()
    return ranks


def _cutting(layout: Layout) -> tuple[int, ...]:
    return tuple(m for m, placement in enumerate(layout.placements) if isinstance(placement, Shard | Ragged))


@lru_cache(maxsize=4096)
def _lacking(halo: Halo, rank: int) -> tuple[tuple[int, Region], ...]:
    """What a rank's window has beyond its own region, each box with the rank it comes from.

    Where several ranks hold the same, each is served by the one that differs from it along cutting mesh dimensions
    only: replicas, and sets of addends, keep to themselves.
    """
    window, own = halo.window(rank), halo.layout.region(rank)
    if window.is_empty:
        return ()
    beside = set(_alongside(halo.layout, rank, _cutting(halo.layout)))
    return tuple(
        (next(peer for peer in ranks if peer in beside), part)
        for box in ((window,) if own.is_empty else window.subtract(own))
        for part, ranks in halo.layout.holders(box)
    )


@lru_cache(maxsize=1024)
def _schedule(halo: Halo, rank: int) -> Schedule:
    """What a rank keeps, receives and sends. Pure, and no rank needs another's word."""
    window, own = halo.window(rank), halo.layout.region(rank)
    kept = None if window.is_empty or own.is_empty else window.intersect(own)
    receives: dict[int, list[Region]] = {}
    for peer, box in _lacking(halo, rank):
        receives.setdefault(peer, []).append(box)
    sends: dict[int, list[Region]] = {}
    for peer in _alongside(halo.layout, rank, _cutting(halo.layout)):
        for giver, box in _lacking(halo, peer):
            if giver == rank:
                sends.setdefault(peer, []).append(box)
    return Schedule(kept, _messages(receives), _messages(sends))


def _messages(boxes: dict[int, list[Region]]) -> tuple[Message, ...]:
    return tuple(Message(peer, tuple(each)) for peer, each in sorted(boxes.items()))
