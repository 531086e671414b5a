"""Replace operators by torch functions: `torch.mul(x, y)` costs a third of `torch.ops.aten.mul.Tensor(x, y)`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

__all__ = ["python_function"]

_NAMESPACES = tuple(
    getattr(torch._C, name) for name in ("_VariableFunctions", "_nn", "TensorBase", "_special", "_linalg")
)


def python_function(node: fx.Node) -> Callable[..., Any]:
    """Return a torch function equivalent to the node's operator for its arguments; the operator itself if none is."""
    overload: Any = node.target
    if overload.namespace != "aten" or not _has_examples(node):
        return overload  # type: ignore[no-any-return]  # an operator can be called
    args, kwargs = _examples(node.args), _examples(node.kwargs)
    try:
        expected = _calls_of(overload, args, kwargs)
    except Exception:  # noqa: BLE001  # the operator cannot be tried on meta tensors
        return overload  # type: ignore[no-any-return]  # likewise
    for function in _candidates(overload.overloadpacket.__name__):
        try:
            fx.node._get_qualified_name(function)  # raises if generated code could not refer to it
            if _calls_of(function, args, kwargs) == expected:
                return function
        except Exception:  # noqa: BLE001  # it takes other arguments, or cannot be named
            continue
    return overload  # type: ignore[no-any-return]  # likewise


def _candidates(name: str) -> Iterator[Callable[..., Any]]:
    yield from (getattr(space, name) for space in _NAMESPACES if hasattr(space, name))


def _has_examples(node: fx.Node) -> bool:
    return all("val" in other.meta for other in node.all_input_nodes)


def _examples(value: Any) -> Any:
    """Return the arguments with meta tensors in place of nodes."""

    def example(item: Any) -> Any:
        if not isinstance(item, fx.Node):
            return item
        val = item.meta["val"]
        return tree_map(lambda v: _meta(v) if isinstance(v, Tensor) else v, val)

    return fx.node.map_aggregate(value, example)


def _meta(tensor: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        meta = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
    return meta.requires_grad_(tensor.requires_grad)


class _CallRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own is untyped
    """Record the operators that run, with their arguments; of tensors only shape and dtype."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self.calls: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def recorded(value: Any) -> Any:
            return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else (type(value), value)

        self.calls.append((func, tree_map(recorded, (args, kwargs or {}))))
        return func(*args, **(kwargs or {}))


def _calls_of(function: Callable[..., Any], args: Any, kwargs: Any) -> list[Any]:
    with _CallRecorder() as recorder:
        result = function(*args, **kwargs)
    history = tree_map(lambda v: type(v.grad_fn).__name__ if isinstance(v, Tensor) else None, result)
    return [*recorder.calls, history]
