"""`ParameterValue`, the class of parameters with a recorded use, and of values computed from such parameters alone."""

from __future__ import annotations

from typing import Any

from torch import nn

from shardwright.tensor.api.dtensor import DTensor
from shardwright.tensor.api.torch_hooks import functions_of, leave_eager, take_in_lists
from shardwright.tensor.base.parameter_use import copy_use, parameter_use
from shardwright.tensor.base.replaced import is_replaced, replacing
from shardwright.tensor.base.tagging import DTensorBase

__all__ = ["ParameterValue"]


class ParameterValue(DTensor):
    """A DTensor with a `ParameterUse`. Being no plain DTensor, it is not served by plans made without that use."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return DTensor.__torch_function__(func, types, args, kwargs)


def _keep_uses_on_load() -> None:
    """Make `load_state_dict(assign=True)`, which registers other tensors, keep the uses of parameters. Idempotent."""
    original: Any = nn.Module._load_from_state_dict
    if is_replaced(original):
        return

    @replacing(original)
    def _load_from_state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        before: dict[str, Any] = {name: tensor for name, tensor in self._parameters.items() if parameter_use(tensor)}
        original(self, *args, **kwargs)
        for name, tensor in before.items():
            after: Any = self._parameters.get(name)
            if isinstance(after, DTensorBase) and after._layout.mesh is tensor._layout.mesh:
                copy_use(after, tensor)

    nn.Module._load_from_state_dict = _load_from_state_dict  # type: ignore[method-assign]  # torch has no hook for all modules


take_in_lists(ParameterValue)
for _function in functions_of(ParameterValue):
    leave_eager(_function)
_keep_uses_on_load()
DTensorBase.parameter_values = ParameterValue  # for `set_parameter_use`, which is in a lower layer
