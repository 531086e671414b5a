"""Join and leave a world of local processes, for `shardwright.testing` and launchers."""

from __future__ import annotations

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from shardwright.comm.group import Group, forget, world

__all__ = ["host_store", "join", "leave", "reach_store"]


def host_store() -> TCPStore:
    """Start a store on a free port of this machine for rendezvous; it lives as long as the object.

    >>> host_store().port > 0
    True
    """
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, multi_tenant=True)


def reach_store(port: int) -> TCPStore:
    """Connect to a store that another process of this machine hosts on `port`.

    >>> store = host_store()
    >>> reach_store(store.port).port == store.port
    True
    """
    return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)


def join(rank: int, size: int, store: TCPStore, name: str) -> Group:
    """Join the world `name` of `size` local ranks as rank `rank`, with gloo and rendezvous through `store`.

    >>> leave()  # one world at a time
    >>> join(0, 1, host_store(), "alone").size
    1
    >>> leave()
    """
    shared = PrefixStore(name, store)
    dist.init_process_group("gloo", store=shared, rank=rank, world_size=size)
    # Wait until all have joined: a rank that dies at once would otherwise break the joining of the others.
    if shared.add("joined", 1) == size:
        shared.set("everyone", "here")
    shared.wait(["everyone"])
    return world()


def leave() -> None:
    """Leave the world, if there is one, and destroy its process groups and channels.

    >>> leave()
    """
    forget()
    if dist.is_initialized():
        dist.destroy_process_group()
