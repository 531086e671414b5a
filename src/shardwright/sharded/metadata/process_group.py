"""Which process group a ShardedTensor belongs to, when it is made and when it is unpickled."""

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
    """ShardedTensors that are unpickled inside belong to this process group.

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
        raise UnsupportedError("load_with_process_group inside another one: which of the two groups is meant?")
    token = _current.set(comm.Group.of(process_group))
    try:
        yield process_group
    finally:
        _current.reset(token)


def group_of(process_group: Any) -> comm.Group:
    """The group of a torch process group, where given; else that of `load_with_process_group`, or the world."""
    if process_group is None:
        return _current.get() or comm.world()
    return process_group if isinstance(process_group, comm.Group) else comm.Group.of(process_group)


class State(NamedTuple):
    """What is pickled of a group: its ranks, and which of them this process is. Placements name these ranks."""

    rank: int
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, group: comm.Group) -> State:
        """The state of this process's group."""
        return cls(group.rank, group.ranks)

    def find(self) -> comm.Group:
        """The group to load into: it must have the same ranks, and this process the same place among them."""
        group = group_of(None)
        if (group.rank, group.ranks) != self:
            how = "the group of load_with_process_group" if _current.get() is not None else "the default process group"
            raise UnsupportedError(
                f"this ShardedTensor was pickled by rank {self.ranks[self.rank]} in a group of {listed(self.ranks)}; "
                f"{how} has {listed(group.ranks)}, and this process is rank {group.global_rank}: load it inside "
                "`with sharded.load_with_process_group(group):` with a group that fits, or use shardwright.checkpoint, "
                "which reshards"
            )
        return group


def listed(ranks: tuple[int, ...]) -> str:
    """Ranks, for an error message.

    >>> listed((0, 1)), listed(tuple(range(4096)))
    ('ranks [0, 1]', '4096 ranks [0, ..., 4095]')
    """
    return f"ranks {list(ranks)}" if len(ranks) <= 16 else f"{len(ranks)} ranks [{ranks[0]}, ..., {ranks[-1]}]"
