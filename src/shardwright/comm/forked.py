"""Close sockets in forked children.

Other ranks detect the death of a rank by its connections, which close when the last process that holds them exits. A
forked child, such as a DataLoader worker, would keep them open after its parent was killed.
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
    """Close a socket or connection in every child that this process forks.

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
