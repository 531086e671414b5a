"""Interception is on while a backward pass runs user code, and off below autograd.

Hooks, Functions and activation checkpoints compute with DTensors in backward, so the engine runs with interception on.
But the operators that the engine itself calls get local tensors, some of them saved ones that are still DTensors. Most
are C++ kernels, which see only the local tensor. Python code below autograd would see a global shape: the handlers of
dispatch modes (FlopCounterMode, selective checkpointing, tracers) and torch's kernels for meta tensors. If there may be
such code, a dispatch mode on top of all others disables interception below it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.tensor.base.tagging import no_torch_function

__all__ = ["expect_plain_roots", "install", "run_backward"]

_engine = torch.autograd.Variable._execution_engine
_expected = False  # whether plain tensors may have DTensors in their history


class _Below(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own is untyped
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        with no_torch_function():
            return func(*args, **(kwargs or {}))


def run_backward(roots: Sequence[Any], seeds: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    """Run the autograd engine, with interception on above autograd and off below."""
    if torch._C._len_torch_dispatch_stack() or _any_meta(roots) or _any_meta(seeds):
        with _Below():  # type: ignore[no-untyped-call]  # likewise
            return _engine.run_backward(roots, seeds, *args, **kwargs)
    return _engine.run_backward(roots, seeds, *args, **kwargs)


def _any_meta(values: Sequence[Any]) -> bool:
    with no_torch_function():
        return any(isinstance(value, Tensor) and value.is_meta for value in values)


def expect_plain_roots() -> None:
    """Expect plain tensors with DTensors in their history from now on: `x.to_local().sum().backward()`."""
    global _expected
    _expected = True


def install() -> tuple[Any, ...]:
    """Replace the function with which torch starts a backward pass, and return the replacement."""
    original: Any = torch.autograd.graph._engine_run_backward

    @wraps(original)
    def engine_run_backward(roots: Any, *args: Any, **kwargs: Any) -> Any:
        if not _expected or _is_traced():
            return original(roots, *args, **kwargs)
        with torch._C._EnableTorchFunction():
            if torch._C._len_torch_dispatch_stack() or _any_meta(roots):
                with _Below():  # type: ignore[no-untyped-call]  # likewise
                    return original(roots, *args, **kwargs)
            return original(roots, *args, **kwargs)

    for module in (torch.autograd, torch.autograd.graph):
        module._engine_run_backward = engine_run_backward  # type: ignore[attr-defined]  # torch offers no other place
    return (engine_run_backward,)


def _is_traced() -> bool:
    """Return True inside tracers of torch (compilation, export), which hold no DTensors."""
    keys = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(key) is not None for key in (keys.PROXY, keys.FUNCTIONAL, keys.FAKE))
