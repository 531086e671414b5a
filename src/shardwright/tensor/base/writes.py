"""Count the writes to a tensor's memory, including those that autograd does not count.

A copy that looks like a view compares the counts to find out whether its original was written to. Autograd's version
counter is shared by a tensor and its views, but `x.data` has a counter of its own, and after `x.data = y` or
`x.set_(y)` the memory of `y` is written through the counter of `x` too. These further counters are kept on the storage,
as tensors without memory: a counter lives in a tensor, and a tensor with memory would keep the storage alive.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from shardwright.layout import Layout
from shardwright.tensor.base.capture import is_recording
from shardwright.tensor.base.tagging import DTensorBase, disabled, no_torch_function

__all__ = ["Written", "count_writes_through", "data_of", "storage_of", "was_written", "writes_to"]

_get_data = Tensor.data.__get__  # type: ignore[attr-defined]  # a getset descriptor
_OF_DATA, _OF_OTHERS = "_shardwright_data_counter", "_shardwright_counters"  # attributes of a storage


class Written(NamedTuple):
    """The state of a tensor's memory, as far as it can be told without looking at values."""

    storage: Any
    layout: Layout
    counts: tuple[int, ...]


def storage_of(tensor: Tensor) -> Any:
    """Return the storage of a tensor: the same object as long as anything holds it."""
    return disabled(Tensor.untyped_storage, (), (tensor,), {})


def writes_to(tensor: DTensorBase) -> Written:
    """Return the present state of a tensor's memory. Tensors of inference mode do not count writes."""
    with no_torch_function():
        storage: Any = storage_of(tensor)
        if tensor.is_inference():
            return Written(storage, tensor._layout, ())
        counters = storage.__dict__
        data, others = counters.get(_OF_DATA), counters.get(_OF_OTHERS, {})
        past = 0 if data is None else data._version
        return Written(storage, tensor._layout, (tensor._version, past, *(other._version for other in others.values())))


def was_written(tensor: DTensorBase, before: Written) -> bool:
    """Return whether a tensor's memory may have been written to, or replaced, since `before`."""
    now = writes_to(tensor)
    return now.storage is not before.storage or now.layout is not before.layout or now.counts != before.counts


def data_of(tensor: DTensorBase) -> Tensor:
    """Return `tensor.data`: an alias without history, whose writes autograd does not count and `writes_to` does."""
    plain: Tensor = disabled(_get_data, (), (tensor,), {})
    with no_torch_function():
        if plain.is_inference() or is_recording():
            return plain
        counters = storage_of(tensor).__dict__
        known = counters.get(_OF_DATA)
        if known is None:
            counters[_OF_DATA] = _without_memory(plain)
            return plain
        counted: Tensor = known.detach()  # it shares the counter
        counted.data = plain
        return counted


def count_writes_through(tensor: DTensorBase) -> None:
    """Count writes through `tensor` as writes to the memory it has just been given."""
    with no_torch_function():
        if not tensor.is_inference():
            counters = storage_of(tensor).__dict__.setdefault(_OF_OTHERS, {})
            counters[id(tensor)] = _without_memory(tensor)


def _without_memory(tensor: Tensor) -> Tensor:
    """Return a tensor that shares the version counter of another, and none of its memory."""
    counter = tensor.detach()
    counter.data = counter.new_empty(0)
    return counter
