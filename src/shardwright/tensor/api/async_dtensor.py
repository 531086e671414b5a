"""A redistribution under way: a DTensor that waits for its values when it is first used."""

from __future__ import annotations

from typing import Any

import torch

from shardwright.layout import Layout
from shardwright.tensor.api.dtensor import DTensor
from shardwright.tensor.base import trace
from shardwright.tensor.base.tagging import no_torch_function, tag
from shardwright.tensor.dispatch.arguments import tensors_in
from shardwright.tensor.redistribute import Moving, plan, start

__all__ = ["Waiting", "start_moving"]

# What is known before the values are. Torch asks for __torch_function__ while it decides whom to call: no time to wait.
_KNOWN = frozenset("__class__ __dict__ __torch_function__ _layout _moving sharding placements device_mesh wait".split())


class Waiting(DTensor):
    """A DTensor whose values are still being received. Any use of it waits, and it is an ordinary one from then on."""

    _moving: Moving

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
            if type(tensor) is Waiting:
                tensor.wait()
        return DTensor.__torch_function__(func, types, args, kwargs)


def start_moving(tensor: DTensor, source: Layout, target: Layout) -> DTensor:
    """The tensor under `target`, whose values are on their way."""
    with no_torch_function(), torch.no_grad():
        steps = plan(source, target, tensor.element_size())
        if trace.current() is not None:
            with trace.asked():
                trace.note_movement(source, target, 0, backward=False)
        moving = start(steps, tensor.clone())  # a copy: the tensor may be written to before all of it is sent
        result = tag(torch.empty(0, dtype=tensor.dtype, device=tensor.device), target)
    result.__class__ = Waiting
    result._moving = moving
    return result  # type: ignore[no-any-return]  # tag gives a DTensor
