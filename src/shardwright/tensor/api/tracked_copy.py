"""`TrackedCopy`, the class of copies that stand in for views: using a stale one raises.

Indexing a sharded dimension gives a copy. Reading it after its base was written to raises, because torch's view would
show the new values. Writing to it also writes to the base if that is possible exactly, and raises before writing
anything if not. Changing its shape or memory in place raises, because the base could not follow.
"""

from __future__ import annotations

import copy
from typing import Any, NoReturn

from shardwright.errors import InPlaceError
from shardwright.tensor.api.dtensor import DTensor
from shardwright.tensor.api.strided import Strided
from shardwright.tensor.api.torch_hooks import functions_of, leave_eager
from shardwright.tensor.base import trace
from shardwright.tensor.base.copied import mark_copied, memory_owner, refuse_stale
from shardwright.tensor.base.registry import canonical_name
from shardwright.tensor.base.tagging import DTensorBase
from shardwright.tensor.dispatch.arguments import tensors_in
from shardwright.tensor.dispatch.dispatcher import PASS_FUNCTIONS
from shardwright.tensor.dispatch.reshape_in_place import RESHAPES
from shardwright.tensor.dispatch.storage_ops import EXPOSING
from shardwright.tensor.dispatch.write_through import write_through

__all__ = ["TrackedCopy"]

_READING = """to_local full_tensor redistribute item tolist numpy backward register_hook __array__ __bool__ __float__
__int__ __index__ __complex__ __contains__ __iter__ __format__ __repr__ __reduce_ex__""".split()
_REPLACING = ("set_", "resize_", "resize_as_", "detach_")
_OF_THE_OBJECT = frozenset(("__get__", "__set__"))  # attributes such as shape and grad belong to the copy itself
_CHANGE_THE_VIEW = RESHAPES | {"detach", "as_strided"}  # in place, these change the view, not its values


class TrackedCopy(Strided):
    """A copy that stands in for a view: `x[i]` along a sharded dimension."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, inplace = canonical_name(func)
        if func not in PASS_FUNCTIONS and name not in _OF_THE_OBJECT:
            for tensor in tensors_in((*args, *kwargs.values())):
                refuse_stale(name, tensor)
            if args and type(args[0]) is TrackedCopy and (inplace or name == "__setitem__"):
                if name in _CHANGE_THE_VIEW:
                    _refuse_change(name + "_", args[0])
                with trace.operation(name):
                    return write_through(func, *args, **kwargs)
        return super().__torch_function__(func, types, args, kwargs)

    def __copy__(self) -> DTensor:
        refuse_stale("copy.copy", self)
        other = super().__copy__()
        mark_copied(other, self._copied_by, self, sharing=self)
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        """Return a copy of a copy of the base, as torch copies a view and its base together."""
        refuse_stale("copy.deepcopy", self)
        known: DTensor | None = memo.get(id(self))
        if known is not None:
            return known
        result = super().__deepcopy__(memo)
        if "_is_param" not in self.__dict__:  # torch clones a parameter
            owner = memory_owner(self)
            base: Any = copy.deepcopy(owner._base_version[0].detach(), memo)
            mark_copied(result, self._copied_by, base)
            if owner is self and "_base_index" in self.__dict__:
                result._base_index = base, self._base_index[1]
        return result

    @property  # type: ignore[override]  # a DTensor, as DTensor's own
    def data(self) -> DTensor:
        refuse_stale("data", self)
        detached: DTensor = DTensor.data.fget(self)  # type: ignore[attr-defined]  # a property
        mark_copied(detached, self._copied_by, self, sharing=self)
        return detached

    @data.setter
    def data(self, _: Any) -> None:
        _refuse_change(".data =", self)


def _refuse_change(name: str, tensor: DTensorBase) -> NoReturn:
    raise InPlaceError(
        f"{name} of {tensor._layout}, which looks like a view but is a copy, because {tensor._copied_by} of a sharded "
        "dimension needed communication: its base could not follow. Use the out-of-place operator, or clone() it first"
    )


def _reading(name: str) -> Any:
    own = getattr(DTensor, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        refuse_stale(name, self)
        return own(self, *args, **kwargs)

    return method


def _refusing(name: str) -> Any:
    def method(self: Any, *_: Any, **__: Any) -> NoReturn:
        _refuse_change(name, self)

    return method


for _name in (*_READING, *EXPOSING):
    setattr(TrackedCopy, _name, _reading(_name))
for _name in _REPLACING:
    setattr(TrackedCopy, _name, _refusing(_name))
for _function in functions_of(TrackedCopy):
    leave_eager(_function)
DTensorBase.copies = TrackedCopy  # for `mark_copied`, which is in a lower layer
