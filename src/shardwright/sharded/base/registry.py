"""Which operators a ShardedTensor has, by torch function or by canonical name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from shardwright.errors import UnsupportedError
from shardwright.tensor.base.registry import canonical_name

__all__ = ["Handler", "call", "getters", "implements", "implements_named", "name_of", "unsupported"]

Handler: TypeAlias = Callable[[Callable[..., Any], Sequence[Any], dict[str, Any]], Any]

_NUMPY = {"axis": "dim", "keepdims": "keepdim"}  # names by which torch takes them, too

_by_function: dict[Any, Handler] = {}
_by_name: dict[str, Handler] = {}


def implements(*functions: Any) -> Callable[[Handler], Handler]:
    """Registers what answers these torch functions: it is called with the function, its arguments and keywords."""

    def register(handler: Handler) -> Handler:
        _by_function.update(dict.fromkeys(functions, handler))
        return handler

    return register


def implements_named(*names: str) -> Callable[[Handler], Handler]:
    """Registers what answers every spelling of these operators (`torch.add`, `Tensor.add_`, `x + y`)."""

    def register(handler: Handler) -> Handler:
        _by_name.update(dict.fromkeys(names, handler))
        return handler

    return register


def getters(*names: str) -> list[Any]:
    """What torch hands over when these attributes of a tensor are read; those of them that this torch has."""
    return [getattr(Tensor, name).__get__ for name in names if hasattr(Tensor, name)]


def call(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The function called on ShardedTensors, where it has a local meaning; else an error that says what to do."""
    handler = _by_function.get(func) or _by_name.get(canonical_name(func)[0])
    if not _NUMPY.keys().isdisjoint(kwargs):
        kwargs = {_NUMPY.get(name, name): value for name, value in kwargs.items()}
    if handler is None:
        if canonical_name(func)[0] in ("_foreach_norm", "stack"):
            raise unsupported(
                func,
                "a ShardedTensor has no such operator, as it cannot be computed shard by shard; of gradients, "
                "sharded.clip_grad_norm_ finds the norm",
            )
        if canonical_name(func)[0].startswith(("_foreach_", "_fused_")):
            raise UnsupportedError(
                f"{name_of(func)}: lists of ShardedTensors are not computed at once: make the optimizer with "
                "foreach=False and fused=False, or use sharded.ShardedOptimizer, which hands it the shards themselves"
            )
        raise unsupported(func, "a ShardedTensor has no such operator, as it cannot be computed shard by shard")
    return handler(func, args, kwargs)


def name_of(func: Any) -> str:
    """What an error calls a function: `add_`, or the attribute where it is the getter of one."""
    name = getattr(func, "__name__", None) or repr(func)
    if name in ("__get__", "__set__"):
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    return str(name)


def unsupported(func: Any, why: str) -> UnsupportedError:
    """The error for what is not computed shard by shard, with the reason and the way out."""
    return UnsupportedError(
        f"{name_of(func)}: {why}. Turn it into a DTensor, which computes with ordinary torch code: "
        "sharded.to_dtensor(tensor, mesh, placements)"
    )
