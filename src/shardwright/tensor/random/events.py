"""Notify listeners when torch's default CPU generator is seeded, saved or restored.

Importing this package wraps `torch.manual_seed`, `torch.get_rng_state` and `torch.set_rng_state`, which `fork_rng` and
activation checkpointing call as well. The wrappers call the original function, then the listeners. Calls of methods of
`torch.default_generator` itself are not noticed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor

__all__ = ["Listener", "listen"]


class Listener(Protocol):
    """Methods that are called on events of the generator."""

    def seeded(self) -> None:
        """Called after `torch.manual_seed`."""

    def saved(self, state: Tensor) -> None:
        """Called after `torch.get_rng_state` returned this state."""

    def restored(self, state: Tensor) -> None:
        """Called after `torch.set_rng_state` set this state."""


_listeners: WeakSet[Any] = WeakSet()


def listen(listener: Listener) -> None:
    """Notify this object from now on, as long as it is alive."""
    _listeners.add(listener)


def _wrap(name: str, notify: Callable[[Listener, Any, Any], None]) -> None:
    """Replace a function of `torch` and `torch.random` by one that notifies the listeners. Idempotent."""
    original = getattr(torch.random, name)
    if hasattr(original, "_shardwright_tells"):
        return

    @wraps(original)
    def notifying(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        given = args[0] if args else next(iter(kwargs.values()), None)
        for listener in list(_listeners):
            notify(listener, given, result)
        return result

    notifying._shardwright_tells = True  # type: ignore[attr-defined]  # a mark of our own
    for module in (torch, torch.random):
        setattr(module, name, notifying)


_wrap("manual_seed", lambda listener, _, __: listener.seeded())
_wrap("get_rng_state", lambda listener, _, state: listener.saved(state))
_wrap("set_rng_state", lambda listener, state, __: listener.restored(state))
