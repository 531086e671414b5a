"""Calls as users spell them: `torch.mul(x, y)` is `torch.ops.aten.mul.Tensor(x, y)` at a third of the price."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

__all__ = ["spelled"]

_PLACES = tuple(getattr(torch._C, name) for name in ("_VariableFunctions", "_nn", "TensorBase", "_special", "_linalg"))


def spelled(node: fx.Node) -> Callable[..., Any]:
    """A function that does the same as the node's operator, with these arguments; the operator itself if none does."""
    overload: Any = node.target
    if overload.namespace != "aten" or not _shown(node):
        return overload  # type: ignore[no-any-return]  # an operator can be called
    args, kwargs = _examples(node.args), _examples(node.kwargs)
    try:
        expected = _calls_of(overload, args, kwargs)
    except Exception:  # noqa: BLE001  # what cannot be tried is not replaced
        return overload  # type: ignore[no-any-return]  # likewise
    for function in _candidates(overload.overloadpacket.__name__):
        try:
            fx.node._get_qualified_name(function)  # raises where generated code could not name it
            if _calls_of(function, args, kwargs) == expected:
                return function
        except Exception:  # noqa: BLE001  # it takes other arguments, or has no name
            continue
    return overload  # type: ignore[no-any-return]  # likewise


def _candidates(name: str) -> Iterator[Callable[..., Any]]:
    yield from (getattr(place, name) for place in _PLACES if hasattr(place, name))


def _shown(node: fx.Node) -> bool:
    return all("val" in other.meta for other in node.all_input_nodes)


def _examples(value: Any) -> Any:
    """The arguments with tensors of no values in the places of results."""

    def example(item: Any) -> Any:
        if not isinstance(item, fx.Node):
            return item
        val = item.meta["val"]
        return tree_map(lambda v: _meta(v) if isinstance(v, Tensor) else v, val)

    return fx.node.map_aggregate(value, example)


def _meta(tensor: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
    return made.requires_grad_(tensor.requires_grad)


class _Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own is untyped
    """Lists the operators that are run, with all of their arguments but tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self.calls: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def shown(value: Any) -> Any:
            return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else (type(value), value)

        self.calls.append((func, tree_map(shown, (args, kwargs or {}))))
        return func(*args, **(kwargs or {}))


def _calls_of(function: Callable[..., Any], args: Any, kwargs: Any) -> list[Any]:
    with _Seen() as seen:
        result = function(*args, **kwargs)
    history = tree_map(lambda v: type(v.grad_fn).__name__ if isinstance(v, Tensor) else None, result)
    return [*seen.calls, history]
