"""Register DTensor with torch, which keeps lists of known tensor types; done when `distribute` is imported.

- `foreach` optimizers and gradient clipping take lists of known tensor types only. Otherwise they process parameters
  one by one, with a collective for each norm.
- `torch.load` with `weights_only=True` calls only functions registered as safe; `rebuild` is one.
- `torch.compile` skips functions registered with it: operators of DTensors stay eager, plain code is compiled.
- Recurrent modules on CUDA copy their weights into one buffer for cuDNN; DTensors are left as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

from torch import nn, serialization
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.optim.optimizer import _foreach_supported_types as optimized
from torch.utils._foreach_utils import _foreach_supported_types as clipped

from shardwright.tensor.base.replaced import is_replaced, replacing
from shardwright.tensor.base.tagging import DTensorBase
from shardwright.tensor.dispatch import refusals, scripts
from shardwright.tensor.gradients import below_autograd, functions, module_hooks, saved_tensors

__all__ = ["functions_of", "leave_eager", "register_with_torch", "take_in_lists"]


def register_with_torch(kind: type[DTensorBase], rebuild: Callable[..., Any]) -> None:
    """Register DTensor and its unpickling function with torch, and replace methods of torch. Call it once."""
    take_in_lists(kind)
    serialization.add_safe_globals([rebuild])
    for function in functions_of(kind):
        leave_eager(function)
    refusals.install()
    scripts.install()
    for part in (module_hooks, functions, saved_tensors, below_autograd):
        for function in part.install():
            leave_eager(function)
    _keep_recurrent_weights()


def take_in_lists(kind: type[DTensorBase]) -> None:
    """Make `foreach` optimizers and gradient clipping take lists of tensors of this type."""
    for supported_types in (optimized, clipped):
        if kind not in supported_types:
            supported_types.append(kind)


def _keep_recurrent_weights() -> None:
    """Make `flatten_parameters` of recurrent modules skip DTensors. Idempotent."""
    original: Any = nn.RNNBase.flatten_parameters
    if is_replaced(original):
        return

    @replacing(original)
    def flatten_parameters(self: nn.RNNBase) -> None:
        if not any(isinstance(weight, DTensorBase) for weight in self._flat_weights):
            original(self)

    nn.RNNBase.flatten_parameters = flatten_parameters  # type: ignore[method-assign]  # torch has no hook for this


def functions_of(kind: type) -> Iterator[FunctionType]:
    """Yield the Python functions of a class: its methods, and the getters and setters of its properties."""
    for value in vars(kind).values():
        functions = (value.fget, value.fset) if isinstance(value, property) else (getattr(value, "__func__", value),)
        yield from (function for function in functions if isinstance(function, FunctionType))


def leave_eager(function: Any) -> None:
    """Make torch.compile run this function, and everything it calls, eagerly.

    `torch.compiler.disable` does the same with a wrapper, which costs every eager call half a microsecond.
    """
    function._torchdynamo_disable = True  # what torch.compiler.disable sets
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
