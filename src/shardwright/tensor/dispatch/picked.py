"""What looks like a view and is a copy: `x[i]` along a sharded dimension, `x.view(…)` that had to move its input.

Torch's view would see what is written to the original later. So a copy remembers how often the original had been
written to; where that has changed when it is read, it is picked anew, or refused where no index says how.
"""

from __future__ import annotations

from typing import Any

from shardwright.errors import InPlaceError
from shardwright.tensor.dispatch.call import map_tensors, tensors_in
from shardwright.tensor.dispatch.intercept import PASS_FUNCTIONS
from shardwright.tensor.dispatch.memory import EXPOSING
from shardwright.tensor.dispatch.registry import canonical_name
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.local import DTensorBase, version_of
from shardwright.tensor.moving.introduce import functions_of, leave_eager

__all__ = ["Picked", "current"]

_READING = """to_local full_tensor redistribute item tolist numpy backward register_hook __array__ __bool__ __float__
__int__ __index__ __complex__ __contains__ __iter__ __format__ __repr__ __copy__ __deepcopy__ __reduce_ex__""".split()
_OF_THE_OBJECT = frozenset(("__get__", "__set__"))  # attributes: shapes and gradients, which are this object's own


class Picked(DTensor):
    """A DTensor that was picked of another, and follows it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in PASS_FUNCTIONS and any(
            type(tensor) is Picked and _is_stale(tensor) for tensor in tensors_in((*args, *kwargs.values()))
        ):
            args, kwargs = _renewed(func, args, kwargs)
        return DTensor.__torch_function__(func, types, args, kwargs)


def current(tensor: DTensorBase) -> Any:
    """The tensor; of one that was picked of another which was written to since, what would be picked now."""
    if type(tensor) is not Picked or not _is_stale(tensor):
        return tensor
    origin = tensor.__dict__.get("_origin")
    if origin is None:
        raise InPlaceError(
            f"this tensor, {tensor._layout}, looks like a view but is a copy, because {tensor._copied} of a sharded "
            "dimension needed communication; the original was written to since, which a view would show and a copy "
            f"does not: call {tensor._copied} again after the write, or clone() it before, if the old values are meant"
        )
    base, index = origin
    version = version_of(base)
    known = tensor.__dict__.get("_renewed")
    if known is None or known[0] != version:
        known = tensor._renewed = version, current(base)[index]  # type: ignore[attr-defined]  # no other class has it
    return known[1]


def _is_stale(tensor: DTensorBase) -> bool:
    """Whether what it was picked of has been written to since."""
    if type(tensor) is not Picked:
        return False
    base, version = tensor._seen
    return (version is not None and version_of(base) != version) or _is_stale(base)


def _renewed(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments as they are now. What is written to stays the object it is: `write_through` picks it anew."""
    name, inplace = canonical_name(func)
    if name in _OF_THE_OBJECT:
        return args, kwargs
    kept = [args[0]] if args and (inplace or name == "__setitem__") else []
    kept += tensors_in((kwargs.get("out"),))
    return map_tensors(args, kwargs, lambda tensor: tensor if any(tensor is one for one in kept) else current(tensor))  # type: ignore[arg-type]  # only DTensors are mapped


def _reading(name: str) -> Any:
    own = getattr(DTensor, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return own(current(self), *args, **kwargs)

    return method


for _name in (*_READING, *EXPOSING):
    setattr(Picked, _name, _reading(_name))
for _function in functions_of(Picked):
    leave_eager(_function)
DTensorBase.copies = Picked  # `mark_copied` lies below DTensor
