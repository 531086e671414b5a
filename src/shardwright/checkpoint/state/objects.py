"""The objects of a state, asked for their own states in one order on all ranks.

`state_dict` and `load_state_dict` of an object may communicate, and ranks may have built their dicts in different
orders. Called in the order of each rank's dict, they would wait for each other for ever: the keys are sorted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from shardwright.checkpoint.format.values import Codec
from shardwright.checkpoint.state.marks import PerRank, Stateful

__all__ = ["Asked", "ask_objects", "in_order", "is_object"]

Keys: TypeAlias = tuple[Any, ...]
Asked: TypeAlias = dict[tuple[Keys, int], Any]
"""What an object or a codec gave, by the keys that lead to the value and the value's id."""

_TENSORS = (Tensor, np.ndarray)
_PLAIN = (str, bytes, int, float, complex, type(None))


def in_order(keys: Iterable[Any]) -> list[Any]:
    """Return the keys of a dict in the order in which its objects are called: the same on all ranks.

    >>> in_order({"b": 0, "a": 0, 10: 0, 9: 0})
    [10, 9, 'a', 'b']
    """
    return sorted(keys, key=lambda key: (type(key).__name__, str(key)))


def is_object(value: Any) -> bool:
    """Return whether a value gives its state itself.

    >>> import torch
    >>> is_object(torch.nn.Linear(1, 1)), is_object({})
    (True, False)
    """
    return type(value) not in (dict, list, tuple) and isinstance(value, Stateful)


def ask_objects(state: Any, codecs: Mapping[type, Codec], most_depth: int) -> Asked:
    """Return the states of all objects within a state, and what codecs make of values.

    What cannot be stored is left for `flatten` to name: a state within itself, or one nested too deep.

    >>> import torch
    >>> [keys for keys, _ in ask_objects({"b": torch.nn.Linear(1, 1), "a": torch.nn.Linear(1, 1)}, {}, 60)]
    [('a',), ('b',)]
    """
    asked: Asked = {}
    above: set[int] = set()

    def is_leaf(value: Any) -> bool:
        return isinstance(value, _TENSORS) or (isinstance(value, _PLAIN) and type(value) not in codecs)

    def visit(value: Any, keys: Keys, depth: int) -> None:
        if is_leaf(value) or depth > most_depth or id(value) in above:
            return
        above.add(id(value))
        codec = codecs.get(type(value))
        if codec is not None:
            asked[keys, id(value)] = made = codec.encode(value)
            visit(made, keys, depth + 1)
        elif isinstance(value, PerRank):
            visit(value.value, keys, 0)
        elif is_object(value):
            asked[keys, id(value)] = made = value.state_dict()
            visit(made, keys, depth + 1)
        elif isinstance(value, Mapping):
            for key in in_order(key for key, child in value.items() if not is_leaf(child)):
                visit(value[key], (*keys, key), depth + 1)
        elif isinstance(value, list | tuple):
            for place, item in enumerate(value):
                visit(item, (*keys, place), depth + 1)
        above.discard(id(value))

    visit(state, (), 0)
    return asked
