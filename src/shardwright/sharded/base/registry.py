"""Operators of ShardedTensors, by torch function or by canonical name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from shardwright.errors import UnsupportedError
from shardwright.tensor.base.registry import canonical_name

__all__ = ["Handler", "call", "getters", "implements", "implements_named", "name_of", "unsupported"]

Handler: TypeAlias = Callable[[Callable[..., Any], Sequence[Any], dict[str, Any]], Any]

_NUMPY = {"axis": "dim", "keepdims": "keepdim"}  # torch accepts NumPy's names, too

_by_function: dict[Any, Handler] = {}
_by_name: dict[str, Handler] = {}


def implements(*functions: Any) -> Callable[[Handler], Handler]:
    """Register a handler for these torch functions; it gets the function, its arguments and keywords."""

    def register(handler: Handler) -> Handler:
        _by_function.update(dict.fromkeys(functions, handler))
        return handler

    return register


def implements_named(*names: str) -> Callable[[Handler], Handler]:
    """Register a handler for all variants of these operators (`torch.add`, `Tensor.add_`, `x + y`)."""

    def register(handler: Handler) -> Handler:
        _by_name.update(dict.fromkeys(names, handler))
        return handler

    return register


def getters(*names: str) -> list[Any]:
    """The functions torch dispatches when these tensor attributes are read, if this version has them."""
    return [getattr(Tensor, name).__get__ for name in names if hasattr(Tensor, name)]


def call(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call the function on ShardedTensors; raise an error with a remedy if it cannot be computed shard by shard."""
    handler = _by_function.get(func) or _by_name.get(canonical_name(func)[0])
    if not _NUMPY.keys().isdisjoint(kwargs):
        kwargs = {_NUMPY.get(name, name): value for name, value in kwargs.items()}
    if handler is None:
        if canonical_name(func)[0] in ("_foreach_norm", "stack"):
            raise unsupported(
                func,
                "ShardedTensor does not support this operator, as it cannot be computed shard by shard; for the norm "
                "of gradients use sharded.clip_grad_norm_",
            )
        if canonical_name(func)[0].startswith(("_foreach_", "_fused_")):
            raise UnsupportedError(
                f"{name_of(func)}: operators on lists of ShardedTensors are not supported: create the optimizer with "
                "foreach=False and fused=False, or use sharded.ShardedOptimizer, which passes it the local shards"
            )
        raise unsupported(func, "ShardedTensor does not support this operator, as it cannot be computed shard by shard")
    return handler(func, args, kwargs)


def name_of(func: Any) -> str:
    """The name of a function in error messages: `add_`, or the attribute name of a getter."""
    name = getattr(func, "__name__", None) or repr(func)
    if name in ("__get__", "__set__"):
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    return str(name)


def unsupported(func: Any, why: str) -> UnsupportedError:
    """Return the error for an operator that cannot be computed shard by shard, with reason and remedy."""
    return UnsupportedError(
        f"{name_of(func)}: {why}. Convert it to a DTensor, which supports ordinary torch code: "
        "sharded.to_dtensor(tensor, mesh, placements)"
    )
