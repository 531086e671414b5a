"""`AsyncDTensor`: the result of an asynchronous redistribution, which waits when it is first used."""

from __future__ import annotations

from typing import Any

import torch

from shardwright.tensor.api.dtensor import DTensor
from shardwright.tensor.base.tagging import DTensorBase, no_torch_function
from shardwright.tensor.dispatch.arguments import tensors_in
from shardwright.tensor.redistribute import PendingRedistribution

__all__ = ["AsyncDTensor"]

# Attributes that do not need the values. torch reads __torch_function__ before dispatching, when waiting is too early.
_KNOWN = frozenset(
    "__class__ __dict__ __torch_function__ _layout _pending sharding placements device_mesh wait".split()
)


class AsyncDTensor(DTensor):
    """A DTensor whose values are still being received. Any use waits, and makes it an ordinary DTensor."""

    _pending: PendingRedistribution

    def wait(self) -> DTensor:
        """Wait for the values and return the tensor."""
        pending = self.__dict__.pop("_pending")
        self.__class__ = DTensor  # type: ignore[assignment]  # an ordinary DTensor from now on
        with no_torch_function(), torch.no_grad():
            torch.Tensor.set_(self, pending.wait())  # not DTensor.set_, which takes a DTensor
        return self

    def __getattribute__(self, name: str) -> Any:
        if name not in _KNOWN and "_pending" in object.__getattribute__(self, "__dict__"):
            self.wait()
        return object.__getattribute__(self, name)  # not super(): the class may have just changed

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in (*tensors_in(args), *tensors_in((kwargs or {}).values())):
            if type(tensor) is AsyncDTensor:
                tensor.wait()
        return DTensor.__torch_function__(func, types, args, kwargs)


DTensorBase.pending = AsyncDTensor  # for `redistribute`, which is in a lower layer
