"""Point-to-point exchange, on which the uneven collectives are built.

Tensors are sent as bytes, so every dtype is supported; empty tensors are not sent. The tag of a message matches only
that of the same message of the same operation on the other rank, see ledger.py. Ranks of one host send them through
shared memory, see shared_memory.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.comm.flight import Flight, Work
from shardwright.comm.group import Group, world
from shardwright.comm.ledger import code, current_tensor, of_tensor, tag
from shardwright.comm.pending import Pending
from shardwright.comm.shared_memory import Introduction, SharedMemory, is_shareable, may_share
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


_PAYLOAD = code("payload")
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
    if number <= _INTRODUCED:
        _introduce(group, kind, number)
    return Operation(kind, of_tensor(code((kind, dtype, op)), tensor), number)


_INTRODUCED = 3  # the number of the first collective in which messages may go through shared memory


def _introduce(group: Group, kind: str, number: int) -> None:
    """Find out whether the ranks of a group share memory, in its first collectives; see shared_memory.py."""
    ledger = group.ledger
    if number == 1 and may_share(group.process_group):
        introduction = Introduction(group.rank, _timeout(group))
        replies = _tell(group, kind, number, introduction.hello())

        def answer() -> None:
            answers = _tell(group, kind, number + 1, introduction.answer(replies.wait()))

            def decide() -> None:
                ledger.shared, ledger.introducing = introduction.result(answers.wait()), None

            ledger.introducing = decide

        ledger.introducing = answer
    elif number > 1 and ledger.introducing is not None:
        ledger.introducing()


def _timeout(group: Group) -> float:
    """Return the timeout of the group's process group, in seconds."""
    backend: Any = group.process_group._get_backend(torch.device("cpu"))  # type: ignore[union-attr]  # there is one
    seconds: float = backend.options._timeout.total_seconds()
    return seconds


def _tell(group: Group, kind: str, number: int, what: bytes) -> Pending[dict[int, bytes]]:
    """Send some bytes to all other ranks, and receive as many from each."""
    data = torch.frombuffer(bytearray(what), dtype=torch.uint8)
    replies = {peer: torch.empty_like(data) for peer in range(group.size) if peer != group.rank}
    operation = Operation(kind, code("introduction"), number)
    flights = post([(peer, data) for peer in replies], list(replies.items()), group, operation)

    def finish() -> dict[int, bytes]:
        _ = data  # must stay alive until it is sent
        return {peer: bytes(reply.tolist()) for peer, reply in replies.items()}

    return Pending(kind, group, flights, finish, number)


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
    if number is not None and ledger.shared is not None:
        flights, sends, receives = _post_shared(sends, receives, group, operation, ledger.shared)
    else:
        flights = []
    failed = []
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


def _post_shared(
    sends: Sequence[tuple[int, Tensor]],
    receives: Sequence[tuple[int, Tensor]],
    group: Group,
    operation: Operation,
    shared: SharedMemory,
) -> tuple[list[Flight], list[tuple[int, Tensor]], list[tuple[int, Tensor]]]:
    """Start messages through shared memory; return them, and what is left to gloo because it is too large."""
    kind, number = operation.code, operation.number
    assert number is not None
    left: list[tuple[int, Tensor]] = []
    flights: list[Flight] = []
    places: dict[tuple[int, int], tuple[int, int]] = {}  # by address and size: what several ranks get is copied once
    for peer, data in sends:
        nbytes = data.nbytes
        if not is_shareable(nbytes):
            left.append((peer, data))
            continue
        key = data.data_ptr(), nbytes
        place = places.get(key)
        if place is None:
            readers = tuple(reader for reader, other in sends if (other.data_ptr(), other.nbytes) == key)
            place = places[key] = shared.put(data, readers)
        try:
            if not shared.send(peer, tag(number, kind, nbytes), place):
                flights.append(Flight(_Unsent(shared, peer), peer, number, nbytes, incoming=False))
            if place[0] < 0:  # there was no room
                assert group.process_group is not None
                work = group.process_group.send([data], peer, _payload_tag(number, kind, nbytes))
                flights.append(Flight(work, peer, number, nbytes, incoming=False))
        except RuntimeError as error:
            flights.append(Flight(_Failed(error), peer, number, nbytes, incoming=False))
    expected = [
        Flight(_Reading(shared, group, operation, peer, data), peer, number, data.nbytes)
        for peer, data in receives
        if is_shareable(data.nbytes)
    ]
    return [*expected, *flights], left, [(peer, data) for peer, data in receives if not is_shareable(data.nbytes)]


def _payload_tag(number: int, kind: int, nbytes: int) -> int:
    """Return the tag of a message that had no room in shared memory, and goes through gloo."""
    return tag(number, kind ^ _PAYLOAD, nbytes)


class _Reading:
    """A message in shared memory."""

    __slots__ = ("_group", "_operation", "_peer", "_shared", "_target")

    def __init__(self, shared: SharedMemory, group: Group, operation: Operation, peer: int, target: Tensor) -> None:
        self._shared, self._group, self._operation, self._peer, self._target = shared, group, operation, peer, target

    def wait(self) -> None:
        target, peer, (_, kind, number) = self._target, self._peer, self._operation
        assert number is not None
        if not self._shared.receive(peer, tag(number, kind, target.nbytes), target):
            assert self._group.process_group is not None
            payload = _payload_tag(number, kind, target.nbytes)
            self._group.process_group.recv([target], peer, payload).wait()


class _Unsent:
    """A note about a message for which the socket had no room yet."""

    def __init__(self, shared: SharedMemory, peer: int) -> None:
        self._shared, self._peer = shared, peer

    def wait(self) -> None:
        self._shared.flush(self._peer)


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
