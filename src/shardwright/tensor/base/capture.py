"""Capture of programs by `sw.compile`: which calls become one node of the graph, and which cannot be captured.

`sw.compile` runs a program once and records what it does to local tensors. torch's tracer records torch's
operators. Everything else (redistributions, random numbers, autograd Functions) goes through `capture_call`, which runs
the call and records it as one node, to be run again at every replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shardwright.errors import CaptureError
from shardwright.layout import Layout
from shardwright.tensor.base.tagging import DTensorBase, alias, tag
from shardwright.tensor.base.trace import source_line

__all__ = [
    "below_modes",
    "capture_call",
    "captured_function",
    "capturing",
    "is_capturing",
    "not_captured",
    "refuse_capture",
    "uncaptured_tensor_message",
]

_on = False  # per process; torch's proxy mode, which `capture_call` uses, is per thread


def is_capturing() -> bool:
    """Return whether a program is being captured, and this is not inside a captured call."""
    return _on


@contextmanager
def capturing(on: bool = True) -> Iterator[None]:
    """Capture calls inside the context; with `on=False`, pause capturing."""
    global _on
    before, _on = _on, on
    try:
        yield
    finally:
        _on = before


@contextmanager
def not_captured() -> Iterator[None]:
    """Keep what is computed inside the context, on its own tensors, out of the captured program."""
    if not _on:
        yield
        return
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing  # slow to import

    with capturing(False), disable_proxy_modes_tracing(), torch._C._DisablePythonDispatcher():
        yield


@contextmanager
def below_modes() -> Iterator[None]:
    """Hide what is computed inside the context from dispatch modes: planning is not part of the program."""
    if _on or not torch._C._len_torch_dispatch_stack():  # `not_captured` hides it from the capturing mode
        yield
        return
    with torch._C._DisableTorchDispatch():
        yield


def refuse_capture(what: str) -> None:
    """Raise CaptureError with this reason if a program is being captured."""
    if _on:
        raise CaptureError(f"{source_line()}: {what}")


def capture_call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the function and return its result; while a program is captured, the call becomes one node of the graph."""
    if not _on:
        return function(*args, **kwargs)
    from torch.fx.experimental import proxy_tensor  # slow to import, and needed only to compile

    mode = proxy_tensor.get_proxy_mode()
    if mode is None:  # another thread is capturing
        return function(*args, **kwargs)
    flat, spec = pytree.tree_flatten((args, kwargs))
    indices = [index for index, value in enumerate(flat) if isinstance(value, Tensor)]
    proxies = [_proxy_of(flat[index], mode.tracer) for index in indices]
    layouts = _layouts([flat[index] for index in indices])
    call = _CapturedCall(function, flat, spec, indices, layouts).as_function()
    with not_captured():
        result = function(*args, **kwargs)
        proxy = mode.tracer.create_proxy("call_function", call, tuple(proxies), {})
        with torch._C.DisableTorchFunctionSubclass():
            proxy_tensor.track_tensor_tree(result, proxy, constant=None, tracer=mode.tracer)
    return result


def _proxy_of(tensor: Tensor, tracer: Any) -> Any:
    from torch.fx.experimental.proxy_tensor import get_proxy_slot  # slow to import

    slot: Any = get_proxy_slot(tensor, tracer, None)
    if slot is None:
        raise CaptureError(f"{source_line()}: {uncaptured_tensor_message(tensor)}")
    return slot.proxy


def uncaptured_tensor_message(tensor: Tensor) -> str:
    """Return the error message for a tensor that the program did not get as an argument."""
    what = f"a DTensor {tensor._layout}" if isinstance(tensor, DTensorBase) else f"a tensor {tuple(tensor.shape)}"
    return (
        f"the program uses {what} that is neither an argument nor held by a module or variable that the program names: "
        "its values would be frozen; pass it as an argument"
    )


def _layouts(tensors: Sequence[Tensor]) -> list[Layout | None] | None:
    """Return the layouts of a call's tensors if it computes with DTensors; None if it sees local tensors."""
    if not torch._C._is_torch_function_enabled():
        return None
    layouts = [tensor._layout if isinstance(tensor, DTensorBase) else None for tensor in tensors]
    return layouts if any(layouts) else None


def captured_function(target: Any) -> Callable[..., Any] | None:
    """Return the function behind a node recorded by `capture_call`; None for other targets."""
    return getattr(target, "captured", None) if getattr(target, "__module__", "") == __name__ else None


class _CapturedCall:
    """A call that can be repeated with other tensors."""

    def __init__(
        self,
        function: Callable[..., Any],
        flat: list[Any],
        spec: pytree.TreeSpec,
        indices: list[int],
        layouts: list[Layout | None] | None,
    ) -> None:
        self.function, self.spec, self.indices, self.layouts = function, spec, indices, layouts
        self.flat = [None if index in indices else value for index, value in enumerate(flat)]  # keeps no tensor alive

    def as_function(self) -> Callable[..., Any]:
        """Return the call as a function of its tensors alone, with the name of the captured function."""
        args, kwargs = pytree.tree_unflatten(self.flat, self.spec)
        if self.indices == [0] and self.layouts is None and len(self.flat) == len(args) and not kwargs:
            function, rest = self.function, args[1:]

            def call(tensor: Tensor) -> Any:  # the most frequent: a redistribution
                return function(tensor, *rest)

        elif self.layouts is None:

            def call(*tensors: Tensor) -> Any:  # type: ignore[misc]  # a variant for any number of tensors
                return self._call(tensors)
        else:

            def call(*tensors: Tensor) -> Any:  # type: ignore[misc]  # likewise
                return self._call_tagged(tensors)

        call.__name__ = call.__qualname__ = getattr(self.function, "__name__", "call").strip("_<>")
        call.__module__ = __name__
        call.captured = self.function  # type: ignore[attr-defined]  # functions may have attributes
        return call

    def _call(self, tensors: Sequence[Tensor]) -> Any:
        flat = list(self.flat)
        for index, tensor in zip(self.indices, tensors, strict=True):
            flat[index] = tensor
        args, kwargs = pytree.tree_unflatten(flat, self.spec)
        return self.function(*args, **kwargs)

    def _call_tagged(self, tensors: Sequence[Tensor]) -> Any:
        assert self.layouts is not None
        given = []
        for tensor, layout in zip(tensors, self.layouts, strict=True):
            tagged = layout is None or (isinstance(tensor, DTensorBase) and tensor._layout is layout)
            given.append(tensor if tagged else tag(alias(tensor), layout))  # type: ignore[arg-type]  # None is tagged
        with torch._C._EnableTorchFunction():
            return self._call(given)
