"""Merge the states of all ranks into one global state. Identical states exchange only a digest.

Ranks exchange a digest of names, dtypes, layouts and plain values. If all are equal, that is all. Otherwise one rank of
each kind sends its description, and all ranks merge them in the same way. `PerRank` values are sent by every rank.
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
    """The state of all ranks: its tree, its tensor table, and this rank's leaves by their index in the table."""

    tree: Any
    table: TensorTable
    leaves: dict[int, Leaf]


class _Summary(NamedTuple):
    """The first message of every rank: the digest of its description, and whether it has own or nested values."""

    digest: str
    has_own: bool
    is_nested: bool


def describe(flat: FlatState, ranks: tuple[int, ...]) -> StateDescription:
    """Describe a rank's state among these ranks."""
    encoded: dict[int, Any] = {}
    first: dict[Any, int] = {}
    shardings, aliases = [], []
    leaves = flat.leaves
    for number, leaf in enumerate(leaves):
        encoded_sharding = encoded.get(id(leaf.sharding))
        if encoded_sharding is None:
            encoded_sharding = encoded[id(leaf.sharding)] = describe_sharding(leaf.sharding, ranks)
        shardings.append(encoded_sharding)
        aliases.append(first.setdefault(leaf.identity, number))
    return StateDescription(
        flat.tree(), flat.names, [leaf.dtype for leaf in leaves], [leaf.itemsize for leaf in leaves], shardings, aliases
    )


def merge_states(flat: FlatState, group: comm.Group) -> GlobalState:
    """Merge the states of all ranks of the group. Collective; any error is raised on all of them."""
    own, summaries = _compare(flat, group)
    if any(summary.is_nested for summary in summaries):
        flatten_nested_shards(flat, group)
        own, summaries = _compare(flat, group)
    parts, index = [(group.ranks, own)], 0
    if any(summary.digest != summaries[0].digest for summary in summaries):
        parts, index = _gather(own, flat, group)
    own_nodes = per_rank_nodes(flat.root)
    rank = group.global_rank
    by_rank: dict[int, list[PerRankDescription]] = {}
    if any(summary.has_own for summary in summaries):
        message = msgspec.json.encode(
            [PerRankDescription(list(node.keys), describe(node.flat, (rank,))) for node in own_nodes]
        )
        gathered = comm.gather_bytes(message, group, what="save: what each rank has for itself")
        by_rank = {
            owner: msgspec.json.decode(data, type=list[PerRankDescription])
            for owner, data in zip(group.ranks, gathered, strict=True)
        }
    merged = merge(parts, group.ranks, by_rank)
    leaves = _by_number(flat.leaves, merged.numbers[index])
    for node, numbers in zip(own_nodes, merged.own_numbers.get(rank, []), strict=True):
        leaves |= _by_number(node.flat.leaves, numbers)
    return GlobalState(merged.tree, merged.table, leaves)


def _compare(flat: FlatState, group: comm.Group) -> tuple[StateDescription, list[_Summary]]:
    """Return this rank's description, and the summaries of all ranks."""
    description = describe(flat, group.ranks)
    summary = _Summary(digest(msgspec.json.encode(description)), bool(per_rank_nodes(flat.root)), flat.is_nested)
    gathered = comm.gather_bytes(msgspec.json.encode(summary), group, what="save: comparing states")
    return description, [msgspec.json.decode(data, type=_Summary) for data in gathered]


def _gather(
    description: StateDescription, flat: FlatState, group: comm.Group
) -> tuple[list[tuple[tuple[int, ...], StateDescription]], int]:
    """Return the distinct descriptions in the group, each with its ranks, and the index of this rank's.

    Ranks list the leaves that they are unsure of only now, when it may matter: otherwise every rank without elements
    would have a description of its own.
    """
    encoded = msgspec.json.encode(
        description._replace(unsure=[at for at, leaf in enumerate(flat.leaves) if not leaf.is_held])
    )
    kinds: dict[bytes, list[int]] = {}
    for index, summary in enumerate(comm.gather_bytes(digest(encoded).encode(), group, what="save: grouping states")):
        kinds.setdefault(summary, []).append(index)
    own_nodes = kinds[digest(encoded).encode()]
    descriptions = comm.gather_bytes(encoded if group.rank == own_nodes[0] else b"", group, what="save: uniting states")
    parts = [
        (
            tuple(group.ranks[index] for index in indices),
            msgspec.json.decode(descriptions[indices[0]], type=StateDescription),
        )
        for indices in kinds.values()
    ]
    return parts, list(kinds.values()).index(own_nodes)


def _by_number(leaves: Sequence[Leaf], tensor_numbers: Sequence[int]) -> dict[int, Leaf]:
    """Return the leaves by their index; any of several that share memory will do."""
    return dict(zip(tensor_numbers, leaves, strict=True))


def flatten_nested_shards(flat: FlatState, group: comm.Group) -> None:
    """Replace ShardedTensors whose shards are sharded again by their innermost shards.

    All ranks of the group call it, if any of them knows of one: the others may hold nothing of it.
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
