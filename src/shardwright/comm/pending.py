"""Asynchronous collectives, and their errors when a peer is lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any, Generic, TypeVar, final

from shardwright.comm.flight import Flight
from shardwright.comm.group import Group, on_forget
from shardwright.comm.waits import threads, waiting
from shardwright.comm.watch import ask_why, where
from shardwright.errors import CommError, RankLostError

__all__ = ["Pending", "explain"]

T = TypeVar("T")


@final
class Pending(Generic[T]):
    """An asynchronous collective: `wait()` returns its result, the same object each time.

    Ranks must start collectives in the same order; they may wait for them in any order. Buffers passed to a pending
    collective must not be used until `wait()` returns.

    >>> import torch
    >>> from shardwright import comm
    >>> comm.start_all_reduce(torch.ones(2)).wait()
    tensor([1., 1.])
    """

    __slots__ = ("_finish", "_result", "at", "flights", "group", "kind", "number")

    def __init__(
        self, kind: str, group: Group, flights: Sequence[Flight], finish: Callable[[], T], number: int | None = None
    ) -> None:
        self.kind = kind
        self.group = group
        self.number = number  # of the collective in its group; None for messages between two ranks
        self.flights = flights
        self.at: Flight | None = None  # the operation it waits for
        self._finish: Callable[[], T] | None = finish
        self._result: T | None = None

    def wait(self) -> T:
        """Return the result once it is there; raise `RankLostError` if a peer died or did not take part in time."""
        if self._finish is not None:
            if self.flights:
                self._land()
            self._result = self._finish()
            self._finish = None  # frees the inputs
            self.flights = ()
        return self._result  # type: ignore[return-value]  # set above; T itself may be None

    def _land(self) -> None:
        thread = get_ident()
        outer = waiting.get(thread)
        waiting[thread] = self
        threads.add(thread)
        try:
            for flight in self.flights:
                self.at = flight
                flight.work.wait()
        except RuntimeError as error:
            # Keep it alive: the others must still receive what this rank sends, although it raises.
            _unfinished.append(self)
            raise explain(error, self.kind, self.group, None if self.at is None else self.at.peer) from error
        finally:
            if outer is None:
                del waiting[thread]
            else:
                waiting[thread] = outer


_unfinished: list[Pending[Any]] = []
on_forget(_unfinished.clear)


# Phrases in errors of gloo and NCCL about a lost peer: torch has no exception type for it.
_LOSS = (
    "connection closed",
    "connection reset",
    "connection refused",
    "broken pipe",
    "timed out",
    "timeout",
    "pair closure",  # see abort_group
)
_LOSS_NCCL = ("remote process exited", "nccl communicator was aborted", "socket")


def explain(error: RuntimeError, kind: str, group: Group, peer: int | None) -> CommError:
    """Convert torch's error: say why the collective failed, and which ranks are lost or in another program."""
    text = str(error)
    lowered = text.lower()
    members = f"{kind} over ranks {_brief(group.ranks)}"
    if not any(sign in lowered for sign in (*_LOSS, *_LOSS_NCCL)):
        return CommError(f"{members} failed: {text}")
    why = ask_why(group, peer)
    if isinstance(why, RankLostError):
        return RankLostError(f"{members}: {why}", why.ranks)
    if why is not None:
        return type(why)(str(why))
    if "timed out" in lowered or "timeout" in lowered:
        text += where(group)
    if peer is None:
        return RankLostError(f"{members}: a rank died or did not take part in time ({text})", ())
    lost = group.ranks[peer]
    return RankLostError(f"{members}: rank {lost} died or did not take part in time ({text})", (lost,))


def _brief(ranks: tuple[int, ...]) -> str:
    return str(list(ranks)) if len(ranks) <= 16 else f"[{ranks[0]}, ..., {ranks[-1]}] ({len(ranks)} ranks)"
