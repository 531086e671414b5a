"""Letting go of process groups before Python ends.

gloo's threads outlive the main program as long as anything holds their process group. One of them may be about to
release a tensor when Python has already ended, and then aborts the process. Python keeps what modules hold until after
that point; so at exit, everything that holds a group lets go of it, and torch's own registry does too.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from shardwright.comm.group import forget
from shardwright.comm.ledger import code, tag
from shardwright.comm.mesh import known_meshes
from shardwright.errors import CommError

__all__ = ["break_off", "leaving"]

_PATIENCE = 5.0  # seconds for collectives that were started and never waited for
_BREAK = tag(0, code("break off"), 0)

leaving = threading.Event()  # set when this process has begun to end

_inherited: list[dist.ProcessGroup] = []  # of the process that forked this one: their threads are not here


def break_off(process_group: dist.ProcessGroup) -> None:
    """Make everything that moves or waits in a gloo group fail, here and on the other ranks.

    gloo offers no such call. But a receive that times out closes all connections of its group.
    """
    if process_group.size() == 1 or "gloo" not in dist.get_backend_config(process_group):
        return
    for step in range(1, process_group.size()):
        peer = (process_group.rank() + step) % process_group.size()
        try:
            process_group.recv([torch.empty(1, dtype=torch.uint8)], peer, _BREAK).wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            if "timed out" in str(error).lower():
                return  # else this connection was closed already, which closes no other


def _leave() -> None:
    """Release all process groups. What still hangs in them is broken off: at once if the program has failed."""
    leaving.set()
    groups = _groups_of_torch()
    if any(group in _inherited for group in groups):
        return
    for mesh in known_meshes():
        getattr(mesh, "_pg_registry", {}).clear()
    with suppress(CommError):  # a channel that cannot be closed any more is closed
        forget()
    if not groups or any("nccl" in dist.get_backend_config(group) for group in groups):
        return
    # In a thread, which holds the last references: the destructor of a group waits for all that was started in it.
    releasing = threading.Thread(target=_release, args=(groups,), daemon=True)
    releasing.start()
    releasing.join(_PATIENCE)


def _release(groups: list[dist.ProcessGroup]) -> None:
    if getattr(sys, "last_value", None) is not None:
        for group in groups:
            break_off(group)
    if dist.is_initialized():
        dist.destroy_process_group()
    groups.clear()


def _groups_of_torch() -> list[dist.ProcessGroup]:
    return list(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else []


def _in_a_child() -> None:
    _inherited.extend(_groups_of_torch())


os.register_at_fork(after_in_child=_in_a_child)
atexit.register(_leave)
