"""Putting what was read into the state it was read for: containers in place, objects by their own `load_state_dict`."""

from __future__ import annotations

import enum
from collections.abc import MutableMapping
from typing import Any

import numpy as np
import torch
from torch import nn

from shardwright.checkpoint.flatten import Branch, Coded, Flat, Node, Object, OfRank, TensorNode, ValueNode
from shardwright.checkpoint.match import Match
from shardwright.checkpoint.values import EnumValue
from shardwright.errors import LoadMismatchError

__all__ = ["fill"]


def fill(flat: Flat, found: Match) -> Any:
    """The state that was taken apart, with what was read: the same containers and tensors, other contents."""
    for _, leaf, _ in found.tensors:
        for part in leaf.parts:
            if not part.tensor.is_inference():
                # It was written to behind autograd's back: what was saved for a backward of before is stale.
                torch.autograd.graph.increment_version(part.tensor)
    return _fill(flat.root, flat, found)


def _fill(node: Node, flat: Flat, found: Match) -> Any:
    match node:
        case TensorNode():
            if node.is_array:
                _bring_back(node.original, flat.leaves[node.number].parts[0].tensor)
            return node.original
        case ValueNode():
            return _as_asked(found.values[id(node)], node) if id(node) in found.values else node.original
        case Branch(kind="d", within=within, children=children) if within is not None:
            return _fill_mapping(node.original, dict(zip(within, children, strict=True)), flat, found)
        case Branch(kind="l"):
            for place, child in enumerate(node.children):
                new = _fill(child, flat, found)
                if new is not node.original[place]:
                    node.original[place] = new
            return node.original
        case Branch():
            items = [_fill(child, flat, found) for child in node.children]
            if all(new is old for new, old in zip(items, node.original, strict=True)):
                return node.original
            kind = type(node.original)
            return kind(*items) if hasattr(kind, "_fields") else kind(items)
        case Object():
            _give(node, _fill(node.inner, flat, found))
            return node.original
        case Coded():
            return node.codec.decode(_fill(node.inner, flat, found))
        case OfRank():
            node.original.value = _fill(node.flat.root, node.flat, found)
            return node.original


def _fill_mapping(original: Any, children: dict[Any, Node], flat: Flat, found: Match) -> Any:
    items = {key: _fill(child, flat, found) for key, child in children.items()}
    changed = {key: new for key, new in items.items() if new is not original[key]}
    if not changed:
        return original
    if not isinstance(original, MutableMapping):
        return type(original)(items)  # as MappingProxyType is made; there is no rule for it
    for key, new in changed.items():
        original[key] = new
    return original


def _bring_back(array: np.ndarray[Any, Any], tensor: torch.Tensor) -> None:
    """Copies what was read to an array whose memory torch could not see."""
    if not np.may_share_memory(array, tensor.numpy()):
        np.copyto(array, tensor.numpy())


def _give(node: Object, state: Any) -> None:
    """An object's state. A module's tensors were filled where they are: only what else it has is given to it."""
    original = node.original
    if isinstance(original, nn.Module) and _plain_module(original):
        return
    original.load_state_dict(state)


def _plain_module(module: nn.Module) -> bool:
    """Whether a module's state is its parameters and buffers, and nothing of its own making."""
    return all(
        type(part).load_state_dict is nn.Module.load_state_dict
        and type(part).state_dict is nn.Module.state_dict
        and type(part)._save_to_state_dict is nn.Module._save_to_state_dict
        and type(part)._load_from_state_dict is nn.Module._load_from_state_dict
        and type(part).get_extra_state is nn.Module.get_extra_state
        and not part._load_state_dict_pre_hooks
        and not part._load_state_dict_post_hooks
        and not part._state_dict_hooks
        for part in module.modules()
    )


def _as_asked(value: Any, node: ValueNode) -> Any:
    """A stored value as the target has it: an enum of its type, a bytearray for bytes, else what is stored."""
    kind = type(node.original)
    if kind is bytearray and isinstance(value, bytes):
        return bytearray(value)
    if not isinstance(value, EnumValue):
        return value
    if not isinstance(node.original, enum.Enum):
        return value.value
    try:
        return kind[value.name]
    except KeyError:
        raise LoadMismatchError(
            f"{node.name}: {value.type_name}.{value.name} is stored, and {kind.__name__} has no member of that name"
        ) from None
