"""Point-to-point exchange, on which the uneven collectives are built.

Tensors are sent as bytes, so every dtype is supported; empty tensors are not sent. The tag of a message matches only
that of the same message of the same operation on the other rank, see ledger.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.comm.flight import Flight, Work
from shardwright.comm.group import Group, world
from shardwright.comm.ledger import code, current_tensor, of_tensor, tag
from shardwright.comm.pending import Pending
from shardwright.comm.traffic import report
from shardwright.errors import CollectiveArgumentError, CommError

__all__ = ["Operation", "as_bytes", "begin", "dense", "exchange", "post", "start_exchange"]


class Operation(NamedTuple):
    """The operation of a message: the kind of a collective and its number in the group.

    The number is None for `exchange`, whose messages are numbered per peer.
    """

    kind: str
    code: int
    number: int | None


_EXCHANGE = Operation("exchange", code("exchange"), None)


def begin(
    group: Group, kind: str, dtype: torch.dtype, *details: object, op: str = "", sent: dict[int, int] | None = None
) -> Operation:
    """Record the group's next collective. All arguments but `sent` must be the same on all ranks.

    `sent` is for collectives in which a rank knows only its own sizes: the bytes it sends, by peer.
    """
    tensor = current_tensor()
    if tensor:
        details = (*details, f"tensor {tensor} of its mesh")
    number = group.ledger.begin(kind, (dtype, *details, op), sent)
    return Operation(kind, of_tensor(code((kind, dtype, op)), tensor), number)


def exchange(sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], group: Group | None = None) -> None:
    """Send tensors to peers and receive into buffers, point to point.

    Keys are indices in the group. Only these peers take part; each must send exactly as many bytes as the other
    expects. A tensor for this rank itself is copied. Buffers may be strided. No order of calls can deadlock.

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
    """Start an asynchronous `exchange`: the buffers are filled when `wait()` returns.

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
    operation = _EXCHANGE._replace(code=of_tensor(_EXCHANGE.code, current_tensor()))
    flights = post(outgoing, incoming, group, operation)
    return Pending("exchange", group, flights, _scatter(strided, outgoing))


def _scatter(strided: list[tuple[Tensor, Tensor]], keep: object) -> Callable[[], None]:
    def finish() -> None:
        _ = keep  # must stay alive until it is sent
        for buffer, landing in strided:
            buffer.detach().copy_(landing)

    return finish


def _check_peers(sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], group: Group) -> None:
    for peer in (*sends, *receives):
        if not 0 <= peer < group.size:
            raise CollectiveArgumentError(f"exchange: peer {peer} is not in a group of {group.size} ranks")
    me = group.rank
    if (me in sends) != (me in receives):
        side = "sends" if me in sends else "receives"
        raise CollectiveArgumentError(f"exchange: rank {group.ranks[me]} lists itself only in its {side}")
    if me in sends and (sends[me].shape != receives[me].shape or sends[me].dtype != receives[me].dtype):
        here, there = sends[me], receives[me]
        raise CollectiveArgumentError(
            f"exchange: rank {group.ranks[me]} sends itself {here.dtype} {list(here.shape)}, "
            f"but expects {there.dtype} {list(there.shape)}"
        )


def dense(tensor: Tensor) -> Tensor:
    """Return the tensor with its values contiguous in memory, as they are sent."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def as_bytes(tensor: Tensor) -> Tensor:
    """View a dense tensor as bytes.

    >>> import torch
    >>> as_bytes(torch.zeros(2, 3, dtype=torch.float8_e4m3fn)).shape
    torch.Size([6])
    """
    # A dense tensor of one element may have any stride, which prevents viewing it as bytes.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def post(
    sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], group: Group, operation: Operation
) -> list[Flight]:
    """Start sending and receiving dense tensors, by index in the group; empty ones need no message.

    A lost peer is reported by the wait, not here: the others must still get their messages.
    """
    sends = [(peer, as_bytes(tensor)) for peer, tensor in sends if tensor.numel()]
    receives = [(peer, as_bytes(tensor)) for peer, tensor in receives if tensor.numel()]
    if not sends and not receives:
        return []
    device = (receives or sends)[0][1].device
    if group.simulated:
        if device.type != "meta":
            raise CommError(f"{operation.kind}: a simulated world has no ranks to send values to: pass meta tensors")
        return []
    if not group.moves(device):
        return _post_through_host(sends, receives, group, operation)
    process_group = group.process_group
    assert process_group is not None  # a group of one has no peers
    if device.type != "cpu":
        # NCCL must get all of them in one batch, or two ranks that send first wait for each other.
        batch = [dist.P2POp(dist.irecv, data, group=process_group, group_peer=peer) for peer, data in receives]
        batch += [dist.P2POp(dist.isend, data, group=process_group, group_peer=peer) for peer, data in sends]
        return [Flight(work) for work in dist.batch_isend_irecv(batch)]
    ledger, kind, number = group.ledger, operation.code, operation.number
    flights, failed = [], []
    for peer, data in receives:
        nth = ledger.receive(peer) if number is None else number
        try:
            work = process_group.recv([data], peer, tag(nth, kind, data.nbytes))
            flights.append(Flight(work, peer, nth, data.nbytes))
        except RuntimeError as error:
            failed.append(Flight(_Failed(error), peer, nth, data.nbytes))
    for peer, data in sends:
        nth = ledger.send(peer, data.nbytes) if number is None else number
        try:
            work = process_group.send([data], peer, tag(nth, kind, data.nbytes))
            flights.append(Flight(work, peer, nth, data.nbytes, incoming=False))
        except RuntimeError as error:
            failed.append(Flight(_Failed(error), peer, nth, data.nbytes, incoming=False))
    return [*failed, *flights] if failed else flights


class _Failed:
    """A message that could not be started."""

    def __init__(self, error: RuntimeError) -> None:
        self._error = error

    def wait(self) -> None:
        raise self._error


class _Landing:
    """A message received in host memory and copied to its device on arrival."""

    def __init__(self, work: Work, landing: Tensor, target: Tensor) -> None:
        self._work, self._landing, self._target = work, landing, target

    def wait(self) -> None:
        self._work.wait()
        self._target.copy_(self._landing)


class _Departure:
    """A message sent from host memory, which must stay alive until it is sent."""

    def __init__(self, work: Work, copy: Tensor) -> None:
        self._work, self._copy = work, copy

    def wait(self) -> None:
        self._work.wait()


def _post_through_host(
    sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], group: Group, operation: Operation
) -> list[Flight]:
    """Start sending and receiving device tensors through host memory: gloo supports no other."""
    flights: list[Flight] = []
    for peer, data in receives:
        landing = torch.empty(data.shape, dtype=data.dtype)
        posted = post([], [(peer, landing)], group, operation)
        flights += [replace(flight, work=_Landing(flight.work, landing, data)) for flight in posted]
    for peer, data in sends:
        copy = data.cpu()
        flights += [
            Flight(_Departure(flight.work, copy), peer) for flight in post([(peer, copy)], [], group, operation)
        ]
    return flights
