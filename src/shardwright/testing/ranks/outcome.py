"""The outcome of a rank: it returned, raised, died or hung."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardwright.errors import RankLostError

__all__ = ["Died", "Hung", "Outcome", "Raised", "Returned", "report"]


@dataclass(frozen=True, slots=True)
class Returned:
    """The rank's function returned `value`.

    >>> Returned(3).value
    3
    """

    value: Any


@dataclass(frozen=True, slots=True)
class Raised:
    """The rank's function raised an exception.

    `exception` is the exception itself, or None if it could not be pickled; the other fields are text.

    >>> Raised("ValueError", "no", "Traceback ...").kind
    'ValueError'
    """

    kind: str
    message: str
    traceback: str
    exception: BaseException | None = None

    def __str__(self) -> str:
        return f"raised {self.kind}: {self.message}\n{self.traceback}"

    @property
    def secondary(self) -> bool:
        """True if the error only reports the loss of another rank."""
        return isinstance(self.exception, RankLostError) or "Connection closed by peer" in self.message


@dataclass(frozen=True, slots=True)
class Died:
    """The rank's process ended: by the signal `signal`, or with the exit code `exitcode`.

    >>> str(Died(-9))
    'died: SIGKILL'
    """

    exitcode: int

    @property
    def signal(self) -> str | None:
        """The name of the signal that ended the process, such as SIGKILL; None if it exited."""
        return signal.Signals(-self.exitcode).name if self.exitcode < 0 else None

    def __str__(self) -> str:
        return f"died: {self.signal or f'exit code {self.exitcode}'}"


@dataclass(frozen=True, slots=True)
class Hung:
    """The rank did not answer in time: the reason, and the stacks of its threads at that moment.

    >>> str(Hung("no answer within 1 s", "Thread 0x1 ..."))
    'hung: no answer within 1 s\\nThread 0x1 ...'
    """

    why: str
    stacks: str

    def __str__(self) -> str:
        return f"hung: {self.why}\n{self.stacks}"


Outcome = Returned | Raised | Died | Hung


def report(outcomes: Sequence[Outcome]) -> str:
    """Describe the ranks that did not return, the likely cause first.

    >>> print(report([Returned(1), Hung("no answer within 1 s", ""), Died(-9)]))
    2 of 3 ranks failed
    rank 2 died: SIGKILL
    rank 1 hung: no answer within 1 s
    """

    def order(rank: int) -> int:
        outcome = outcomes[rank]
        if isinstance(outcome, Raised):
            return 3 if outcome.secondary else 1
        return 0 if isinstance(outcome, Died) else 2

    failed = [rank for rank, outcome in enumerate(outcomes) if not isinstance(outcome, Returned)]
    lines = [f"{len(failed)} of {len(outcomes)} rank{'s' * (len(outcomes) > 1)} failed"]
    return "\n".join(lines + [f"rank {rank} {outcomes[rank]}".rstrip() for rank in sorted(failed, key=order)])
