"""`Group`: a handle to a set of ranks, cheap to look up on every call."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwright.comm.ledger import Ledger
from shardwright.comm.losses import LossPoll
from shardwright.comm.rendezvous import wait_for_key
from shardwright.errors import ArgumentTypeError, CommError, RankLostError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = [
    "Group",
    "forget",
    "known_groups",
    "mesh_group",
    "on_change",
    "on_enter",
    "on_forget",
    "replace_world",
    "restore_world",
    "subgroup",
    "world",
]


class ControlChannel(Protocol):
    """A connection to the other ranks of a group for small messages, implemented in coordinate.py."""

    def connect(self, what: str, timeout: float) -> None:
        """Connect to the neighbours in the tree of ranks."""

    def round(self, payload: bytes, what: str, timeout: float) -> list[bytes]:
        """Gather the bytes of every rank, in rank order."""

    def close(self) -> None:
        """Close the connections."""


@final
class Group:
    """The ranks that take part in a collective, as seen from this process.

    `ranks` are the global ranks, `rank` is this process's index among them, `global_rank` its global rank, `size` the
    number of ranks, and `process_group` torch's process group (`None` for a single process). A Group exists only on its
    members. Collectives identify ranks by their index in the group, error messages by their global rank.

    >>> from shardwright import comm
    >>> comm.world()
    Group(ranks=(0,), rank=0)
    """

    __slots__ = ("channel", "global_rank", "ledger", "name", "process_group", "rank", "ranks", "side_channels", "size")

    def __init__(
        self, ranks: tuple[int, ...], rank: int, process_group: dist.ProcessGroup | None, name: str = ""
    ) -> None:
        self.name = name
        self.side_channels: dict[str, Group] = {}
        self.ranks = ranks
        self.rank = rank
        self.global_rank = ranks[rank]
        self.size = len(ranks)
        self.process_group = process_group
        self.ledger = _ledger_of(process_group)
        self.channel: ControlChannel | None = None  # opened by the first message, see coordinate.py

    @classmethod
    def of(cls, process_group: dist.ProcessGroup | None) -> Group:
        """Return the Group of a torch process group; `None` means the world, as in torch.

        >>> Group.of(None) is world()
        True
        """
        if process_group is None:
            return world()
        known = _groups.get(process_group) if isinstance(process_group, dist.ProcessGroup) else None
        return known if known is not None else _remember(process_group)

    def side_channel(self, name: str) -> Group:
        """Return a separate control channel over the same ranks, so that another thread can coordinate concurrently.

        It is for `agree` and `gather_bytes`; tensor collectives use the process group of the group itself. Each channel
        may be used by one thread at a time.

        >>> world().side_channel("checkpoint") is world().side_channel("checkpoint")
        True
        """
        found = self.side_channels.get(name)
        if found is None:
            found = self.side_channels[name] = Group(self.ranks, self.rank, self.process_group, name)
        return found

    @property
    def simulated(self) -> bool:
        """True if the other ranks do not exist, see simulate.py.

        >>> world().simulated
        False
        """
        return self.process_group is None and self.size > 1

    def moves(self, device: torch.device) -> bool:
        """True if the backend transfers tensors of this device directly; else they go through host memory.

        >>> world().moves(torch.device("cpu"))
        True
        """
        if device.type == "cpu" or self.process_group is None:
            return True
        config = dist.get_backend_config(self.process_group)
        return config == "nccl" or f"{device.type}:nccl" in config

    def __repr__(self) -> str:
        return f"Group(ranks={self.ranks}, rank={self.rank})"

    def __reduce__(self) -> str:
        raise ArgumentTypeError(f"{self!r} cannot be pickled: send its ranks and call comm.subgroup there")


# They live as long as the process groups: a rank may call forget() while others do not.
_ledgers: WeakKeyDictionary[dist.ProcessGroup, Ledger] = WeakKeyDictionary()


def _ledger_of(process_group: dist.ProcessGroup | None) -> Ledger:
    if process_group is None:
        return Ledger()
    return _ledgers.setdefault(process_group, Ledger())


@dataclass(slots=True)
class SimulatedWorld:
    """A world whose other ranks do not exist, and its groups."""

    world: Group
    subgroups: dict[tuple[int, ...], Group] = field(default_factory=dict)


_ALONE = Group((0,), 0, None)
_simulated: SimulatedWorld | None = None
_world = _ALONE
_groups: dict[dist.ProcessGroup, Group] = {}
_subgroups: dict[tuple[int, ...], Group] = {}
_forget_hooks: list[Callable[[], None]] = []
_change_hooks: list[Callable[[], None]] = []
_enter_hooks: list[Callable[[Group], None]] = []


def world() -> Group:
    """Return the group of all ranks: the default process group, or this process alone if there is none.

    >>> world().size
    1
    """
    if _simulated is not None:
        return _simulated.world
    process_group = dist.group.WORLD if dist.is_initialized() else None
    if _world.process_group is not process_group:
        return _enter(process_group)
    return _world


def subgroup(ranks: Sequence[int]) -> Group:
    """Return the Group of these global ranks, created on first use. Collective over its members only.

    >>> subgroup([0]).size
    1
    """
    wanted = tuple(ranks)
    everyone = world()
    subgroups = _subgroups if _simulated is None else _simulated.subgroups
    known = subgroups.get(wanted)
    if known is not None:
        return known
    me = everyone.global_rank
    if list(wanted) != sorted(set(wanted)) or not set(wanted) <= set(everyone.ranks):
        raise CommError(f"subgroup {wanted}: ranks must be ascending, distinct and among {everyone.ranks}")
    if me not in wanted:
        raise CommError(f"subgroup {wanted}: rank {me} is not a member")
    if wanted == everyone.ranks:
        group = everyone
    elif len(wanted) == 1 or everyone.simulated:
        group = Group(wanted, wanted.index(me), None)
    else:
        group = Group.of(_new_group(wanted, me))
    subgroups[wanted] = group
    return group


def _new_group(ranks: tuple[int, ...], me: int) -> dist.ProcessGroup:
    """Create a process group that only its members take part in, whatever groups each has created before.

    torch puts the number of groups of a process into the name of a new group, so members that have created different
    numbers of groups would wait under different names. They exchange their counts and use the largest.
    """
    store = dist.distributed_c10d._get_default_store()
    known = dist.distributed_c10d._world.pg_names
    key = f"shardwright/subgroup/{'-'.join(map(str, ranks))}"
    key = f"{key}/{store.add(f'{key}/turn/{me}', 1)}"  # counted in the store, so that another world starts again
    store.set(f"{key}/{me}", str(len(known)))
    largest = max(_count_of(store, f"{key}/{rank}", rank, ranks) for rank in ranks)
    counted = [object() for _ in range(largest - len(known))]
    known.update(dict.fromkeys(counted, ""))  # type: ignore[arg-type]  # placeholders for groups that others have created
    try:
        made: dist.ProcessGroup = dist.new_group(list(ranks), use_local_synchronization=True)
        return made
    finally:
        for each in counted:
            known.pop(each)  # type: ignore[call-overload]  # see above


def _count_of(store: Store, key: str, rank: int, ranks: tuple[int, ...]) -> int:
    seconds = store.timeout.total_seconds()  # type: ignore[attr-defined]  # torch's stub lacks it
    try:
        return int(wait_for_key(store, key, rank, time.monotonic() + seconds, LossPoll()))
    except RankLostError as loss:
        raise RankLostError(f"subgroup {ranks}: {loss}", loss.ranks) from None
    except TimeoutError:
        raise RankLostError(f"subgroup {ranks}: rank {rank} did not arrive within {seconds:g} s", (rank,)) from None


def mesh_group(mesh: DeviceMesh, dim: int | str) -> Group:
    """Return the Group of the ranks that differ from this one only along one dimension of a DeviceMesh."""
    if mesh.get_coordinate() is None:
        raise CommError(f"rank {dist.get_rank()} is not in the mesh {mesh}, so it has no group along {dim!r}")
    return Group.of(mesh.get_group(dim))


def replace_world(group: Group) -> SimulatedWorld | None:
    """Make `group` the world until `restore_world` is called with what this returns."""
    global _simulated
    before, _simulated = _simulated, SimulatedWorld(group)
    _changed()
    return before


def restore_world(before: SimulatedWorld | None) -> None:
    """End what `replace_world` began."""
    global _simulated
    _simulated = before
    _changed()


def _changed() -> None:
    for hook in _change_hooks:
        hook()


def on_change(hook: Callable[[], None]) -> None:
    """Register a function that is called whenever this process gets another rank for a while, by `replace_world`.

    >>> on_change(lambda: None)
    """
    _change_hooks.append(hook)


def forget() -> None:
    """Drop all cached groups and close their control channels.

    Call it before `destroy_process_group` in a process that will join another world.

    >>> forget()
    >>> world().size
    1
    """
    global _world
    for hook in _forget_hooks:  # first: a background save may still use a channel
        hook()
    for group in [_world, *_groups.values(), *_subgroups.values()]:
        for each in [group, *group.side_channels.values()]:
            if each.channel is not None:
                each.channel.close()
                each.channel = None
    _groups.clear()
    _subgroups.clear()
    _world = _ALONE


def on_forget(hook: Callable[[], None]) -> None:
    """Register a function that is called whenever process groups are about to be forgotten.

    >>> on_forget(lambda: None)
    """
    _forget_hooks.append(hook)


def on_enter(hook: Callable[[Group], None]) -> None:
    """Register a function that is called with the Group of all ranks whenever this process joins another world.

    >>> on_enter(lambda everyone: None)
    """
    _enter_hooks.append(hook)


def known_groups() -> list[Group]:
    """Return the groups of more than one rank that this process has used.

    >>> known_groups()
    []
    """
    return [group for group in list(_groups.values()) if group.size > 1]


def _enter(process_group: dist.ProcessGroup | None) -> Group:
    # The default process group has changed: groups of the old one must not be used again.
    global _world
    forget()
    if process_group is not None:
        _world = _remember(process_group)
        for hook in _enter_hooks:
            hook(_world)
    return _world


def _remember(process_group: object) -> Group:
    if not isinstance(process_group, dist.ProcessGroup):
        if not isinstance(process_group, int) or process_group != dist.GroupMember.NON_GROUP_MEMBER:
            raise ArgumentTypeError(
                "process_group must be a torch process group or None, got "
                f"{type(process_group).__name__}: {process_group!r}"
            )
        raise CommError(f"rank {dist.get_rank()} is not in this process group (torch returned {process_group!r})")
    ranks = tuple(dist.get_process_group_ranks(process_group))
    group = Group(ranks, process_group.rank(), process_group)
    _groups[process_group] = group
    return group
