"""Release process groups at exit.

gloo's threads run as long as anything holds their process group. One of them may release a tensor after Python has shut
down, which aborts the process. Python keeps the globals of modules until after that point, so at exit all references to
groups are dropped, including those of torch's own registry.
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

__all__ = ["abort_group", "exiting"]

_TIMEOUT = 5.0  # seconds for collectives that were started and never waited for
_ABORT_TAG = tag(0, code("abort"), 0)

exiting = threading.Event()  # set when this process has begun to exit

_inherited: list[dist.ProcessGroup] = []  # of the parent of a forked process: their threads do not exist here


def abort_group(process_group: dist.ProcessGroup) -> None:
    """Abort all operations of a gloo group, here and on the other ranks.

    gloo has no such call, but a receive that times out closes all connections of its group.
    """
    if process_group.size() == 1 or "gloo" not in dist.get_backend_config(process_group):
        return
    for step in range(1, process_group.size()):
        peer = (process_group.rank() + step) % process_group.size()
        try:
            process_group.recv([torch.empty(1, dtype=torch.uint8)], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            if "timed out" in str(error).lower():
                return  # else only this connection was already closed


def _release_groups() -> None:
    """Release all process groups; abort pending operations, at once if the program has failed."""
    exiting.set()
    groups = _groups_of_torch()
    if any(group in _inherited for group in groups):
        return
    for mesh in known_meshes():
        getattr(mesh, "_pg_registry", {}).clear()
    with suppress(CommError):  # the channel is already broken
        forget()
    if not groups or any("nccl" in dist.get_backend_config(group) for group in groups):
        return
    # In a thread, which holds the last references: the destructor of a group waits for its operations.
    releasing = threading.Thread(target=_destroy, args=(groups,), daemon=True)
    releasing.start()
    releasing.join(_TIMEOUT)


def _destroy(groups: list[dist.ProcessGroup]) -> None:
    if getattr(sys, "last_value", None) is not None:
        for group in groups:
            abort_group(group)
    if dist.is_initialized():
        dist.destroy_process_group()
    groups.clear()


def _groups_of_torch() -> list[dist.ProcessGroup]:
    return list(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else []


def _remember_inherited() -> None:
    _inherited.extend(_groups_of_torch())


os.register_at_fork(after_in_child=_remember_inherited)
atexit.register(_release_groups)
