"""The methods that torch.distributed.checkpoint calls on a tensor; `checkpoint`, a layer above, provides them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from shardwright.errors import UnsupportedError

__all__ = ["CheckpointProtocol", "provide", "provided"]


class CheckpointProtocol(NamedTuple):
    """The functions behind `__create_chunk_list__`, `__get_tensor_shard__` and `__create_write_items__`."""

    chunk_list: Callable[[Any], list[Any]]
    local_tensor_for: Callable[[Any, Any], Tensor]
    write_items: Callable[[Any, str], list[Any]]


_provided: list[CheckpointProtocol] = []


def provide(protocol: CheckpointProtocol) -> None:
    """Register the functions; those registered last are used."""
    _provided[:] = [protocol]


def provided() -> CheckpointProtocol:
    """Return the registered functions."""
    if not _provided:
        raise UnsupportedError("a DTensor is saved in chunks by shardwright.checkpoint: import it first")
    return _provided[0]
