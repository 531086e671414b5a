"""Merge the state descriptions of several ranks into one state. Pure: the same descriptions give the same result.

Names that only some ranks have are kept; what several ranks have under one name must be equal. Two names are stored as
one tensor if some rank reports that they share memory, and no rank that holds both reports otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, final

from shardwright.checkpoint.format.manifest import sharding_from_json, sharding_to_json
from shardwright.checkpoint.format.names import joined
from shardwright.checkpoint.format.tensor_table import Sharding, TensorTable
from shardwright.errors import StateDiffersError
from shardwright.layout import Layout, Mesh, Replicate
from shardwright.listing import join_first

__all__ = ["Merged", "PerRankDescription", "StateDescription", "describe_sharding", "merge"]

Ranks: TypeAlias = tuple[int, ...]

_MAX_LISTED = 20


class StateDescription(NamedTuple):
    """A rank's description of its state: the tree, and the name, dtype, itemsize, sharding and memory of each leaf.

    A sharding is encoded as in a manifest, or as `[None, shape]` for a plain tensor, which every rank that has it holds
    in full. `aliases` has, for each leaf, the index of the first leaf with the same memory (possibly itself). `unsure`
    has the leaves of which the rank holds nothing: it cannot tell whether they share memory.
    """

    tree: Any
    names: list[str]
    dtypes: list[str]
    itemsizes: list[int]
    shardings: list[Any]
    aliases: list[int]
    unsure: list[int] = []  # noqa: RUF012  never changed


class PerRankDescription(NamedTuple):
    """A rank's description of a `PerRank` value: its key path, and its state."""

    keys: list[Any]
    description: StateDescription


@final
@dataclass(frozen=True)
class Merged:
    """The merged state: its tree, its tensor table, and the index of each leaf of each part in the table."""

    tree: Any
    table: TensorTable
    numbers: list[list[int]]
    own_numbers: Mapping[int, list[list[int]]]  # by rank, for each of its PerRank values


def describe_sharding(sharding: Sharding, ranks: Ranks) -> Any:
    """Encode a sharding for a description among these ranks.

    >>> describe_sharding(Layout(Mesh((2,)), [Replicate()], (3,)), (0, 1))
    [None, [3]]
    """
    plain = isinstance(sharding, Layout) and sharding.is_replicated and tuple(sharding.mesh.ranks) == ranks
    return [None, list(sharding.shape)] if plain else sharding_to_json(sharding)


def joined_slices(shardings: Sequence[Sharding]) -> Layout | None:
    """Return the layout of one tensor on several slices of a mesh, as replicas; None if they are not such slices.

    If a mesh has a tensor-parallel dimension that does not shard a parameter, FSDP holds that parameter once for each
    rank of that dimension: with equal layouts on disjoint meshes of the same shape.

    >>> from shardwright.layout import Shard
    >>> slices = [Layout(Mesh((2,), ranks=ranks), [Shard(0)], (4,)) for ranks in ((0, 2), (1, 3))]
    >>> joint = joined_slices(slices)
    >>> print(joint, list(joint.mesh.ranks), joint.replicas(3))
    [4] (0: R, 1: S(0)) [0, 2, 1, 3] (2, 3)
    """
    layouts = [sharding for sharding in dict.fromkeys(shardings) if isinstance(sharding, Layout)]
    if len(layouts) < len(set(shardings)):
        return None
    first = layouts[0]
    for layout in layouts[1:]:
        if (layout.shape, layout.placements, layout.order, layout.mesh.shape) != (
            first.shape,
            first.placements,
            first.order,
            first.mesh.shape,
        ):
            return None
    ranks = [rank for layout in sorted(layouts, key=lambda one: tuple(one.mesh.ranks)) for rank in layout.mesh.ranks]
    if len(set(ranks)) < len(ranks):
        return None
    names = first.mesh.names if all(layout.mesh.names == first.mesh.names for layout in layouts) else None
    mesh = Mesh(
        (len(layouts), *first.mesh.shape),
        None if names is None or "slices" in names else ("slices", *names),
        ranks,
    )
    order = (0, *(mesh_dim + 1 for mesh_dim in first.order))
    return Layout(mesh, [Replicate(), *first.placements], first.shape, order)


def merge(
    parts: Sequence[tuple[Ranks, StateDescription]],
    ranks: Ranks,
    own: Mapping[int, Sequence[PerRankDescription]] | None = None,
) -> Merged:
    """Merge the descriptions of all ranks; each part is common to several ranks, `own` has each rank's PerRank values.

    `ranks` has all ranks in the order of their group. Raise a `StateDiffersError` that lists every difference.
    """
    return _Merge(parts, ranks).run(own or {})


@dataclass(slots=True)
class _Slot:
    """A tensor of the merged state: the leaf that it is in each part."""

    leaves: dict[int, int]
    name: str
    row: int = -1


class _Merge:
    def __init__(self, parts: Sequence[tuple[Ranks, StateDescription]], ranks: Ranks) -> None:
        self._parts, self._ranks = parts, ranks
        self._slots: list[_Slot] = []
        self._rows: list[tuple[str, str, int, Sharding]] = []
        self._name_counts: dict[str, int] = {"__metadata__": 1}  # the only reserved name in a safetensors file
        self._by_object: dict[tuple[int, tuple[int, ...]], tuple[Sharding, list[int]]] = {}
        self._by_text: dict[str, tuple[Sharding, list[int]]] = {}
        self._differ: list[str] = []
        self._unsure = [frozenset(description.unsure) for _, description in parts]

    def run(self, own: Mapping[int, Sequence[PerRankDescription]]) -> Merged:
        if len(self._parts) == 1:
            tree, rows = self._parts[0][1].tree, self._rows_of_one()
            numbers = [rows]
        else:
            tree = self._tree([(part, description.tree) for part, (_, description) in enumerate(self._parts)], "")
            self._fill_rows()
            rows = [slot.row for slot in self._slots]
            numbers = [[-1] * len(description.names) for _, description in self._parts]
            for slot in self._slots:
                for part, leaf in slot.leaves.items():
                    numbers[part][leaf] = slot.row
        self._raise()
        own_numbers: dict[int, list[list[int]]] = {}
        if own or len(self._rows) < len(rows):
            tree = _numbered(tree, rows, self._own_trees(own, own_numbers), ())
        names, dtypes, itemsizes, shardings = zip(*self._rows, strict=True) if self._rows else ((), (), (), ())
        return Merged(tree, TensorTable.of(names, dtypes, itemsizes, shardings), numbers, own_numbers)

    def _rows_of_one(self) -> list[int]:
        """Return the rows if all ranks have the same description, the usual case: nothing has to be compared."""
        description = self._parts[0][1]
        rows: list[int] = []
        for number, (name, dtype, itemsize, sharding, alias) in enumerate(
            zip(
                description.names,
                description.dtypes,
                description.itemsizes,
                description.shardings,
                description.aliases,
                strict=True,
            )
        ):
            if alias < number:
                rows.append(rows[alias])
                continue
            built, missing = self._sharding(sharding, (0,))
            if missing:
                self._add_missing_holders(name, built, missing)
            rows.append(len(self._rows))
            self._rows.append((self._unique(name or "state"), dtype, itemsize, built))
        return rows

    # --- the tree -----------------------------------------------------------------------------------------------------

    def _tree(self, nodes: Sequence[tuple[int, Any]], name: str) -> Any:
        """Merge the nodes of several parts at one position of the tree; tensors are numbered by their slots."""
        first_part, first = nodes[0]
        kind = _kind(first)
        for part, node in nodes[1:]:
            if _kind(node) != kind:
                self._differs(name, first_part, _brief(first), part, _brief(node))
                return ["v", None]
        match kind:
            case "tensor":
                return self._slot(dict(nodes), name)
            case "a":
                return ["a", self._slot({part: node[1] for part, node in nodes}, name)]
            case "d":
                return self._dict(nodes, name)
            case "l" | "t":
                return self._sequence(nodes, name)
            case "x":
                for part, node in nodes[1:]:
                    if node[1] != first[1]:
                        self._differs(name, first_part, f"codec {first[1]!r}", part, f"codec {node[1]!r}")
                        return ["v", None]
                return ["x", first[1], self._tree([(part, node[2]) for part, node in nodes], name)]
        for part, node in nodes[1:]:
            if repr(node) != repr(first):  # 1 differs from True and 1.0
                self._differs(name, first_part, _brief(first), part, _brief(node))
                break
        return first

    def _dict(self, nodes: Sequence[tuple[int, Any]], name: str) -> Any:
        children_of: dict[Any, list[tuple[int, Any]]] = {}
        for part, node in nodes:
            for key, child in zip(node[1::2], node[2::2], strict=True):
                children_of.setdefault((type(key), key), []).append((part, child))
        merged: list[Any] = ["d"]
        first: dict[Any, tuple[int, Any]] = {}
        for (_, key), children in children_of.items():
            part, first_key = first.setdefault(key, (children[0][0], key))
            if type(first_key) is not type(key):  # one dict cannot hold both: True == 1 == 1.0
                self._differs(joined(name, key), part, f"key {first_key!r}", children[0][0], f"key {key!r}")
                continue
            merged += (key, self._tree(children, joined(name, key)))
        return merged

    def _sequence(self, nodes: Sequence[tuple[int, Any]], name: str) -> Any:
        first_part, first = nodes[0]
        for part, node in nodes[1:]:
            if len(node) != len(first):
                self._differs(name, first_part, f"{len(first) - 1} entries", part, f"{len(node) - 1} entries")
                return ["v", None]
        return [
            first[0],
            *(
                self._tree([(part, node[index]) for part, node in nodes], joined(name, index - 1))
                for index in range(1, len(first))
            ),
        ]

    def _slot(self, leaves: dict[int, int], name: str) -> int:
        self._slots.append(_Slot(leaves, name))
        return len(self._slots) - 1

    # --- the tensors --------------------------------------------------------------------------------------------------

    def _fill_rows(self) -> None:
        """Assign a row of the table to every slot: one row for all slots that share memory on all ranks."""
        groups_of: dict[tuple[int, int], list[_Group]] = {}  # the groups that use this memory of this part
        for slot in self._slots:
            dtype, itemsize, sharding = self._agreed_tensor(slot)
            classes = {
                part: self._parts[part][1].aliases[leaf]
                for part, leaf in slot.leaves.items()
                if leaf not in self._unsure[part]
            }
            for candidate in (known for pair in classes.items() for known in groups_of.get(pair, ())):
                if candidate.fits(classes, dtype, sharding):
                    slot.row = candidate.row
                    candidate.classes.update(classes)
                    group = candidate
                    break
            else:
                slot.row = len(self._rows)
                self._rows.append((self._unique(slot.name or "state"), dtype, itemsize, sharding))
                group = _Group(slot.row, dtype, sharding, dict(classes))
            for pair in classes.items():
                if group not in groups_of.setdefault(pair, []):
                    groups_of[pair].append(group)

    def _agreed_tensor(self, slot: _Slot) -> tuple[str, int, Sharding]:
        """Return the dtype and sharding on which all parts that have a tensor agree."""
        (first, leaf), *others = slot.leaves.items()
        description = self._parts[first][1]
        dtype, sharding = description.dtypes[leaf], description.shardings[leaf]
        built, missing = self._sharding(sharding, tuple(slot.leaves))
        slices = {first: built}
        for part, other_leaf in others:
            other_description = self._parts[part][1]
            if other_description.dtypes[other_leaf] != dtype:
                self._differs(slot.name, first, dtype, part, other_description.dtypes[other_leaf])
            elif other_description.shardings[other_leaf] != sharding:
                slices[part], missing_too = self._sharding(other_description.shardings[other_leaf], tuple(slot.leaves))
                missing = missing or missing_too
        if missing:
            self._add_missing_holders(slot.name, built, missing)
        elif len(slices) > 1:
            merged_layout = joined_slices(list(slices.values()))
            if merged_layout is not None:
                return dtype, description.itemsizes[leaf], merged_layout
            for part, other_sharding in list(slices.items())[1:]:
                self._differs(slot.name, first, _describe(built), part, _describe(other_sharding))
        return dtype, description.itemsizes[leaf], built

    def _sharding(self, description: Any, parts: tuple[int, ...]) -> tuple[Sharding, list[int]]:
        """Return the sharding that these parts have, and the ranks that should hold it but do not."""
        result = self._by_object.get((id(description), parts))  # a rank encodes equal shardings as one object
        if result is None:
            key = repr((description, parts))
            result = self._by_text.get(key)
            if result is None:
                result = self._by_text[key] = self._make_sharding(description, parts)
            self._by_object[id(description), parts] = result
        return result

    def _make_sharding(self, description: Any, parts: tuple[int, ...]) -> tuple[Sharding, list[int]]:
        holders = {rank for part in parts for rank in self._parts[part][0]}
        if description[0] is None:
            replicas = [rank for rank in self._ranks if rank in holders]
            return Layout(Mesh((len(replicas),), ranks=replicas), [Replicate()], description[1]), []
        sharding = sharding_from_json(description)
        members = sharding.mesh.ranks if isinstance(sharding, Layout) else sharding.ranks
        return sharding, sorted(set(members) - holders)

    def _unique(self, name: str) -> str:
        while (count := self._name_counts.get(name, 0)) > 0:
            self._name_counts[name] = count + 1
            name = f"{name}~{count + 1}"
        self._name_counts[name] = 1
        return name

    def _own_trees(
        self, own: Mapping[int, Sequence[PerRankDescription]], numbers: dict[int, list[list[int]]]
    ) -> dict[tuple[Any, ...], list[Any]]:
        """Append the tensors of PerRank values to the table; return their trees by key path."""
        trees: dict[tuple[Any, ...], list[Any]] = {}
        for rank in self._ranks:
            numbers[rank] = []
            for keys, description in own.get(rank, ()):
                rows: list[int] = []
                for number, first in enumerate(description.aliases):
                    if first < number:
                        rows.append(rows[first])
                        continue
                    rows.append(len(self._rows))
                    layout = Layout(Mesh((1,), ranks=(rank,)), [Replicate()], description.shardings[number][1])
                    name = self._unique(f"{description.names[number] or 'state'}.rank{rank}")
                    self._rows.append((name, description.dtypes[number], description.itemsizes[number], layout))
                numbers[rank].append(rows)
                trees.setdefault(tuple(keys), []).append([rank, _numbered(description.tree, rows, {}, ())])
        return trees

    # --- what differs -------------------------------------------------------------------------------------------------

    def _differs(self, name: str, first: int, first_value: str, second: int, second_value: str) -> None:
        first_ranks, other_ranks = _listed(self._parts[first][0]), _listed(self._parts[second][0])
        self._differ.append(
            f"{name or 'the state'}: {first_value} on {first_ranks}, and {second_value} on {other_ranks}"
        )

    def _add_missing_holders(self, name: str, sharding: Sharding, ranks: Sequence[int]) -> None:
        self._differ.append(
            f"{name}: {_describe(sharding)} is also held by {_listed(ranks)}, but it is not in their state"
        )

    def _raise(self) -> None:
        if self._differ:
            raise StateDiffersError(
                f"ranks have different values under {len(self._differ)} "
                f"{'name' if len(self._differ) == 1 else 'names'}; mark values that differ between ranks with "
                "PerRank\n  " + join_first(self._differ, _MAX_LISTED, "\n  ")
            )


@dataclass(slots=True, eq=False)
class _Group:
    """Slots that share memory: the class of that memory in each part."""

    row: int
    dtype: str
    sharding: Sharding
    classes: dict[int, int]

    def fits(self, classes: Mapping[int, int], dtype: str, sharding: Sharding) -> bool:
        """Return True if another slot's memory does not contradict this group in any part."""
        return (
            dtype == self.dtype
            and sharding is self.sharding
            and all(self.classes.get(part, identity) == identity for part, identity in classes.items())
        )


def _numbered(tree: Any, rows: Sequence[int], own: Mapping[tuple[Any, ...], list[Any]], keys: tuple[Any, ...]) -> Any:
    """Return the tree with tensors numbered by their rows, and with the values of all ranks for PerRank nodes."""
    if isinstance(tree, int):
        return rows[tree]
    match tree:
        case ["a", int(number)]:
            return ["a", rows[number]]
        case ["r"]:
            return ["r", *own.get(keys, ())]
        case ["d", *pairs]:
            return ["d", *_numbered_pairs(pairs, rows, own, keys)]
        case ["l" | "t" as kind, *items]:
            return [kind, *(_numbered(item, rows, own, (*keys, index)) for index, item in enumerate(items))]
        case ["x", name, inner]:
            return ["x", name, _numbered(inner, rows, own, keys)]
    return tree


def _numbered_pairs(
    pairs: Sequence[Any], rows: Sequence[int], own: Mapping[tuple[Any, ...], list[Any]], keys: tuple[Any, ...]
) -> Iterator[Any]:
    for key, child in zip(pairs[::2], pairs[1::2], strict=True):
        yield key
        yield _numbered(child, rows, own, (*keys, key))


def _kind(node: Any) -> str:
    """Return the kind of a node that is merged by its own rule; all plain values are one kind."""
    if isinstance(node, int):
        return "tensor"
    kind = node[0]
    return kind if kind in ("a", "d", "l", "t", "x", "r") else "value"


def _listed(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:8]))}{', ...' if len(ranks) > 8 else ''}"


def _describe(sharding: Sharding) -> str:
    return (
        str(sharding) if isinstance(sharding, Layout) else f"{list(sharding.shape)} in {len(sharding.regions)} shards"
    )


def _brief(node: Any) -> str:
    if isinstance(node, int):
        return "a tensor"
    kinds = {"d": "a dict", "l": "a list", "t": "a tuple", "a": "an array", "r": "a PerRank value", "x": "a codec's"}
    shown = kinds.get(node[0]) or repr(node[1] if len(node) == 2 else node[1:])
    return shown if len(shown) < 60 else shown[:57] + "..."
