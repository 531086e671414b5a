"""Nest nodes that are listed by name under the keys that lead to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["nest"]

_MAX_DEPTH = 60


def nest(nodes: Mapping[str, Any], paths: Mapping[str, tuple[Any, ...]]) -> list[Any]:
    """Return the tree in which each node is under its path; a name without one is a key at the top.

    Integers are indices of lists, as PyTorch's planner has them.

    >>> nest({"a.b": 0, "c.0": 1, "d": 2}, {"a.b": ("a", "b"), "c.0": ("c", 0)})
    ['d', 'a', ['d', 'b', 0], 'c', ['l', 1], 'd', 2]
    """
    root: dict[Any, Any] = {}
    for name, node in nodes.items():
        path = paths.get(name, (name,))
        if len(path) > _MAX_DEPTH or not _insert(root, path, node):
            root[name] = _Leaf(node)  # keys that contradict those of another name
    tree: list[Any] = _node(root)
    return tree


class _Leaf:
    __slots__ = ("node",)

    def __init__(self, node: Any) -> None:
        self.node = node


def _insert(root: dict[Any, Any], path: tuple[Any, ...], node: Any) -> bool:
    """Put a node under a path; return False if another node is there, or on the way."""
    level: Any = root
    for key in path[:-1]:
        level = level.setdefault(key, {})
        if isinstance(level, _Leaf):
            return False
    if path[-1] in level:
        return False
    level[path[-1]] = _Leaf(node)
    return True


def _node(level: Any) -> Any:
    if isinstance(level, _Leaf):
        return level.node
    if level and all(type(key) is int for key in level) and sorted(level) == list(range(len(level))):
        return ["l", *(_node(level[index]) for index in range(len(level)))]
    return ["d", *(part for key, below in level.items() for part in (key, _node(below)))]
