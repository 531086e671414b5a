"""Flatten a state: a tree of its containers, with its tensors as leaves and its plain values encoded.

Every node has its key path and its name: the keys joined by dots, as in a PyTorch state dict.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

import numpy as np
from torch import Size, Tensor

from shardwright import comm
from shardwright.checkpoint.format.names import prefix
from shardwright.checkpoint.format.values import Codec, encode_value
from shardwright.checkpoint.state.leaves import PLAIN, Leaf, Replicated, is_nested, leaf_of, to_ours
from shardwright.checkpoint.state.marks import PerRank
from shardwright.checkpoint.state.objects import ObjectStates, is_object, object_states_of
from shardwright.errors import StateError
from shardwright.sharded import ShardedTensor
from shardwright.tensor import DTensor

__all__ = [
    "CodecNode",
    "Complete",
    "ContainerNode",
    "FlatState",
    "Keys",
    "Node",
    "ObjectNode",
    "PerRankNode",
    "TensorNode",
    "ValueNode",
    "flatten",
    "per_rank_nodes",
]

Keys: TypeAlias = tuple[Any, ...]
Complete: TypeAlias = Callable[[Any, Any, str, Keys], Any]

_TENSORS = (Tensor, np.ndarray)
_MAX_DEPTH = 60
_ARRAYS = (np.ndarray, np.memmap)


@final
@dataclass(slots=True)
class ContainerNode:
    """A container: `kind` is "d" (dict), "l" (list) or "t" (tuple); `within` has the keys of a dict, else None."""

    kind: str
    within: list[Any] | None
    children: list[Node]
    original: Any
    name: str


@final
@dataclass(slots=True)
class TensorNode:
    """A tensor, by its index among the leaves; `is_array` if it was given as a numpy array."""

    number: int
    is_array: bool
    original: Any
    name: str
    keys: Keys


@final
@dataclass(slots=True)
class ValueNode:
    """A plain value, encoded."""

    encoded: list[Any]
    original: Any
    name: str
    keys: Keys


@final
@dataclass(slots=True)
class ObjectNode:
    """An object with `state_dict` and `load_state_dict`."""

    inner: Node
    original: Any
    name: str


@final
@dataclass(slots=True)
class PerRankNode:
    """A `PerRank` value; its leaves are separate from those of the state."""

    flat: FlatState
    original: PerRank[Any]
    name: str
    keys: Keys


@final
@dataclass(slots=True)
class CodecNode:
    """A value of a user's type, as the state that its codec returned."""

    codec: Codec
    inner: Node
    original: Any
    name: str
    keys: Keys


Node: TypeAlias = ContainerNode | TensorNode | ValueNode | ObjectNode | PerRankNode | CodecNode


@final
@dataclass(slots=True)
class FlatState:
    """The tree of a state and its leaves in order, with their names, which may repeat.

    `sharded` has the ShardedTensors among the leaves, by index, and `is_nested` is True if this rank knows one of them
    to have shards that are themselves distributed.
    """

    root: Node
    leaves: list[Leaf] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    sharded: dict[int, ShardedTensor] = field(default_factory=dict)
    is_nested: bool = False

    def tree(self) -> Any:
        """Return the tree as stored in a manifest: a tensor is its index, everything else a list whose first item
        says what."""
        return _encode(self.root)


def flatten(
    state: Any, group: comm.Group, codecs: Mapping[type, Codec] | None = None, complete: Complete | None = None
) -> FlatState:
    """Flatten a state; raise a `StateError` with the path of anything that cannot be stored.

    `complete(object, state, name, keys)` may return the object's state with more entries.
    """
    object_states = object_states_of(state, codecs or {}, _MAX_DEPTH)
    return _Walk(group, codecs or {}, complete, object_states).run(state, "", ())


class _Walk:
    def __init__(
        self,
        group: comm.Group,
        codecs: Mapping[type, Codec],
        complete: Complete | None,
        object_states: ObjectStates,
        of_one_rank: bool = False,
    ) -> None:
        self._group, self._codecs, self._complete, self._object_states = group, codecs, complete, object_states
        self._of_one_rank = of_one_rank
        self._flat = FlatState(None)  # type: ignore[arg-type]  # the root is set when it is known
        self._ancestors: set[int] = set()
        self._known: dict[Size, Replicated] = {}

    def run(self, state: Any, name: str, keys: Keys) -> FlatState:
        self._flat.root = self._visit(state, name, keys, 0)
        return self._flat

    def _visit(self, value: Any, name: str, keys: Keys, depth: int) -> Node:
        if type(value) in PLAIN:
            return self._leaf(value, value, name, keys)
        if isinstance(value, _TENSORS):
            return self._tensor(value, name, keys)
        codec = self._codecs.get(type(value))
        if codec is None:
            encoded = encode_value(value, name or "the state")
            if encoded is not None:
                return ValueNode(encoded, value, name, keys)
        if depth > _MAX_DEPTH:
            raise StateError(f"{_brief(name)}: nested more than {_MAX_DEPTH} deep")
        if id(value) in self._ancestors:
            raise StateError(f"{_brief(name)}: the state contains itself: a {type(value).__name__} contains itself")
        self._ancestors.add(id(value))
        try:
            return self._visit_container(value, codec, name, keys, depth)
        finally:
            self._ancestors.discard(id(value))

    def _visit_container(self, value: Any, codec: Codec | None, name: str, keys: Keys, depth: int) -> Node:
        if codec is not None:
            return CodecNode(
                codec, self._visit(self._state_of(value, name, keys), name, keys, depth + 1), value, name, keys
            )
        if isinstance(value, PerRank):
            if self._of_one_rank:
                raise StateError(f"{name}: a PerRank inside a PerRank; what is inside already belongs to one rank")
            inner = _Walk(self._group, self._codecs, self._complete, self._object_states, of_one_rank=True)
            return PerRankNode(inner.run(value.value, name, keys), value, name, keys)
        if is_object(value):
            state = self._state_of(value, name, keys)
            if self._complete is not None:
                state = self._complete(value, state, name, keys)
            return ObjectNode(self._visit(state, name, keys, depth + 1), value, name)
        name_prefix = prefix(name)
        if isinstance(value, Mapping):
            within = [_plain_key(key, value, name) for key in value]
            children = [self._visit(value[key], f"{name_prefix}{key}", (*keys, key), depth + 1) for key in within]
            return ContainerNode("d", within, children, value, name)
        if isinstance(value, list | tuple):
            children = [
                self._visit(item, f"{name_prefix}{index}", (*keys, index), depth + 1)
                for index, item in enumerate(value)
            ]
            return ContainerNode("t" if isinstance(value, tuple) else "l", None, children, value, name)
        raise StateError(
            f"{name or 'the state'}: {type(value).__module__}.{type(value).__qualname__} cannot be stored: nothing is "
            "pickled. Give it state_dict and load_state_dict, or a codec for its type, or store its parts"
        )

    def _state_of(self, value: Any, name: str, keys: Keys) -> Any:
        """Return what an object or a codec returned for a value, when all of them were called."""
        try:
            return self._object_states[keys, id(value)]
        except KeyError:  # objects that contain themselves are called once only
            raise StateError(f"{_brief(name)}: the state contains itself, through a PerRank") from None

    def _tensor(self, value: Any, name: str, keys: Keys) -> TensorNode:
        """Add a tensor of this library or PyTorch's distributed ones, or an array."""
        if isinstance(value, np.ndarray):
            if type(value) not in _ARRAYS:
                raise StateError(
                    f"{name or 'the state'}: {type(value).__module__}.{type(value).__qualname__} has more than its "
                    "numbers, but "
                    "only those would be stored; pass np.asarray(...) of it, and store the rest separately"
                )
            return self._leaf(value, value, name, keys, is_array=True)
        converted = to_ours(value)
        if self._of_one_rank and isinstance(converted, DTensor | ShardedTensor):
            raise StateError(f"{name}: a {type(value).__name__} in a PerRank; it belongs to several ranks, not to one")
        if isinstance(converted, ShardedTensor):
            self._flat.sharded[len(self._flat.leaves)] = converted
            self._flat.is_nested |= is_nested(converted)
        return self._leaf(converted, value, name, keys)

    def _leaf(self, converted: Any, value: Any, name: str, keys: Keys, is_array: bool = False) -> TensorNode:
        leaves = self._flat.leaves
        node = TensorNode(len(leaves), is_array, value, name, keys)
        leaves.append(leaf_of(converted, name or "the state", self._group, self._known))
        self._flat.names.append(name)
        return node


def _plain_key(key: Any, within: Mapping[Any, Any], name: str) -> Any:
    """Convert a key to its plain JSON value: subclasses (an IntEnum, an np.float64) are stored as plain values."""
    if (type(key) is str and key.isascii()) or key is None or isinstance(key, bool):
        return key
    fault, plain = None, key
    if isinstance(key, str):
        plain = str.__str__(key)
        try:
            plain.encode()
        except UnicodeEncodeError as error:
            fault = f"is not valid Unicode: {error}"
    elif isinstance(key, int):
        plain = int.__int__(key)
        if not -(2**63) <= plain < 2**63:
            fault = "has more than 64 bits"
    elif isinstance(key, float):
        plain = float.__float__(key)
        if not math.isfinite(plain):
            fault = "cannot be represented in JSON"
    else:
        fault = f"has type {type(key).__name__}; keys must be str, int, float, bool or None"
    if fault is None and type(key) is not type(plain) and plain not in within:
        fault = f"has type {type(key).__name__} but is not found by its plain value {plain!r}; use that"
    if fault is not None:
        raise StateError(f"{name or 'the state'}: key {key!r} {fault}")
    return plain


def _brief(name: str) -> str:
    return name if len(name) < 100 else f"{name[:60]}...{name[-30:]}"


def _encode(node: Node) -> Any:
    match node:
        case TensorNode():
            return ["a", node.number] if node.is_array else node.number
        case ValueNode():
            return node.encoded
        case ContainerNode(kind="d", within=within, children=children) if within is not None:
            return ["d", *(item for pair in zip(within, map(_encode, children), strict=True) for item in pair)]
        case ContainerNode():
            return [node.kind, *map(_encode, node.children)]
        case ObjectNode():
            return _encode(node.inner)
        case CodecNode():
            return ["x", node.codec.name, _encode(node.inner)]
        case PerRankNode():
            return ["r"]  # filled in by `merge`, with the values of all ranks


def per_rank_nodes(node: Node) -> list[PerRankNode]:
    """Return the `PerRank` nodes, in the order of the tree."""
    match node:
        case PerRankNode():
            return [node]
        case ContainerNode():
            return [inner for child in node.children for inner in per_rank_nodes(child)]
        case ObjectNode() | CodecNode():
            return per_rank_nodes(node.inner)
    return []
