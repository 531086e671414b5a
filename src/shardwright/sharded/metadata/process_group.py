"""The process group of a ShardedTensor, when it is created and when it is unpickled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from shardwright import comm
from shardwright.errors import UnsupportedError

__all__ = ["State", "group_of", "listed", "load_with_process_group"]

_current: ContextVar[comm.Group | None] = ContextVar("shardwright_sharded_process_group", default=None)


@contextmanager
def load_with_process_group(process_group: Any) -> Iterator[Any]:
    """Assign this process group to ShardedTensors that are unpickled inside the block.

    >>> import io, torch
    >>> from shardwright import sharded
    >>> file = io.BytesIO()
    >>> torch.save(sharded.ones(sharded.ChunkShardingSpec(0, ["rank:0/cpu"]), 2), file)
    >>> _ = file.seek(0)
    >>> with load_with_process_group(None):
    ...     torch.load(file, weights_only=False).gather()
    tensor([1., 1.])
    """
    if _current.get() is not None:
        raise UnsupportedError("load_with_process_group cannot be nested")
    token = _current.set(comm.Group.of(process_group))
    try:
        yield process_group
    finally:
        _current.reset(token)


def group_of(process_group: Any) -> comm.Group:
    """Return the group of this torch process group; by default that of `load_with_process_group`, or the world."""
    if process_group is None:
        return _current.get() or comm.world()
    return process_group if isinstance(process_group, comm.Group) else comm.Group.of(process_group)


class State(NamedTuple):
    """The pickled form of a group: its ranks and this process's index. Placements refer to these ranks."""

    rank: int
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, group: comm.Group) -> State:
        """Return the pickled form of a group."""
        return cls(group.rank, group.ranks)

    def find(self) -> comm.Group:
        """Return the group to load into. Raise unless it has the same ranks and this process has the same index."""
        group = group_of(None)
        if (group.rank, group.ranks) != self:
            source = (
                "the group of load_with_process_group" if _current.get() is not None else "the default process group"
            )
            raise UnsupportedError(
                f"this ShardedTensor was pickled by rank {self.ranks[self.rank]} in a group of {listed(self.ranks)}; "
                f"{source} has {listed(group.ranks)}, and this process is rank {group.global_rank}: load it inside "
                "`with sharded.load_with_process_group(group):` with a matching group, or use shardwright.checkpoint, "
                "which reshards"
            )
        return group


def listed(ranks: tuple[int, ...]) -> str:
    """Format ranks for an error message.

    >>> listed((0, 1)), listed(tuple(range(4096)))
    ('ranks [0, 1]', '4096 ranks [0, ..., 4095]')
    """
    return f"ranks {list(ranks)}" if len(ranks) <= 16 else f"{len(ranks)} ranks [{ranks[0]}, ..., {ranks[-1]}]"
