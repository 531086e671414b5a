"""The steps in which regions travel from rank to rank as they are: exchange and all-to-all.

Every pair of ranks cuts its boxes into the same rounds, and a round is over before the next begins, so ranks neither
need to agree on anything nor can wait for each other in a circle. A box that lies in one stretch of memory is neither
packed nor landed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shardwright import comm
from shardwright.layout import Region
from shardwright.tensor.redistribute.chunking import cut
from shardwright.tensor.redistribute.context import ExecutionContext, Finish, in_rounds
from shardwright.tensor.redistribute.packing import bits, pack, unpack
from shardwright.tensor.redistribute.schedule import Message, Schedule, held, schedule
from shardwright.tensor.redistribute.steps import AllToAll, Exchange

__all__ = ["exchange"]


def exchange(step: Exchange | AllToAll, local: Tensor, seat: ExecutionContext) -> Finish:
    """Begins to move exactly the missing regions."""
    mine = schedule(step.before, step.after, seat.rank)
    count = seat.rounds(step)
    want, have = held(step.after, seat.rank), held(step.before, seat.rank)
    shape = step.after.local_shape(seat.rank) if seat.rank in step.after.mesh else (0,) * max(1, step.after.ndim)
    out = torch.empty(shape, dtype=local.dtype, device=local.device)
    if mine.kept is not None and want is not None and have is not None:
        bits(out)[mine.kept.slices(want)] = bits(local)[mine.kept.slices(have)]
    if isinstance(step, AllToAll) and count == 1:
        group = seat.group(step.before.mesh, (step.mesh_dim,))
        return in_rounds(1, lambda _: _all_to_all(mine, local, out, have, want, group), out)
    group = seat.groups.everyone
    place = {message.peer: group.ranks.index(message.peer) for message in (*mine.sends, *mine.receives)}

    def begin(number: int) -> Callable[[], None]:
        packed: dict[tuple[Region, ...], Tensor] = {}
        sends: dict[int, Tensor] = {}
        for message in mine.sends:
            if boxes := _boxes(message, count, number):
                if boxes not in packed:
                    packed[boxes] = pack(local, have, boxes)
                sends[place[message.peer]] = packed[boxes]
        landings = [
            _Landing(out, want, boxes, place[message.peer])
            for message in mine.receives
            if (boxes := _boxes(message, count, number))
        ]
        pending = comm.start_exchange(sends, {landing.peer: landing.buffer for landing in landings}, group)

        def finish() -> None:
            pending.wait()
            for landing in landings:
                landing.unpack()

        return finish

    return in_rounds(_rounds(mine, count), begin, out)


class _Landing:
    """Where a message arrives: its place in the output, or a buffer to be unpacked from."""

    __slots__ = ("boxes", "buffer", "direct", "out", "peer", "want")

    def __init__(self, out: Tensor, want: Region | None, boxes: tuple[Region, ...], peer: int) -> None:
        self.boxes, self.out, self.want, self.peer = boxes, out, want, peer
        place = out[boxes[0].slices(want)]
        self.direct = len(boxes) == 1 and place.is_contiguous()
        self.buffer = place.view(-1) if self.direct else out.new_empty(sum(box.volume for box in boxes))

    def unpack(self) -> None:
        if not self.direct:
            unpack(self.buffer, self.out, self.want, self.boxes)


def _all_to_all(
    mine: Schedule, local: Tensor, out: Tensor, have: Region | None, want: Region | None, group: comm.Group
) -> Callable[[], None]:
    sends = {message.peer: pack(local, have, message.boxes) for message in mine.sends}
    sizes = {message.peer: (message.volume,) for message in mine.receives}
    empty = local.new_empty(0)
    pending = comm.start_all_to_all(
        [sends.get(peer, empty) for peer in group.ranks], [sizes.get(peer, (0,)) for peer in group.ranks], group
    )

    def finish() -> None:
        pieces = dict(zip(group.ranks, pending.wait(), strict=True))
        for message in mine.receives:
            unpack(pieces[message.peer], out, want, message.boxes)

    return finish


def _rounds(mine: Schedule, count: int) -> int:
    messages = (*mine.sends, *mine.receives)
    return max((len(cut(box, count)) for message in messages for box in message.boxes), default=0)


def _boxes(message: Message, count: int, number: int) -> tuple[Region, ...]:
    """What of the message travels in this round."""
    parts = (cut(box, count) for box in message.boxes)
    return tuple(part[number] for part in parts if number < len(part))
