"""Count the writes to a tensor's memory, including those that autograd does not count.

A copy that looks like a view compares the counts to find out whether its base was written to. Autograd's version
counter is shared by a tensor and its views, but `x.data` has its own counter, and so have tensors that got the memory
of another by `x.data = y`, `x.set_(y)`, `copy.deepcopy` or unpickling. A storage that has several counters keeps all of
them, so that a write through any tensor is seen by all. They are kept as tensors without memory: a counter lives in a
tensor, and a tensor with memory would keep the storage alive.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from shardwright.layout import Layout
from shardwright.tensor.base.capture import is_capturing
from shardwright.tensor.base.tagging import DTensorBase, disabled, no_torch_function

__all__ = [
    "WATCH",
    "MemoryVersion",
    "count_write",
    "count_writes_of",
    "count_writes_through",
    "data_of",
    "has_aliases",
    "memory_version",
    "storage_of",
    "was_written",
]

_use_count = torch._C._storage_Use_Count
_get_data = Tensor.data.__get__  # type: ignore[attr-defined]  # a getset descriptor
_INFERENCE_COUNT = "_shardwright_inference_writes"  # an attribute of a storage: the number of writes
# Attributes of a storage: the counter that all `.data` share; the other counters, the first of which is that of the
# tensors that had the memory first; the writes that dropped counters had counted; the tensor whose `.data` was first
# asked for, as a weak reference.
_DATA_COUNTER, _OTHER_COUNTERS = "_shardwright_data_counter", "_shardwright_counters"
_DROPPED, _OWNER = "_shardwright_dropped_writes", "_shardwright_owner"


class _Watch:
    """Whether writes to inference tensors are counted: set once one of them has a copy that may become stale."""

    __slots__ = ("inference",)

    def __init__(self) -> None:
        self.inference = False


WATCH = _Watch()


class MemoryVersion(NamedTuple):
    """The version of a tensor's memory: it changes whenever the memory may have been written to or replaced."""

    storage: Any
    layout: Layout
    counts: tuple[int, ...]


def storage_of(tensor: Tensor) -> Any:
    """Return the storage of a tensor: the same object as long as it is referenced."""
    return disabled(Tensor.untyped_storage, (), (tensor,), {})


def memory_version(tensor: DTensorBase) -> MemoryVersion:
    """Return the current version of a tensor's memory.

    Inference tensors have no version counter: from the first call for one of them, operators count their writes with
    `count_write`.
    """
    with no_torch_function():
        storage: Any = storage_of(tensor)
        if tensor.is_inference():
            WATCH.inference = True
            return MemoryVersion(storage, tensor._layout, (storage.__dict__.get(_INFERENCE_COUNT, 0),))
        counters = storage.__dict__
        data, others = counters.get(_DATA_COUNTER), counters.get(_OTHER_COUNTERS, ())
        further = sum((other.writes for other in others), start=counters.get(_DROPPED, 0))
        return MemoryVersion(storage, tensor._layout, (tensor._version, 0 if data is None else data._version, further))


def has_aliases(tensor: DTensorBase) -> bool:
    """Return whether a tensor's memory was ever shared with a tensor that has another version counter."""
    return _OTHER_COUNTERS in storage_of(tensor).__dict__


def was_written(tensor: DTensorBase, before: MemoryVersion) -> bool:
    """Return whether a tensor's memory may have been written to, or replaced, since `before`."""
    now = memory_version(tensor)
    return now.storage is not before.storage or now.layout is not before.layout or now.counts != before.counts


def count_write(tensor: Tensor) -> None:
    """Count a write to a tensor, if it is an inference tensor. Call it if `WATCH.inference` is set."""
    with no_torch_function():
        if tensor.is_inference():
            counters = storage_of(tensor).__dict__
            counters[_INFERENCE_COUNT] = counters.get(_INFERENCE_COUNT, 0) + 1


def data_of(tensor: DTensorBase) -> Tensor:
    """Return `tensor.data`: an alias without history, whose writes count in `memory_version` only."""
    plain: Tensor = disabled(_get_data, (), (tensor,), {})
    with no_torch_function():
        if plain.is_inference() or is_capturing():
            return plain
        counters = storage_of(tensor).__dict__
        known = counters.get(_DATA_COUNTER)
        if known is None:
            _keep_first_counter(tensor)
            counters[_DATA_COUNTER], counters[_OWNER] = _without_memory(plain), TensorWeakRef(tensor)
            return plain
        counted: Tensor = known.detach()  # shares the counter
        counted.data = plain
        return counted


def count_writes_through(tensor: DTensorBase, source: DTensorBase) -> None:
    """Count writes through `tensor` as writes to the memory of `source`, which it now shares, and the reverse.

    Writes are counted as long as anything may write through that counter: `tensor` itself, and tensors that were
    detached from it and outlive it. So the counter of a tensor that was freed, or has other memory now, is dropped only
    if no tensors but those known here hold the storage.
    """
    with no_torch_function():
        if tensor.is_inference():
            return
        storage = storage_of(tensor)
        if not source.is_inference():
            _keep_first_counter(source)
        counters: list[_Counter] = storage.__dict__.setdefault(_OTHER_COUNTERS, [])
        current = [counter for counter in counters if counter.is_of(storage)]
        owner = storage.__dict__.get(_OWNER, _no_tensor)()
        holders = {id(counter.tensor()) for counter in current} | {id(tensor), id(source)}
        if owner is not None and storage_of(owner) is storage:
            holders.add(id(owner))
        if _use_count(storage._cdata) <= len(holders) + 1:  # and the storage object itself
            kept = [counter for counter in counters if counter.tensor is _no_tensor or counter.is_of(storage)]
            dropped = sum(counter.writes for counter in counters) - sum(counter.writes for counter in kept)
            storage.__dict__[_DROPPED] = storage.__dict__.get(_DROPPED, 0) + dropped
            counters[:] = kept
        if not any(counter.tensor() is tensor for counter in current):
            counters.append(_Counter(TensorWeakRef(tensor), tensor._cdata, _without_memory(tensor), tensor._version))


def count_writes_of(tensor: DTensorBase) -> None:
    """Count writes through a new tensor whose memory others may have with version counters of their own.

    Call it for all of them. It makes no weak reference, so that `torch.utils.swap_tensors` takes the tensor.
    """
    with no_torch_function():
        if not tensor.is_inference() and not _keep_first_counter(tensor):
            storage_of(tensor).__dict__[_OTHER_COUNTERS].append(_unattended(tensor))


def _keep_first_counter(tensor: DTensorBase) -> bool:
    """Keep the counter of a tensor with its storage, unless one is kept already; return whether it was kept."""
    counters = storage_of(tensor).__dict__
    if _OTHER_COUNTERS in counters:
        return False
    counters[_OTHER_COUNTERS] = [_unattended(tensor)]
    return True


def _unattended(tensor: DTensorBase) -> _Counter:
    """Return the counter of a tensor without a reference to the tensor: it is never dropped."""
    return _Counter(_no_tensor, 0, _without_memory(tensor), tensor._version)


def _no_tensor() -> None:
    """Return None, as a weak reference to a tensor that was freed does."""


class _Counter(NamedTuple):
    """The version counter of tensors that share a storage."""

    tensor: Any  # a weak reference to the tensor whose memory was replaced by that storage
    address: int  # of its C++ object, which `swap_tensors` replaces together with the counter
    counter: Tensor
    before: int  # the version when it was added: copies taken before do not become stale by that

    @property
    def writes(self) -> int:
        """The writes counted since it was added."""
        return self.counter._version - self.before

    def is_of(self, storage: Any) -> bool:
        """Return whether the tensor is alive, has this counter and still has this storage."""
        tensor = self.tensor()
        return tensor is not None and tensor._cdata == self.address and storage_of(tensor) is storage


def _without_memory(tensor: Tensor) -> Tensor:
    """Return a tensor that shares the version counter of another, but not its memory."""
    counter = tensor.detach()
    counter.data = counter.new_empty(0)
    return counter
