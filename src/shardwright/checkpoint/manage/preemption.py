"""SIGTERM, taken as a request to save and end. A handler only notes it: the work is done where the ranks agree to."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import final

from shardwright import comm
from shardwright.errors import CheckpointError

__all__ = ["Preemption"]


@final
class Preemption:
    """Listens for SIGTERM from when it is made until `close`. A handler that was there before is called as well.

    >>> import os
    >>> preemption = Preemption()
    >>> os.kill(os.getpid(), signal.SIGTERM)
    >>> preemption.anywhere(comm.world())
    True
    >>> preemption.close()
    """

    def __init__(self) -> None:
        self.noted = False
        if threading.current_thread() is not threading.main_thread():
            raise CheckpointError("save_on_sigterm: Python lets only the main thread listen for signals")
        if signal.getsignal(signal.SIGTERM) is None:
            raise CheckpointError("save_on_sigterm: another library listens for SIGTERM, and not through Python")
        self._before = signal.signal(signal.SIGTERM, self._note)

    def anywhere(self, group: comm.Group) -> bool:
        """Whether any rank of the group has been told to end: one small message around, where there are several."""
        said = comm.gather_bytes(b"\1" if self.noted else b"", group, what="whether SIGTERM came")
        return any(said)

    def close(self) -> None:
        """Puts the handler back that was there before, unless somebody has put another in our place."""
        if signal.getsignal(signal.SIGTERM) == self._note:
            signal.signal(signal.SIGTERM, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.noted = True
        if callable(self._before):  # neither to be ignored nor the end of the process
            self._before(number, frame)
