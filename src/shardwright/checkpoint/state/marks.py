"""Types that users put into a state: objects with a state of their own, and values that belong to one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, final, runtime_checkable

__all__ = ["PerRank", "Stateful"]

T = TypeVar("T")


@runtime_checkable
class Stateful(Protocol):
    """An object with a state that can be saved and loaded: modules, optimizers, schedulers, dataloaders.

    >>> import torch
    >>> isinstance(torch.nn.Linear(1, 1), Stateful)
    True
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the state to be saved."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Load a state that was saved."""
        ...


@final
@dataclass(slots=True)
class PerRank(Generic[T]):
    """A value that differs between ranks: a random generator's state, the position in a rank's part of the data.

    The value of each rank is saved, and restored on the same rank. If a saved rank does not exist at load time, its
    value counts as a mismatch unless `strict` is False. `read(path)` returns the value of rank 0, and if it has none, a
    `PerRank` of the others' by rank.

    >>> import torch
    >>> PerRank(torch.get_rng_state()).value.dtype
    torch.uint8
    """

    value: T
