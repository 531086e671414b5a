"""Who talks: a `Group` of ranks, cheap enough to ask for on every operation."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwright.comm.ledger import Ledger
from shardwright.comm.losses import Inquiry
from shardwright.comm.rendezvous import await_key
from shardwright.errors import ArgumentTypeError, CommError, RankLostError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from shardwright.comm.coordinate import Channel

__all__ = ["Group", "forget", "known_groups", "mesh_group", "on_enter", "on_forget", "subgroup", "world"]


@final
class Group:
    """The ranks that take part in a collective, seen from one of them.

    `ranks` are their global numbers, `rank` is this process's index among them and `global_rank` its global number,
    `size` their number, and `process_group` what torch calls them (`None` where this process is alone). A Group exists
    on its members only. Collectives count ranks by their index in the group, error messages by their global number.

    >>> from shardwright import comm
    >>> comm.world()
    Group(ranks=(0,), rank=0)
    """

    __slots__ = ("asides", "channel", "global_rank", "ledger", "name", "process_group", "rank", "ranks", "size")

    def __init__(
        self, ranks: tuple[int, ...], rank: int, process_group: dist.ProcessGroup | None, name: str = ""
    ) -> None:
        self.name = name
        self.asides: dict[str, Group] = {}
        self.ranks = ranks
        self.rank = rank
        self.global_rank = ranks[rank]
        self.size = len(ranks)
        self.process_group = process_group
        self.ledger = _ledger_of(process_group)
        self.channel: Channel | None = None  # opened by the first message, see coordinate.py

    @classmethod
    def of(cls, process_group: dist.ProcessGroup | None) -> Group:
        """The Group of a torch process group; `None` means the world, as it does for torch.

        >>> Group.of(None) is world()
        True
        """
        if process_group is None:
            return world()
        known = _groups.get(process_group) if isinstance(process_group, dist.ProcessGroup) else None
        return known if known is not None else _remember(process_group)

    def aside(self, name: str) -> Group:
        """The same ranks with messages of their own: a thread that talks there is not heard here, nor waits for it.

        It is for `agree` and `gather_bytes`; collectives on tensors go the same way as those of the group itself.
        In each of the two, one thread talks at a time.

        >>> world().aside("checkpoint") is world().aside("checkpoint")
        True
        """
        found = self.asides.get(name)
        if found is None:
            found = self.asides[name] = Group(self.ranks, self.rank, self.process_group, name)
        return found

    def moves(self, device: torch.device) -> bool:
        """Whether the backend moves tensors of this device point to point; else they go through host memory.

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
        raise ArgumentTypeError(f"{self!r} is bound to this process: send its ranks and call comm.subgroup there")


# As long-lived as the connections they describe: a rank may forget its groups while the others do not.
_ledgers: WeakKeyDictionary[dist.ProcessGroup, Ledger] = WeakKeyDictionary()


def _ledger_of(process_group: dist.ProcessGroup | None) -> Ledger:
    if process_group is None:
        return Ledger()
    return _ledgers.setdefault(process_group, Ledger())


_ALONE = Group((0,), 0, None)
_world = _ALONE
_groups: dict[dist.ProcessGroup, Group] = {}
_subgroups: dict[tuple[int, ...], Group] = {}
_others_who_forget: list[Callable[[], None]] = []
_others_who_enter: list[Callable[[Group], None]] = []


def world() -> Group:
    """All ranks: the default process group where there is one, else this process alone, with no set-up.

    >>> world().size
    1
    """
    process_group = dist.group.WORLD if dist.is_initialized() else None
    if _world.process_group is not process_group:
        return _enter(process_group)
    return _world


def subgroup(ranks: Sequence[int]) -> Group:
    """The Group of these global ranks, made on first use. Its members call this alike; the others need not.

    >>> subgroup([0]).size
    1
    """
    wanted = tuple(ranks)
    everyone = world()
    known = _subgroups.get(wanted)
    if known is not None:
        return known
    me = everyone.global_rank
    if list(wanted) != sorted(set(wanted)) or not set(wanted) <= set(everyone.ranks):
        raise CommError(f"subgroup {wanted}: ranks must be ascending, distinct and among {everyone.ranks}")
    if me not in wanted:
        raise CommError(f"subgroup {wanted}: rank {me} is not in it, so it cannot ask for it")
    if wanted == everyone.ranks:
        group = everyone
    elif len(wanted) == 1:
        group = Group(wanted, 0, None)
    else:
        group = Group.of(_new_group(wanted, me))
    _subgroups[wanted] = group
    return group


def _new_group(ranks: tuple[int, ...], me: int) -> dist.ProcessGroup:
    """A process group that only its members make, whatever other groups each of them has made before.

    torch puts the number of groups a process has into the new group's name, so members that have made different
    numbers would wait for each other under different names. They tell each other, and count up to the largest.
    """
    store = dist.distributed_c10d._get_default_store()
    known = dist.distributed_c10d._world.pg_names
    key = f"shardwright/subgroup/{'-'.join(map(str, ranks))}"
    key = f"{key}/{store.add(f'{key}/turn/{me}', 1)}"  # counted in the store: another world begins anew
    store.set(f"{key}/{me}", str(len(known)))
    most = max(_count_of(store, f"{key}/{rank}", rank, ranks) for rank in ranks)
    counted = [object() for _ in range(most - len(known))]
    known.update(dict.fromkeys(counted, ""))  # type: ignore[arg-type]  # they stand for groups that others have made
    try:
        made: dist.ProcessGroup = dist.new_group(list(ranks), use_local_synchronization=True)
        return made
    finally:
        for each in counted:
            known.pop(each)  # type: ignore[call-overload]  # likewise


def _count_of(store: Store, key: str, rank: int, ranks: tuple[int, ...]) -> int:
    seconds = store.timeout.total_seconds()  # type: ignore[attr-defined]  # torch's stub lacks it
    try:
        return int(await_key(store, key, rank, time.monotonic() + seconds, Inquiry()))
    except RankLostError as loss:
        raise RankLostError(f"subgroup {ranks}: {loss}", loss.ranks) from None
    except TimeoutError:
        raise RankLostError(f"subgroup {ranks}: rank {rank} did not arrive within {seconds:g} s", (rank,)) from None


def mesh_group(mesh: DeviceMesh, dim: int | str) -> Group:
    """The Group of the ranks that differ from this one along one dimension of a DeviceMesh only."""
    if mesh.get_coordinate() is None:
        raise CommError(f"rank {dist.get_rank()} is not in the mesh {mesh}, so it has no group along {dim!r}")
    return Group.of(mesh.get_group(dim))


def forget() -> None:
    """Drops everything remembered about process groups and closes the coordination channels.

    Call it before `destroy_process_group` in a process that goes on to join another world.

    >>> forget()
    >>> world().size
    1
    """
    global _world
    for other in _others_who_forget:  # first: a save in the background is still talking
        other()
    for group in [_world, *_groups.values(), *_subgroups.values()]:
        for each in [group, *group.asides.values()]:
            if each.channel is not None:
                each.channel.close()
                each.channel = None
    _groups.clear()
    _subgroups.clear()
    _world = _ALONE


def on_forget(also: Callable[[], None]) -> None:
    """Has `also` called whenever process groups are about to be forgotten, for what else knows of them.

    >>> on_forget(lambda: None)
    """
    _others_who_forget.append(also)


def on_enter(also: Callable[[Group], None]) -> None:
    """Have `also` called with the Group of all ranks whenever this process has come into another world.

    >>> on_enter(lambda everyone: None)
    """
    _others_who_enter.append(also)


def known_groups() -> list[Group]:
    """Return the groups of more than one rank that this process has asked for.

    >>> known_groups()
    []
    """
    return [group for group in list(_groups.values()) if group.size > 1]


def _enter(process_group: dist.ProcessGroup | None) -> Group:
    # The world has changed under us: groups of the old one must not be handed out again.
    global _world
    forget()
    if process_group is not None:
        _world = _remember(process_group)
        for other in _others_who_enter:
            other(_world)
    return _world


def _remember(process_group: object) -> Group:
    if not isinstance(process_group, dist.ProcessGroup):
        if not isinstance(process_group, int) or process_group != dist.GroupMember.NON_GROUP_MEMBER:
            raise ArgumentTypeError(
                f"process_group={process_group!r} is a {type(process_group).__name__}: give a torch process group, or "
                "None for all ranks"
            )
        raise CommError(f"rank {dist.get_rank()} is not in this process group (torch gave {process_group!r} for it)")
    ranks = tuple(dist.get_process_group_ranks(process_group))
    group = Group(ranks, process_group.rank(), process_group)
    _groups[process_group] = group
    return group
