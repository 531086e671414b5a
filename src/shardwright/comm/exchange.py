"""Point to point: the one primitive under the uneven collectives.

Bytes are moved, not numbers, so every dtype travels; empty tensors do not travel at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.comm.group import Group, world
from shardwright.comm.pending import Flight, Pending, explain
from shardwright.comm.traffic import report
from shardwright.errors import CollectiveArgumentError

__all__ = ["as_bytes", "dense", "exchange", "post", "start_exchange"]


def exchange(sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], group: Group | None = None) -> None:
    """Fills the buffers in `receives` with what those peers send, and sends them what is in `sends`.

    Keys are indices in the group. Only the named peers take part; each must send exactly the bytes the other
    expects. A tensor for oneself is copied. Buffers may be strided. Every order of calls is free of deadlock.

    >>> import torch
    >>> buffer = torch.zeros(2)
    >>> exchange({0: torch.ones(2)}, {0: buffer})
    >>> buffer
    tensor([1., 1.])
    """
    start_exchange(sends, receives, group).wait()


def start_exchange(
    sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], group: Group | None = None
) -> Pending[None]:
    """`exchange`, under way: the buffers are filled when `wait()` returns.

    >>> start_exchange({}, {}).wait()
    """
    group = group or world()
    _check_peers(sends, receives, group)
    me = group.rank
    outgoing = [(peer, dense(tensor)) for peer, tensor in sends.items() if peer != me]
    incoming: list[tuple[int, Tensor]] = []
    strided: list[tuple[Tensor, Tensor]] = []
    for peer, buffer in receives.items():
        if peer == me:
            buffer.detach().copy_(sends[me].detach())
        elif buffer.is_contiguous() and not (buffer.is_conj() or buffer.is_neg()):
            incoming.append((peer, buffer))
        else:
            landing = torch.empty(buffer.shape, dtype=buffer.dtype, device=buffer.device)
            incoming.append((peer, landing))
            strided.append((buffer, landing))
    if outgoing or incoming:
        report("exchange", sum(tensor.nbytes for _, tensor in incoming), group)
    flights = post(outgoing, incoming, group, "exchange")
    return Pending("exchange", group, flights, _scatter(strided, outgoing))


def _scatter(strided: list[tuple[Tensor, Tensor]], keep: object) -> Callable[[], None]:
    def finish() -> None:
        _ = keep  # what is being sent must outlive the sending
        for buffer, landing in strided:
            buffer.detach().copy_(landing)

    return finish


def _check_peers(sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], group: Group) -> None:
    for peer in (*sends, *receives):
        if not 0 <= peer < group.size:
            raise CollectiveArgumentError(f"exchange: peer {peer} is not in a group of {group.size} ranks")
    me = group.rank
    if (me in sends) != (me in receives):
        side = "send" if me in sends else "receive"
        raise CollectiveArgumentError(f"exchange: rank {group.ranks[me]} names itself in its {side}s only")
    if me in sends and (sends[me].shape != receives[me].shape or sends[me].dtype != receives[me].dtype):
        here, there = sends[me], receives[me]
        raise CollectiveArgumentError(
            f"exchange: rank {group.ranks[me]} sends itself {here.dtype} {list(here.shape)}, "
            f"but expects {there.dtype} {list(there.shape)}"
        )


def dense(tensor: Tensor) -> Tensor:
    """The tensor with its values laid out in memory one after the other, as they will travel."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a dense tensor, as a view.

    >>> import torch
    >>> as_bytes(torch.zeros(2, 3, dtype=torch.float8_e4m3fn)).shape
    torch.Size([6])
    """
    # A dense tensor of one element may have any stride, with which it cannot be seen as bytes.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def post(
    sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], group: Group, kind: str
) -> list[Flight]:
    """Starts moving dense tensors to and from peers, by index in the group; empty ones need no message."""
    sends = [(peer, as_bytes(tensor)) for peer, tensor in sends if tensor.numel()]
    receives = [(peer, as_bytes(tensor)) for peer, tensor in receives if tensor.numel()]
    everything = [*receives, *sends]
    if not everything:
        return []
    process_group = group.process_group
    device = everything[0][1].device
    if not group.moves(device):
        return _post_through_host(sends, receives, group, kind)
    if device.type != "cpu":
        # NCCL must be told of all of them at once, or two ranks that send first wait for each other.
        batch = [dist.P2POp(dist.irecv, data, group=process_group, group_peer=peer) for peer, data in receives]
        batch += [dist.P2POp(dist.isend, data, group=process_group, group_peer=peer) for peer, data in sends]
        return [Flight(work) for work in dist.batch_isend_irecv(batch)]
    flights = []
    for number, (peer, data) in enumerate(everything):
        try:
            if number < len(receives):
                work = dist.irecv(data, group=process_group, group_src=peer)
            else:
                work = dist.isend(data, group=process_group, group_dst=peer)
        except RuntimeError as error:
            raise explain(error, kind, group, peer) from error
        if work is not None:
            flights.append(Flight(work, peer))
    return flights


class _Landing:
    """A message that lands in host memory and is copied to its device when it is there."""

    def __init__(self, work: Flight, landing: Tensor, target: Tensor) -> None:
        self._work, self._landing, self._target = work, landing, target

    def wait(self) -> None:
        self._work.work.wait()
        self._target.copy_(self._landing)


class _Departure:
    """A message sent from host memory, which must outlive the sending."""

    def __init__(self, work: Flight, copy: Tensor) -> None:
        self._work, self._copy = work, copy

    def wait(self) -> None:
        self._work.work.wait()


def _post_through_host(
    sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], group: Group, kind: str
) -> list[Flight]:
    """gloo moves host memory only: tensors of a device are copied there and back."""
    departing = [(peer, data.cpu()) for peer, data in sends]
    landing = [(peer, torch.empty(data.shape, dtype=data.dtype)) for peer, data in receives]
    flights = post(departing, landing, group, kind)
    there = [
        Flight(_Landing(flight, buffer, target), flight.peer)
        for flight, (_, buffer), (_, target) in zip(flights, landing, receives, strict=False)
    ]
    back = [
        Flight(_Departure(flight, copy), flight.peer)
        for flight, (_, copy) in zip(flights[len(there) :], departing, strict=True)
    ]
    return there + back
