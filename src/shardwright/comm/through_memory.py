"""One collective through shared memory: pieces are copied in from where they are, and read where they are.

Neither a send buffer nor a receive buffer is needed, and a piece may be strided: what is received is a view of the
sender's memory until the collective is finished.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

from shardwright.comm.exchange import Failed, Operation, Unsent
from shardwright.comm.flight import Flight
from shardwright.comm.group import Group
from shardwright.comm.ledger import tag
from shardwright.comm.packing import bits
from shardwright.comm.shared_memory import SharedMemory, is_shareable
from shardwright.comm.simulate import device_type

__all__ = ["Form", "ThroughMemory", "forms_of", "may_go_through_memory"]

_ALIGNMENT = 64


class Form(NamedTuple):
    """The shape and dtype of a piece."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of its elements.

        >>> Form((2, 3), torch.float32).nbytes
        24
        """
        return math.prod(self.shape) * self.dtype.itemsize


def forms_of(pieces: Sequence[Tensor]) -> list[Form]:
    """Return the shapes and dtypes of pieces.

    >>> forms_of([torch.ones(2)])
    [Form(shape=(2,), dtype=torch.float32)]
    """
    return [Form(tuple(piece.shape), piece.dtype) for piece in pieces]


def _span(forms: Sequence[Form]) -> int:
    """Return the bytes of a message with these pieces, each aligned."""
    return sum(-(-form.nbytes // _ALIGNMENT) * _ALIGNMENT for form in forms)


def may_go_through_memory(group: Group, tensor: Tensor, messages: Sequence[Sequence[Form]]) -> bool:
    """Return whether a collective of CPU tensors with these messages, of all ranks, can go through shared memory."""
    if group.ledger.shared is None or device_type(tensor) != "cpu":
        return False
    return all(is_shareable(_span(forms)) for forms in messages)


@final
class ThroughMemory:
    """The messages of one collective: `send` and `expect` them, wait for the `flights`, use `received`, and `finish`.

    Sender and receiver name the same forms of the pieces of a message; one without bytes is not sent.
    """

    def __init__(self, group: Group, operation: Operation) -> None:
        assert group.ledger.shared is not None
        assert operation.number is not None
        self._shared: SharedMemory = group.ledger.shared
        self._code, self._number = operation.code, operation.number
        self._expected: list[Flight] = []
        self._unsent: list[Flight] = []
        self._messages: dict[int, Tensor] = {}  # by sender
        self._slots: list[tuple[int, int]] = []  # senders and slots, to be freed

    @property
    def flights(self) -> list[Flight]:
        """What to wait for before `received`."""
        return [*self._expected, *self._unsent]

    def send(self, pieces: Sequence[Tensor], peers: Sequence[int]) -> None:
        """Copy pieces into shared memory, for these ranks; the pieces may be changed from then on."""
        forms = forms_of(pieces)
        nbytes = _span(forms)
        if not nbytes:
            return
        readers = tuple(peers)
        place, room = self._shared.room(nbytes, readers)
        for target, piece in zip(_pieces(room, forms), pieces, strict=True):
            bits(target).copy_(bits(piece.detach().resolve_conj().resolve_neg()))
        flight: Unsent | Failed
        try:
            if self._shared.send(readers, self._tag(nbytes), place, room):
                return
            flight = Unsent(self._shared)
        except RuntimeError as error:
            flight = Failed(error)
        self._unsent.append(Flight(flight, readers[0], self._number, nbytes, incoming=False))

    def expect(self, peer: int, forms: Sequence[Form]) -> None:
        """Expect a message with pieces of these forms."""
        nbytes = _span(forms)
        if nbytes:
            self._expected.append(Flight(_Arrival(self, peer, nbytes), peer, self._number, nbytes))

    def received(self, peer: int, forms: Sequence[Form]) -> list[Tensor]:
        """Return the pieces of a message that has arrived, to be read before `finish`."""
        return _pieces(self._messages[peer] if _span(forms) else torch.empty(0, dtype=torch.uint8), forms)

    def finish(self) -> None:
        """Let the senders use the memory of their messages again."""
        self._messages.clear()
        for peer, slot in self._slots:
            self._shared.free(peer, slot)
        self._slots.clear()

    def arrive(self, peer: int, nbytes: int) -> None:
        """Wait for a message."""
        slot, self._messages[peer] = self._shared.arrive(peer, self._tag(nbytes))
        self._slots.append((peer, slot))

    def _tag(self, nbytes: int) -> int:
        return tag(self._number, self._code, nbytes)


def _pieces(message: Tensor, forms: Sequence[Form]) -> list[Tensor]:
    """Return the pieces of a message, as views of it."""
    found, start = [], 0
    for form in forms:
        part = message[start : start + form.nbytes]
        found.append(part.view(form.dtype).view(form.shape))
        start += -(-form.nbytes // _ALIGNMENT) * _ALIGNMENT
    return found


class _Arrival:
    """A message that is awaited."""

    __slots__ = ("_nbytes", "_peer", "_through")

    def __init__(self, through: ThroughMemory, peer: int, nbytes: int) -> None:
        self._through, self._peer, self._nbytes = through, peer, nbytes

    def wait(self) -> None:
        self._through.arrive(self._peer, self._nbytes)
