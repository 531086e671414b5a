"""Rebuild a state from the tree of a manifest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shardwright.checkpoint.format.tree import pairs_of, values_by_rank
from shardwright.checkpoint.format.values import Codec, EnumValue, decode_value
from shardwright.checkpoint.state.marks import PerRank

__all__ = ["build"]


def build(tree: Any, tensor: Callable[[int, bool], Any], codecs: Mapping[str, Codec], rank: int | None) -> Any:
    """Build the state that a tree describes, with `tensor(index, is_array)` for its tensors and arrays.

    For `PerRank` values, it has the value of `rank`; if that rank has none and others do, a `PerRank` of theirs by
    rank.
    """

    def make(node: Any) -> Any:
        match node:
            case int():
                return tensor(node, False)
            case ["a", int(number)]:
                return tensor(number, True)
            case ["d", *pairs]:
                return {key: make(child) for key, child in pairs_of(pairs)}
            case ["l", *items]:
                return [make(item) for item in items]
            case ["t", *items]:
                return tuple(make(item) for item in items)
            case ["x", str(name), inner]:
                codec = codecs.get(name)
                value = make(inner)
                return value if codec is None else codec.decode(value)
            case ["r", *entries]:
                by_rank = dict(values_by_rank(entries))
                if rank is None or rank in by_rank or not by_rank:
                    return make(by_rank[rank]) if rank in by_rank else None
                return PerRank({owner: make(inner) for owner, inner in by_rank.items()})
        value = decode_value(node)
        return value.value if isinstance(value, EnumValue) else value

    return make(tree)
