"""`torch.distributed.rpc` (TensorPipe), if it is running: worker names and ranks, and remote calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.distributed.rpc as rpc

from shardwright.comm.group import world
from shardwright.errors import CommError

__all__ = ["call_remotely", "rank_of_worker", "worker_name"]


def worker_name() -> str | None:
    """Return the name of this process's RPC worker; None if RPC is not running.

    >>> worker_name() is None
    True
    """
    if not rpc.is_available():
        return None
    try:
        return str(rpc.get_worker_info().name)
    except RuntimeError:  # init_rpc was not called, or shutdown was
        return None


def rank_of_worker(name: str) -> int:
    """Return the global rank of the process of this RPC worker.

    The worker is queried, because its worker id may differ from its rank: masters and parameter servers may be workers,
    too.

    >>> rank_of_worker("trainer0")
    Traceback (most recent call last):
    shardwright.errors.CommError: worker 'trainer0': RPC is not running here; call torch.distributed.rpc.init_rpc first
    """
    own = worker_name()
    if own is None:
        raise CommError(f"worker {name!r}: RPC is not running here; call torch.distributed.rpc.init_rpc first")
    everyone = world()
    if name == own:
        return everyone.global_rank
    try:
        rank: int | None = rpc.rpc_sync(name, _own_rank)
    except RuntimeError as error:
        raise CommError(f"worker {name!r} did not return its rank: {error}") from error
    if rank is None:
        raise CommError(f"worker {name!r} is not in a process group: call init_process_group there")
    return rank


def call_remotely(worker: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call the function on that worker and return an RRef of its result; `to_here()` fetches it.

    >>> call_remotely("trainer0", len, [1, 2])
    Traceback (most recent call last):
    shardwright.errors.CommError: calling worker 'trainer0': RPC is not running here; call ...init_rpc first
    """
    if worker_name() is None:
        raise CommError(
            f"calling worker {worker!r}: RPC is not running here; call torch.distributed.rpc.init_rpc first"
        )
    try:
        return rpc.remote(worker, function, args)
    except RuntimeError as error:
        raise CommError(f"calling worker {worker!r} failed: {error}") from error


def _own_rank() -> int | None:
    return dist.get_rank() if dist.is_initialized() else None
