"""Move regions of tensors between ranks: pack boxes, send them point to point or all-to-all, unpack them.

Redistribution of DTensors and transfers between ShardedTensors both run here; each has a planner that lists what this
rank sends and receives. Both ends of a message split its boxes in the same way, and a round ends before the next
begins, so ranks need no agreement and cannot deadlock. A single contiguous box is sent and received in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias, final

import torch
from torch import Tensor

from shardwright.comm.collectives import start_all_to_all
from shardwright.comm.exchange import start_exchange
from shardwright.comm.group import Group
from shardwright.comm.packing import bits
from shardwright.comm.rounds import in_rounds, split_region
from shardwright.layout import Region

__all__ = ["Part", "RegionTensor", "all_to_all_regions", "copy_region", "exchange_regions"]


@final
class RegionTensor:
    """A local tensor and the region of the global tensor that it holds; None means that it holds all of it.

    >>> RegionTensor(torch.arange(4), Region((2,), (4,))).at(Region((3,), (2,)))
    tensor([1, 2])
    """

    __slots__ = ("_data", "_frame", "tensor")

    def __init__(self, tensor: Tensor, frame: Region | None) -> None:
        self.tensor = tensor
        self._data = bits(tensor)
        self._frame = frame

    def at(self, region: Region) -> Tensor:
        """A view of this region, as integers of the dtype's width."""
        return self._data[region.slices(self._frame)]


class Part(NamedTuple):
    """A region to read from, or to write to, this local tensor."""

    region: Region
    tensor: RegionTensor

    def view(self) -> Tensor:
        """The elements of the region, as integers of the dtype's width."""
        return self.tensor.at(self.region)


Parts: TypeAlias = Mapping[int, Sequence[Part]]


def copy_region(region: Region, source: RegionTensor, target: RegionTensor) -> None:
    """Copy a region that this rank both holds and wants.

    >>> out = torch.zeros(2, dtype=torch.int64)
    >>> copy_region(Region((1,), (1,)), RegionTensor(torch.arange(4), None), RegionTensor(out, Region((0,), (2,))))
    >>> out
    tensor([0, 1])
    """
    target.at(region).copy_(source.at(region))


def exchange_regions(sends: Parts, receives: Parts, group: Group, *, splits: int, rounds: int) -> Callable[[], None]:
    """Send and receive parts point to point; the function returned waits for the last round.

    Keys are indices of peers in the group. Every part is split into at least `splits` boxes, unless it has fewer
    elements, and box i travels in round i modulo `rounds`. Peers must pass the same numbers.

    >>> from shardwright.comm import world
    >>> exchange_regions({}, {}, world(), splits=1, rounds=1)()
    """

    def begin(number: int) -> Callable[[], None]:
        packed: dict[tuple[tuple[Region, int], ...], Tensor] = {}  # what several peers want is packed once
        outgoing: dict[int, Tensor] = {}
        for peer, parts in sends.items():
            if chosen := _in_round(parts, splits, rounds, number):
                key = tuple((part.region, id(part.tensor)) for part in chosen)
                if key not in packed:
                    packed[key] = _packed(chosen)
                outgoing[peer] = packed[key]
        landings = {
            peer: _Landing(chosen)
            for peer, parts in receives.items()
            if (chosen := _in_round(parts, splits, rounds, number))
        }
        if not outgoing and not landings:
            return lambda: None
        pending = start_exchange(outgoing, {peer: landing.buffer for peer, landing in landings.items()}, group)

        def finish() -> None:
            pending.wait()
            for landing in landings.values():
                landing.unpack()

        return finish

    return in_rounds(rounds, begin, None)


def all_to_all_regions(sends: Parts, receives: Parts, like: Tensor, group: Group) -> Callable[[], None]:
    """Send and receive parts by one all-to-all of the group; the function returned waits for it.

    `like` has the dtype and the device of the tensors, for ranks that send nothing.

    >>> from shardwright.comm import world
    >>> all_to_all_regions({}, {}, torch.empty(0), world())()
    """
    empty = like.new_empty(0)
    outgoing = [_packed(sends[peer]) if sends.get(peer) else empty for peer in range(group.size)]
    sizes = [(sum(part.region.volume for part in receives.get(peer, ())),) for peer in range(group.size)]
    pending = start_all_to_all(outgoing, sizes, group)

    def finish() -> None:
        buffers = pending.wait()
        for peer, parts in receives.items():
            _unpack(buffers[peer], parts)

    return finish


class _Landing:
    """The buffer that receives a message: the target itself if it is one contiguous box, else memory to unpack."""

    __slots__ = ("_parts", "buffer")

    def __init__(self, parts: Sequence[Part]) -> None:
        first = parts[0].tensor.tensor
        view = parts[0].view()
        direct = len(parts) == 1 and view.is_contiguous()
        self._parts = () if direct else parts
        self.buffer = (
            view.view(-1).view(first.dtype) if direct else first.new_empty(sum(part.region.volume for part in parts))
        )

    def unpack(self) -> None:
        if self._parts:
            _unpack(self.buffer, self._parts)


def _in_round(parts: Sequence[Part], splits: int, rounds: int, number: int) -> list[Part]:
    return [Part(box, part.tensor) for part in parts for box in split_region(part.region, splits)[number::rounds]]


def _packed(parts: Sequence[Part]) -> Tensor:
    flat = [part.view().reshape(-1) for part in parts]
    return (flat[0] if len(flat) == 1 else torch.cat(flat)).view(parts[0].tensor.tensor.dtype)


def _unpack(buffer: Tensor, parts: Sequence[Part]) -> None:
    pieces = torch.split(bits(buffer), [part.region.volume for part in parts])
    for part, piece in zip(parts, pieces, strict=True):
        part.view().copy_(piece.view(part.region.size))
