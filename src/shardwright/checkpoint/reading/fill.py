"""Fill a state with what was read: containers in place, objects by their own `load_state_dict`."""

from __future__ import annotations

from collections.abc import MutableMapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

from shardwright.checkpoint.reading.match import Match
from shardwright.checkpoint.state.flatten import (
    CodecNode,
    ContainerNode,
    FlatState,
    Node,
    ObjectNode,
    PerRankNode,
    TensorNode,
    ValueNode,
)
from shardwright.checkpoint.state.objects import in_order

__all__ = ["fill"]


def fill(flat: FlatState, match_: Match) -> Any:
    """Return the flattened state with what was read: the same containers and tensors with new contents."""
    filled = (part.tensor for _, leaf, _ in match_.tensors for part in leaf.parts)
    # The tensors were written without autograd noticing: what an earlier forward saved for backward is stale.
    torch.autograd.graph.increment_version([tensor for tensor in filled if not tensor.is_inference()])
    return _Fill(match_).fill(flat.root, flat)


class _Fill:
    def __init__(self, match_: Match) -> None:
        self._match = match_

    @cached_property
    def _memory(self) -> set[tuple[Any, ...]]:
        """The identities of all leaves that were filled."""
        return {leaf.identity for _, leaf, _ in self._match.tensors}

    def fill(self, node: Node, flat: FlatState) -> Any:
        match node:
            case TensorNode():
                if node.is_array and self._is_filled(node, flat):
                    _copy_back(node.original, flat.leaves[node.number].parts[0].tensor)
                return node.original
            case ValueNode():
                return self._match.values.get(id(node), node.original)
            case ContainerNode(kind="d", within=within, children=children) if within is not None:
                return self._mapping(node.original, within, children, flat)
            case ContainerNode(kind="l"):
                for index, child in enumerate(node.children):
                    new = self.fill(child, flat)
                    if new is not node.original[index]:
                        node.original[index] = new
                return node.original
            case ContainerNode():
                items = [self.fill(child, flat) for child in node.children]
                if all(new is old for new, old in zip(items, node.original, strict=True)):
                    return node.original
                kind = type(node.original)
                return kind(*items) if hasattr(kind, "_fields") else kind(items)
            case ObjectNode():
                if self._is_filled(node.inner, flat):
                    _load_object(node, self.fill(node.inner, flat))
                return node.original
            case CodecNode():
                return node.codec.decode(self.fill(node.inner, flat)) if self._is_filled(node, flat) else node.original
            case PerRankNode():
                node.original.value = self.fill(node.flat.root, node.flat)
                return node.original

    def _mapping(self, original: Any, within: list[Any], children: list[Node], flat: FlatState) -> Any:
        changed: dict[Any, Any] = {}
        others: dict[Any, Node] = {}
        for key, child in zip(within, children, strict=True):
            if type(child) is TensorNode and not child.is_array:  # the usual case: filled in place
                if child.original is not original[key]:
                    changed[key] = child.original
            else:
                others[key] = child
        for key in in_order(others):  # load_state_dict may communicate: call it in the same order on all ranks
            new = self.fill(others[key], flat)
            if new is not original[key]:
                changed[key] = new
        if not changed:
            return original
        if not isinstance(original, MutableMapping):
            # the way MappingProxyType is constructed
            return type(original)({key: changed.get(key, original[key]) for key in within})
        for key, new in changed.items():
            original[key] = new
        return original

    def _is_filled(self, node: Node, flat: FlatState) -> bool:
        """Return True if any part of the node was stored and requested. Other objects are not called."""
        match node:
            case TensorNode():
                return flat.leaves[node.number].identity in self._memory
            case ValueNode():
                return id(node) in self._match.values
            case ContainerNode():
                return id(node) in self._match.emptied or any(self._is_filled(child, flat) for child in node.children)
            case ObjectNode() | CodecNode():
                return self._is_filled(node.inner, flat)
            case PerRankNode():
                return self._is_filled(node.flat.root, node.flat)


def _copy_back(array: np.ndarray[Any, Any], tensor: torch.Tensor) -> None:
    """Copy what was read to an array whose memory torch cannot use directly."""
    if not np.may_share_memory(array, tensor.numpy()):
        np.copyto(array, tensor.numpy())


def _load_object(node: ObjectNode, state: Any) -> None:
    """Load an object's state. Tensors of a plain module are already filled in place."""
    original = node.original
    if isinstance(original, nn.Module) and _plain_module(original):
        return
    original.load_state_dict(state)


def _plain_module(module: nn.Module) -> bool:
    """Return True if the state of a module is its parameters and buffers only, without overrides or hooks."""
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
