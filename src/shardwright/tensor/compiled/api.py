"""`compile`: a function whose programs are captured once for each combination of layouts, and then replayed."""

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
from shardwright.tensor.compiled.guards import Held
from shardwright.tensor.compiled.guards_collect import Looks
from shardwright.tensor.compiled.program import Program
from shardwright.tensor.compiled.signature import Call, gather

__all__ = ["Compiled", "compile"]

MAX_PROGRAMS = 64  # of one function; the oldest goes first


@final
class Compiled:
    """A function, or a module, that replays what it does to local tensors. Made by `compile`.

    >>> import shardwright as sw
    >>> double = sw.compile(lambda x: x * 2)
    >>> double(sw.ones(2, mesh=sw.init_device_mesh("cpu", (1,)))).tolist()
    [2.0, 2.0]
    >>> len(double.programs)
    1
    """

    def __init__(self, function: Callable[..., Any], backend: Callable[..., Any] | str | None) -> None:
        self._function, self._backend = function, backend
        self._looks = Looks()
        self._programs: dict[tuple[Any, ...], Program] = {}
        if not isinstance(function, nn.Module):
            update_wrapper(self, function)
        self.__wrapped__ = function
        _all.add(self)

    @property
    def programs(self) -> list[torch.fx.GraphModule]:
        """The local programs captured so far, oldest first; print one's `.code`."""
        return [program.module for program in self._programs.values()]

    def forget(self) -> None:
        """Forgets the programs: the next call captures anew."""
        self._programs.clear()
        self._looks = Looks()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_capturing() or is_traced():
            return self._function(*args, **kwargs)  # a part of what is being captured, or traced by others
        call = gather(args, kwargs, self._function, self._looks)
        program = self._programs.get(call.key)
        return self._capture(args, kwargs, call) if program is None else program(call.tensors)

    def _capture(self, args: Any, kwargs: dict[str, Any], call: Call) -> Any:
        _refuse_backward_hooks(call.held)
        before = [list(held.tensors()) for held in call.held]
        result, program = capture(lambda: self._function(*args, **kwargs), call.tensors)
        for held, tensors in zip(call.held, before, strict=True):
            self._looks.refuse_changes(held, tensors)
        _refuse_exchanges(call.tensors, gather(args, kwargs, self._function, self._looks).tensors)
        if self._backend is not None:
            program.run = with_backend(program.module, self._backend)
        while len(self._programs) >= MAX_PROGRAMS:
            del self._programs[next(iter(self._programs))]
        self._programs[call.key] = program
        return result


def compile(function: Callable[..., Any] | None = None, *, backend: Callable[..., Any] | str | None = None) -> Any:
    """The function, captured: its local program, collectives included, replayed with no dispatch at all.

    The first call with some combination of layouts, dtypes, shapes and plain values runs the function and records what
    it does to this rank's local tensors. Later calls repeat that, differentiably: results and gradients are those of
    the function itself. Parameters and buffers of modules are inputs, whether a module is what is compiled or is named
    by the function. Plain values that the function names or its modules hold make the program: a change captures anew.
    A program that looks at values, or changes what it holds, cannot be captured: `CaptureError` says what, and why.

    `backend` is one of torch.compile's, which then compiles the local program between its movements ("inductor").

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
        raise ArgumentTypeError(f"compile: {type(function).__name__} is not callable: give a function or a module")
    return Compiled(function, backend)


def _refuse_backward_hooks(held: Sequence[Held]) -> None:
    """Refuses modules whose hooks only a backward of the module itself would call."""
    hooked = [label for one in held for label in one.backward_hooks]
    if hooked and torch.is_grad_enabled():
        raise CaptureError(
            f"{source_line()}: {hooked[0]} has a backward hook, which a replay would not call: remove it, or leave the "
            "module out of what is compiled"
        )


def _refuse_exchanges(before: Sequence[Any], after: Sequence[Any]) -> None:
    """Refuses a program that put other tensors into lists or dicts it was given: a replay could not do that."""
    if len(before) != len(after) or any(a is not b for a, b in zip(before, after, strict=True)):
        raise CaptureError(
            "the program puts other tensors into a list or dict that it was given, which a replay would not do: return "
            "them instead"
        )


_all: WeakSet[Compiled] = WeakSet()


def _forget_all() -> None:
    for compiled in list(_all):
        compiled.forget()


comm.on_forget(_forget_all)  # programs know this process's rank
leave_eager(Compiled.__call__)
