"""What users mark in a state: objects that have a state of their own, and values that belong to one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, final, runtime_checkable

__all__ = ["PerRank", "Stateful"]

T = TypeVar("T")


@runtime_checkable
class Stateful(Protocol):
    """An object that gives its state and takes one: modules, optimizers, schedulers, dataloaders.

    >>> import torch
    >>> isinstance(torch.nn.Linear(1, 1), Stateful)
    True
    """

    def state_dict(self) -> dict[str, Any]:
        """The state to be saved."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Takes a state that was saved."""
        ...


@final
@dataclass(slots=True)
class PerRank(Generic[T]):
    """A value that every rank has for itself: its random numbers, the place in its part of the data.

    Each rank's is saved, and given back to the rank of the same number. A rank that is not there when it is loaded has
    its own in the checkpoint still: that is a mismatch, unless `strict` is false. `read(path)` gives rank 0's, and
    where it has none, a `PerRank` of the others', by rank.

    >>> import torch
    >>> PerRank(torch.get_rng_state()).value.dtype
    torch.uint8
    """

    value: T
