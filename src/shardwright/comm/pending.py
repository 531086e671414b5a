"""A collective under way, and what becomes of it when a peer is lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, final

from shardwright.comm.group import Group
from shardwright.errors import CommError, RankLostError

__all__ = ["Flight", "Pending", "explain"]

T = TypeVar("T")


class _Work(Protocol):
    def wait(self) -> object: ...


@dataclass(frozen=True, slots=True)
class Flight:
    """Something torch moves for us: the handle, and the peer (by group index) if it is with one peer only."""

    work: _Work
    peer: int | None = None


@final
class Pending(Generic[T]):
    """A collective under way: `wait()` gives its result, the same object each time.

    Ranks start collectives in the same order; they may wait for them in any. Buffers given to a pending
    collective belong to it until `wait()` returns.

    >>> import torch
    >>> from shardwright import comm
    >>> comm.start_all_reduce(torch.ones(2)).wait()
    tensor([1., 1.])
    """

    __slots__ = ("_finish", "_flights", "_group", "_kind", "_result")

    def __init__(self, kind: str, group: Group, flights: Sequence[Flight], finish: Callable[[], T]) -> None:
        self._kind = kind
        self._group = group
        self._flights = flights
        self._finish: Callable[[], T] | None = finish
        self._result: T | None = None

    def wait(self) -> T:
        """The result, once it is there; `RankLostError` if a peer died or did not take part in time."""
        if self._finish is not None:
            for flight in self._flights:
                try:
                    flight.work.wait()
                except RuntimeError as error:
                    raise explain(error, self._kind, self._group, flight.peer) from error
            self._result = self._finish()
            self._finish = None  # frees the inputs
            self._flights = ()
        return self._result  # type: ignore[return-value]  # set above; T itself may be None


# What gloo and NCCL say of a peer that is gone: torch has no exception type for it.
_LOSS = ("connection closed", "connection reset", "connection refused", "broken pipe", "timed out", "timeout")
_LOSS_NCCL = ("remote process exited", "nccl communicator was aborted", "socket")


def explain(error: RuntimeError, kind: str, group: Group, peer: int | None) -> CommError:
    """Our error for one of torch's: `RankLostError` where a peer is gone, naming it if it can be known."""
    text = str(error)
    lowered = text.lower()
    members = f"{kind} over ranks {_brief(group.ranks)}"
    if not any(sign in lowered for sign in (*_LOSS, *_LOSS_NCCL)):
        return CommError(f"{members} failed: {text}")
    if peer is None:
        return RankLostError(f"{members}: a rank died or did not take part in time ({text})", ())
    lost = group.ranks[peer]
    return RankLostError(f"{members}: rank {lost} died or did not take part in time ({text})", (lost,))


def _brief(ranks: tuple[int, ...]) -> str:
    return str(list(ranks)) if len(ranks) <= 16 else f"[{ranks[0]}, ..., {ranks[-1]}] ({len(ranks)} ranks)"
