"""Sockets that end with their process: a child that it forks does not keep them open.

Other ranks notice the death of a rank by its connections, which close when the last process that has them open ends. A
forked child, such as a worker of a DataLoader, would keep them open after its parent has been killed.
"""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet

__all__ = ["close_in_children"]


class _Closable(Protocol):
    def close(self) -> None: ...


_open: WeakSet[_Closable] = WeakSet()


def close_in_children(connection: _Closable) -> None:
    """Have a socket or connection closed in every child that this process forks.

    >>> import socket
    >>> with socket.socket() as connection:
    ...     close_in_children(connection)
    """
    _open.add(connection)


def _close_all() -> None:
    for connection in list(_open):
        connection.close()
    _open.clear()


os.register_at_fork(after_in_child=_close_all)
