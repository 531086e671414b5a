"""Hears when torch's default CPU generator is seeded, saved or restored, by the functions of `torch` that do so.

Importing this package puts a wrapper around `torch.manual_seed`, `torch.get_rng_state` and `torch.set_rng_state`;
`fork_rng` and activation checkpointing call them as well. The functions do what they always did, and then tell. What
is done to `torch.default_generator` itself is not heard.
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
    """What is told."""

    def seeded(self) -> None:
        """Told after `torch.manual_seed`."""

    def saved(self, state: Tensor) -> None:
        """Told after `torch.get_rng_state` gave this state."""

    def restored(self, state: Tensor) -> None:
        """Told after `torch.set_rng_state` set this state."""


_listeners: WeakSet[Any] = WeakSet()


def listen(listener: Listener) -> None:
    """Tell this object from now on, as long as it lives."""
    _listeners.add(listener)


def _wrap(name: str, tell: Callable[[Listener, Any, Any], None]) -> None:
    """Replace a function of `torch` and `torch.random` by one that tells the listeners; once."""
    original = getattr(torch.random, name)
    if hasattr(original, "_shardwright_tells"):
        return

    @wraps(original)
    def telling(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        given = args[0] if args else next(iter(kwargs.values()), None)
        for listener in list(_listeners):
            tell(listener, given, result)
        return result

    telling._shardwright_tells = True  # type: ignore[attr-defined]  # a mark of our own
    for module in (torch, torch.random):
        setattr(module, name, telling)


_wrap("manual_seed", lambda listener, _, __: listener.seeded())
_wrap("get_rng_state", lambda listener, _, state: listener.saved(state))
_wrap("set_rng_state", lambda listener, state, __: listener.restored(state))
