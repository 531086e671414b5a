"""`compile`: capture a function once for each combination of layouts, then replay it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import update_wrapper
from typing import Any, final
from weakref import WeakSet

import torch
from torch import nn

from shardwright import comm
from shardwright.errors import ArgumentTypeError, CaptureError
from shardwright.tensor.api.torch_hooks import leave_eager
from shardwright.tensor.base.capture import is_capturing
from shardwright.tensor.base.custom_op import is_traced
from shardwright.tensor.base.trace import source_line
from shardwright.tensor.compiled.backend import with_backend
from shardwright.tensor.compiled.capture import capture
from shardwright.tensor.compiled.guards import Guards
from shardwright.tensor.compiled.guards_collect import GuardCache
from shardwright.tensor.compiled.program import Program
from shardwright.tensor.compiled.signature import Call, describe_call

__all__ = ["Compiled", "compile"]

MAX_PROGRAMS = 64  # per function; the oldest is dropped first


@final
class Compiled:
    """A compiled function or module, as returned by `compile`.

    >>> import shardwright as sw
    >>> double = sw.compile(lambda x: x * 2)
    >>> double(sw.ones(2, mesh=sw.init_device_mesh("cpu", (1,)))).tolist()
    [2.0, 2.0]
    >>> len(double.programs)
    1
    """

    def __init__(self, function: Callable[..., Any], backend: Callable[..., Any] | str | None) -> None:
        self._function, self._backend = function, backend
        self._guards = GuardCache()
        self._programs: dict[tuple[Any, ...], Program] = {}
        if not isinstance(function, nn.Module):
            update_wrapper(self, function)
        self.__wrapped__ = function
        _compiled.add(self)

    @property
    def programs(self) -> list[torch.fx.GraphModule]:
        """The local programs captured so far, oldest first; print the `.code` of one."""
        return [program.module for program in self._programs.values()]

    def forget(self) -> None:
        """Drop the programs: the next call captures again."""
        self._programs.clear()
        self._guards = GuardCache()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_capturing() or is_traced():
            return self._function(*args, **kwargs)  # already being captured, or traced by torch
        call = describe_call(args, kwargs, self._function, self._guards)
        program = self._programs.get(call.key)
        return self._capture(args, kwargs, call) if program is None else program(call.tensors)

    def _capture(self, args: Any, kwargs: dict[str, Any], call: Call) -> Any:
        _refuse_backward_hooks(call.guards)
        before = [list(guards.tensors()) for guards in call.guards]
        result, program = capture(lambda: self._function(*args, **kwargs), call.tensors)
        for guards, tensors in zip(call.guards, before, strict=True):
            self._guards.check_unchanged(guards, tensors)
        _refuse_replaced_arguments(call.tensors, describe_call(args, kwargs, self._function, self._guards).tensors)
        if self._backend is not None:
            program.run = with_backend(program.module, self._backend)
        while len(self._programs) >= MAX_PROGRAMS:
            del self._programs[next(iter(self._programs))]
        self._programs[call.key] = program
        return result


def compile(function: Callable[..., Any] | None = None, *, backend: Callable[..., Any] | str | None = None) -> Any:
    """Return the function compiled: its local program, collectives included, is captured and replayed without dispatch.

    The first call with a combination of layouts, dtypes, shapes and plain values runs the function and records what it
    does to this rank's local tensors. Later calls replay that, differentiably, with the same results and gradients.
    Parameters and buffers of modules are inputs, whether the module is compiled itself or used by the function. Plain
    values that the function or its modules refer to are guarded: if one changes, the function is captured again. A
    function that reads values of tensors, or changes its state, cannot be captured: `CaptureError` says why.

    `backend` is a backend of torch.compile, such as "inductor", which then compiles the code between redistributions.

    >>> import torch, shardwright as sw
    >>> mesh = sw.init_device_mesh("cpu", (1,))
    >>> layer = sw.distribute_module(torch.nn.Linear(3, 2), mesh)
    >>> step = sw.compile(lambda x: layer(x).relu().sum())
    >>> x = sw.ones(4, 3, mesh=mesh, placements=[sw.Shard(0)])
    >>> for _ in range(2):  # captured, then replayed
    ...     step(x).backward()
    >>> print(layer.weight.grad.sharding)
    [2, 3] (0: R)
    """
    if function is None:
        return lambda function: compile(function, backend=backend)
    if not callable(function):
        raise ArgumentTypeError(f"compile: expected a function or a module, got {type(function).__name__}")
    return Compiled(function, backend)


def _refuse_backward_hooks(all_guards: Sequence[Guards]) -> None:
    """Raise if a module has backward hooks, which only an eager call of the module would run."""
    hooked = [label for guards in all_guards for label in guards.backward_hooks]
    if hooked and torch.is_grad_enabled():
        raise CaptureError(
            f"{source_line()}: {hooked[0]} has a backward hook, which a replay would not call: remove it, or do not "
            "compile the module"
        )


def _refuse_replaced_arguments(before: Sequence[Any], after: Sequence[Any]) -> None:
    """Raise if the function replaced tensors in lists or dicts among its arguments, which a replay would not do."""
    if len(before) != len(after) or any(a is not b for a, b in zip(before, after, strict=True)):
        raise CaptureError(
            "the program replaces tensors in a list or dict among its arguments, which a replay would not do: return "
            "them instead"
        )


_compiled: WeakSet[Compiled] = WeakSet()


def _forget_all() -> None:
    for compiled in list(_compiled):
        compiled.forget()


comm.on_forget(_forget_all)  # programs depend on this process's rank
leave_eager(Compiled.__call__)
