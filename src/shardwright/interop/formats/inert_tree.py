"""Turn the inert values of a pickle into the tree of a checkpoint: containers, plain values, tensors by number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from shardwright.checkpoint.format.names import joined
from shardwright.checkpoint.format.values import encode_value
from shardwright.errors import FormatError, PickleError, StateError
from shardwright.interop.formats.pickled import Instance, Kind
from shardwright.interop.formats.pickled.values import DTensorRef, TensorRef

__all__ = ["TreeBuilder"]

_MAX_DEPTH = 60  # of the tree of a manifest
_MAX_NODES = 1 << 21  # a value that a pickle repeats counts each time
_RECORDS = ("argparse.Namespace", "types.SimpleNamespace")  # read as dicts
_KEYS = (str, int, float, bool, type(None))


@final
class TreeBuilder:
    """Builds trees; `tensor(name, value)` returns the number of a tensor. The number of nodes is bounded in total."""

    def __init__(self, where: str, tensor: Callable[[str, TensorRef | DTensorRef], int]) -> None:
        self._where, self._tensor = where, tensor
        self._nodes = _MAX_NODES

    def build(self, value: Any, name: str = "", depth: int = 0) -> Any:
        """Return the node of a value that is named `name`.

        >>> TreeBuilder("x", lambda name, ref: 0).build({"lr": 0.1, "betas": (1, 2)})
        ['d', 'lr', ['v', 0.1], 'betas', ['t', ['v', 1], ['v', 2]]]
        """
        self._nodes -= 1
        if depth > _MAX_DEPTH or self._nodes < 0:
            raise PickleError(
                f"{self._where}: values are nested more than {_MAX_DEPTH} deep, contain themselves, or are more than "
                f"{_MAX_NODES}"
            )
        match value:
            case TensorRef() | DTensorRef():
                return self._tensor(name, value)
            case dict():
                return self._mapping(value, name, depth)
            case list():
                return ["l", *(self.build(item, joined(name, at), depth + 1) for at, item in enumerate(value))]
            case tuple():
                return ["t", *(self.build(item, joined(name, at), depth + 1) for at, item in enumerate(value))]
            case Kind(value=constant) if constant is not None:
                return self._plain(constant, name)
            case Kind(name=text):
                return ["opaque", text, "it is the name of a type or a function, not a value"]
            case Instance(kind=kind, state=dict(state)) if kind.name in _RECORDS:
                return self._mapping(state, name, depth)
            case Instance(kind=kind):
                return ["opaque", kind.name, "it is an instance of a class, which is not created here"]
        return self._plain(value, name)

    def _mapping(self, value: dict[Any, Any], name: str, depth: int) -> Any:
        nodes: list[Any] = ["d"]
        for key, item in value.items():
            if type(key) not in _KEYS:
                return ["opaque", "dict", f"a key has the type {type(key).__name__}"]
            nodes += [key, self.build(item, joined(name, key), depth + 1)]
        return nodes

    def _plain(self, value: Any, name: str) -> Any:
        try:
            node = encode_value(value, name)
        except StateError as error:
            return ["opaque", type(value).__name__, str(error)]
        if node is None:
            return ["opaque", type(value).__name__, "it is not a plain value"]
        return node


def check_name(where: str, name: str) -> str:
    """Return the name of a tensor if it is valid Unicode."""
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise FormatError(f"{where}: the name of a tensor is not valid Unicode: {error}") from None
    return name
