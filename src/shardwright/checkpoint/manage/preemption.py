"""SIGTERM as a request to save and exit. The handler only sets a flag; the ranks agree on it in `step_end`."""

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
    """Handle SIGTERM from construction until `close`. The handler that was installed before is called as well.

    >>> import os
    >>> preemption = Preemption()
    >>> os.kill(os.getpid(), signal.SIGTERM)
    >>> preemption.on_any_rank(comm.world())
    True
    >>> preemption.close()
    """

    def __init__(self) -> None:
        self.received = False
        if threading.current_thread() is not threading.main_thread():
            raise CheckpointError("save_on_sigterm: Python lets only the main thread handle signals")
        if signal.getsignal(signal.SIGTERM) is None:
            raise CheckpointError("save_on_sigterm: another library handles SIGTERM outside of Python")
        self._previous = signal.signal(signal.SIGTERM, self._handle)

    def on_any_rank(self, group: comm.Group) -> bool:
        """Return True if any rank of the group has received SIGTERM: one small message if there are several ranks."""
        return any(comm.gather_bytes(b"\1" if self.received else b"", group, what="whether SIGTERM came"))

    def close(self) -> None:
        """Restore the previous handler, unless another one was installed after ours."""
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        if callable(self._previous):  # neither SIG_IGN nor SIG_DFL
            self._previous(number, frame)
