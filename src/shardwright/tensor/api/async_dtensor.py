"""A redistribution under way: a DTensor that waits for its values when it is first used."""

from __future__ import annotations

from typing import Any

import torch

from shardwright.tensor.api.dtensor import DTensor
from shardwright.tensor.base.tagging import DTensorBase, no_torch_function
from shardwright.tensor.dispatch.arguments import tensors_in
from shardwright.tensor.redistribute import PendingRedistribution

__all__ = ["AsyncDTensor"]

# What is known before the values are. Torch asks for __torch_function__ while it decides whom to call: no time to wait.
_KNOWN = frozenset("__class__ __dict__ __torch_function__ _layout _moving sharding placements device_mesh wait".split())


class AsyncDTensor(DTensor):
    """A DTensor whose values are still being received. Any use of it waits, and it is an ordinary one from then on."""

    _moving: PendingRedistribution

    def wait(self) -> DTensor:
        """The tensor, once its values are there."""
        moving = self.__dict__.pop("_moving")
        self.__class__ = DTensor  # type: ignore[assignment]  # from here on it is one
        with no_torch_function(), torch.no_grad():
            torch.Tensor.set_(self, moving.wait())  # the memory, not DTensor's own set_, which takes a DTensor
        return self

    def __getattribute__(self, name: str) -> Any:
        if name not in _KNOWN and "_moving" in object.__getattribute__(self, "__dict__"):
            self.wait()
        return object.__getattribute__(self, name)  # not super(): its class may just have changed

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in (*tensors_in(args), *tensors_in((kwargs or {}).values())):
            if type(tensor) is AsyncDTensor:
                tensor.wait()
        return DTensor.__torch_function__(func, types, args, kwargs)


DTensorBase.pending = AsyncDTensor  # `redistribute` lies below DTensor
