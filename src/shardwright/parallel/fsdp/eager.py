"""torch.compile leaves the gathering of units eager, and compiles the modules themselves.

A compiled model calls its fully sharded modules eagerly; the forward of each is a frame of its own, which is compiled.
"""

from __future__ import annotations

from typing import Any

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

from shardwright.parallel.fsdp.binding import Binding, OwnerHooks
from shardwright.parallel.fsdp.module import FSDPModule, UnshardHandle
from shardwright.parallel.units import PackGatheredParameters, Schedule, Unit
from shardwright.tensor.api.torch_hooks import functions_of, leave_eager

__all__ = ["install"]


def install() -> None:
    """Tell torch.compile which functions to leave eager. Call it once."""
    for kind in (Unit, Schedule, UnshardHandle, PackGatheredParameters):
        for function in functions_of(kind):
            leave_eager(function)
    for function in functions_of(Binding):
        if function.__name__ not in ("call", "gathered"):
            leave_eager(function)
    gathered: Any = Binding.gathered
    callers: list[Any] = [FSDPModule.__call__, Binding.call, gathered.__wrapped__]
    for caller in callers:
        caller._torchdynamo_disable = True
        set_code_exec_strategy(caller.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT))
    hooks: list[Any] = [OwnerHooks.before, OwnerHooks.after]
    for hook in hooks:  # compiled code inlines them, and they do nothing there
        set_code_exec_strategy(hook.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
