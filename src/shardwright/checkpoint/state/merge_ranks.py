"""One state out of what every rank has: nobody plans for the others, and nothing is gathered that is the same.

Ranks exchange a digest of names, dtypes, layouts and plain values. Where all are equal, that is all that was said.
Else one rank of each kind says what it has, and all merge it alike. What is marked `PerRank` is said by every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import msgspec

from shardwright import comm
from shardwright.checkpoint.format.data_file import digest
from shardwright.checkpoint.format.tensor_table import TensorTable
from shardwright.checkpoint.state.flatten import FlatState, per_rank_nodes
from shardwright.checkpoint.state.leaves import Leaf, leaf_of
from shardwright.checkpoint.state.merge import PerRankDescription, StateDescription, describe_sharding, merge
from shardwright.sharded import flatten_sharded_tensors

__all__ = ["GlobalState", "describe", "flatten_nested_shards", "merge_states"]


@final
@dataclass(frozen=True)
class GlobalState:
    """The state of all ranks: its tree, its tensors, and this rank's leaves by their numbers."""

    tree: Any
    table: TensorTable
    leaves: dict[int, Leaf]


class _Head(NamedTuple):
    """What every rank says first: the digest of all it has, whether some is its own, whether some is nested."""

    digest: str
    has_own: bool
    is_nested: bool


def describe(flat: FlatState, ranks: tuple[int, ...]) -> StateDescription:
    """What a rank says of its state among these ranks."""
    encoded: dict[int, Any] = {}
    first: dict[Any, int] = {}
    shardings, same = [], []
    leaves = flat.leaves
    for number, leaf in enumerate(leaves):
        known = encoded.get(id(leaf.sharding))
        if known is None:
            known = encoded[id(leaf.sharding)] = describe_sharding(leaf.sharding, ranks)
        shardings.append(known)
        same.append(first.setdefault(leaf.identity, number))
    return StateDescription(
        flat.tree(), flat.names, [leaf.dtype for leaf in leaves], [leaf.itemsize for leaf in leaves], shardings, same
    )


def merge_states(flat: FlatState, group: comm.Group) -> GlobalState:
    """The state of all ranks of the group. They talk; whatever is wrong is raised on all of them alike."""
    own, heads = _compare(flat, group)
    if any(head.is_nested for head in heads):
        flatten_nested_shards(flat, group)
        own, heads = _compare(flat, group)
    parts, place = [(group.ranks, own)], 0
    if any(head.digest != heads[0].digest for head in heads):
        parts, place = _gather(own, flat, group)
    mine = per_rank_nodes(flat.root)
    rank = group.global_rank
    everyones: dict[int, list[PerRankDescription]] = {}
    if any(head.has_own for head in heads):
        words = msgspec.json.encode([PerRankDescription(list(one.keys), describe(one.flat, (rank,))) for one in mine])
        said = comm.gather_bytes(words, group, what="save: what each rank has for itself")
        everyones = {
            each: msgspec.json.decode(one, type=list[PerRankDescription])
            for each, one in zip(group.ranks, said, strict=True)
        }
    merged = merge(parts, group.ranks, everyones)
    leaves = _by_number(flat.leaves, merged.numbers[place])
    for one, numbers in zip(mine, merged.own_numbers.get(rank, []), strict=True):
        leaves |= _by_number(one.flat.leaves, numbers)
    return GlobalState(merged.tree, merged.table, leaves)


def _compare(flat: FlatState, group: comm.Group) -> tuple[StateDescription, list[_Head]]:
    """What this rank says, and the heads of all."""
    own = describe(flat, group.ranks)
    head = _Head(digest(msgspec.json.encode(own)), bool(per_rank_nodes(flat.root)), flat.is_nested)
    said = comm.gather_bytes(msgspec.json.encode(head), group, what="save: comparing states")
    return own, [msgspec.json.decode(one, type=_Head) for one in said]


def _gather(
    own: StateDescription, flat: FlatState, group: comm.Group
) -> tuple[list[tuple[tuple[int, ...], StateDescription]], int]:
    """What is said in the group, by whom, each once; and which of it this rank says.

    Only now that it may matter does a rank say what it is unsure of: ranks without elements would all be of kinds of
    their own else.
    """
    text = msgspec.json.encode(own._replace(unsure=[at for at, leaf in enumerate(flat.leaves) if not leaf.is_held]))
    kinds: dict[bytes, list[int]] = {}
    for place, head in enumerate(comm.gather_bytes(digest(text).encode(), group, what="save: grouping states")):
        kinds.setdefault(head, []).append(place)
    mine = kinds[digest(text).encode()]
    texts = comm.gather_bytes(text if group.rank == mine[0] else b"", group, what="save: uniting states")
    parts = [
        (tuple(group.ranks[place] for place in places), msgspec.json.decode(texts[places[0]], type=StateDescription))
        for places in kinds.values()
    ]
    return parts, list(kinds.values()).index(mine)


def _by_number(leaves: Sequence[Leaf], numbers: Sequence[int]) -> dict[int, Leaf]:
    """The leaves by their numbers; of several that are one tensor any will do, as they are one memory."""
    return dict(zip(numbers, leaves, strict=True))


def flatten_nested_shards(flat: FlatState, group: comm.Group) -> None:
    """Has ShardedTensors whose shards are sharded again hold their innermost boxes.

    All ranks of the group call it, once any of them knows of one: the others may hold nothing of it.
    """
    by_name: dict[str, int] = {}
    for number in flat.sharded:
        name = flat.names[number]
        while name in by_name:
            name += "~"
        by_name[name] = number
    explicit = flatten_sharded_tensors({name: flat.sharded[number] for name, number in by_name.items()})
    for name, number in by_name.items():
        flat.sharded[number] = explicit[name]
        flat.leaves[number] = leaf_of(explicit[name], name, group, {})
    flat.is_nested = False
