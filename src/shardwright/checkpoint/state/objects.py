"""Call the objects of a state for their own states, in the same order on all ranks.

`state_dict` and `load_state_dict` of an object may communicate, and ranks may have built their dicts in different
orders. In the order of each rank's dict, the calls could deadlock: the keys are sorted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from shardwright.checkpoint.format.values import Codec
from shardwright.checkpoint.state.marks import PerRank, Stateful

__all__ = ["ObjectStates", "in_order", "is_object", "object_states_of"]

Keys: TypeAlias = tuple[Any, ...]
ObjectStates: TypeAlias = dict[tuple[Keys, int], Any]
"""What an object or a codec returned, by the key path and the id of the value."""

_TENSORS = (Tensor, np.ndarray)
_PLAIN = (str, bytes, int, float, complex, type(None))


def in_order(keys: Iterable[Any]) -> list[Any]:
    """Return the keys of a dict in the order in which its objects are called: the same on all ranks.

    >>> in_order({"b": 0, "a": 0, 10: 0, 9: 0})
    [10, 9, 'a', 'b']
    """
    return sorted(keys, key=lambda key: (type(key).__name__, str(key)))


def is_object(value: Any) -> bool:
    """Return True if a value has `state_dict` and `load_state_dict`.

    >>> import torch
    >>> is_object(torch.nn.Linear(1, 1)), is_object({})
    (True, False)
    """
    return type(value) not in (dict, list, tuple) and isinstance(value, Stateful)


def object_states_of(state: Any, codecs: Mapping[type, Codec], max_depth: int) -> ObjectStates:
    """Return the states of all objects in a state, and what codecs return for their values.

    What cannot be stored is left for `flatten` to report: a state that contains itself, or is nested too deeply.

    >>> import torch
    >>> [keys for keys, _ in object_states_of({"b": torch.nn.Linear(1, 1), "a": torch.nn.Linear(1, 1)}, {}, 60)]
    [('a',), ('b',)]
    """
    states: ObjectStates = {}
    ancestors: set[int] = set()

    def is_leaf(value: Any) -> bool:
        return isinstance(value, _TENSORS) or (isinstance(value, _PLAIN) and type(value) not in codecs)

    def visit(value: Any, keys: Keys, depth: int) -> None:
        if is_leaf(value) or depth > max_depth or id(value) in ancestors:
            return
        ancestors.add(id(value))
        codec = codecs.get(type(value))
        if codec is not None:
            states[keys, id(value)] = inner = codec.encode(value)
            visit(inner, keys, depth + 1)
        elif isinstance(value, PerRank):
            visit(value.value, keys, 0)
        elif is_object(value):
            states[keys, id(value)] = inner = value.state_dict()
            visit(inner, keys, depth + 1)
        elif isinstance(value, Mapping):
            for key in in_order(key for key, child in value.items() if not is_leaf(child)):
                visit(value[key], (*keys, key), depth + 1)
        elif isinstance(value, list | tuple):
            for index, item in enumerate(value):
                visit(item, (*keys, index), depth + 1)
        ancestors.discard(id(value))

    visit(state, (), 0)
    return states
