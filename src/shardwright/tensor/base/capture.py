"""Programs being captured: what is recorded as one step of them, and what cannot be part of one.

`sw.compile` runs a program once and records what it does to local tensors. Most of that is torch's own operators, which
torch records. What is not (movements, random numbers, autograd functions) passes through `capture_call`: it is run, and
recorded as one call, to be made again at every replay.
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

_on = False  # of the process: torch's own capturing, which `capture_call` asks for, is of the thread


def is_capturing() -> bool:
    """Whether a program is being captured, and this is not inside one of its steps."""
    return _on


@contextmanager
def capturing(on: bool = True) -> Iterator[None]:
    """Has steps recorded while it is open; `on=False`: not."""
    global _on
    before, _on = _on, on
    try:
        yield
    finally:
        _on = before


@contextmanager
def not_captured() -> Iterator[None]:
    """What is computed within it, on tensors of its own, is no part of a program that is being captured."""
    if not _on:
        yield
        return
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing  # slow to import

    with capturing(False), disable_proxy_modes_tracing(), torch._C._DisablePythonDispatcher():
        yield


@contextmanager
def below_modes() -> Iterator[None]:
    """Hide what is computed within it from dispatch modes: planning happens once, and is no part of the program."""
    if _on or not torch._C._len_torch_dispatch_stack():  # `not_captured` hides it from the mode that captures
        yield
        return
    with torch._C._DisableTorchDispatch():
        yield


def refuse_capture(what: str) -> None:
    """Raises where a program is being captured: this cannot be a part of one."""
    if _on:
        raise CaptureError(f"{source_line()}: {what}")


def capture_call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The function's result; where a program is being captured, its call becomes one step of it."""
    if not _on:
        return function(*args, **kwargs)
    from torch.fx.experimental import proxy_tensor  # slow to import, and needed only by those who compile

    mode = proxy_tensor.get_proxy_mode()
    if mode is None:  # another thread is capturing
        return function(*args, **kwargs)
    flat, spec = pytree.tree_flatten((args, kwargs))
    places = [place for place, value in enumerate(flat) if isinstance(value, Tensor)]
    proxies = [_proxy_of(flat[place], mode.tracer) for place in places]
    layouts = _layouts([flat[place] for place in places])
    step = _Step(function, flat, spec, places, layouts).as_function()
    with not_captured():
        result = function(*args, **kwargs)
        made = mode.tracer.create_proxy("call_function", step, tuple(proxies), {})
        with torch._C.DisableTorchFunctionSubclass():
            proxy_tensor.track_tensor_tree(result, made, constant=None, tracer=mode.tracer)
    return result


def _proxy_of(tensor: Tensor, tracer: Any) -> Any:
    from torch.fx.experimental.proxy_tensor import get_proxy_slot  # likewise

    slot: Any = get_proxy_slot(tensor, tracer, None)
    if slot is None:
        raise CaptureError(f"{source_line()}: {uncaptured_tensor_message(tensor)}")
    return slot.proxy


def uncaptured_tensor_message(tensor: Tensor) -> str:
    """What is wrong with a tensor that the program did not get as an argument."""
    what = f"a DTensor {tensor._layout}" if isinstance(tensor, DTensorBase) else f"a tensor {tuple(tensor.shape)}"
    return (
        f"the program uses {what} that is neither an argument of it nor held by a module or variable that it names: "
        "its values would be frozen; pass it as an argument"
    )


def _layouts(tensors: Sequence[Tensor]) -> list[Layout | None] | None:
    """How a step's tensors are laid out, where it computes with DTensors; None where it sees local tensors."""
    if not torch._C._is_torch_function_enabled():
        return None
    found = [tensor._layout if isinstance(tensor, DTensorBase) else None for tensor in tensors]
    return found if any(found) else None


def captured_function(target: Any) -> Callable[..., Any] | None:
    """The function that a recorded call makes as one step; None where it is no such call."""
    return getattr(target, "does", None) if getattr(target, "__module__", "") == __name__ else None


class _Step:
    """A call to be made again with other tensors in the places of tensors."""

    def __init__(
        self,
        function: Callable[..., Any],
        flat: list[Any],
        spec: pytree.TreeSpec,
        places: list[int],
        layouts: list[Layout | None] | None,
    ) -> None:
        self.function, self.spec, self.places, self.layouts = function, spec, places, layouts
        self.flat = [None if place in places else value for place, value in enumerate(flat)]  # keeps no tensor

    def as_function(self) -> Callable[..., Any]:
        """The step as a function of its tensors alone, named after what it does."""
        args, kwargs = pytree.tree_unflatten(self.flat, self.spec)
        if self.places == [0] and self.layouts is None and len(self.flat) == len(args) and not kwargs:
            function, rest = self.function, args[1:]

            def step(tensor: Tensor) -> Any:  # by far the most frequent: a movement
                return function(tensor, *rest)

        elif self.layouts is None:

            def step(*tensors: Tensor) -> Any:  # type: ignore[misc]  # a variant for any number of tensors
                return self._call(tensors)
        else:

            def step(*tensors: Tensor) -> Any:  # type: ignore[misc]  # likewise
                return self._call_tagged(tensors)

        step.__name__ = step.__qualname__ = getattr(self.function, "__name__", "step").strip("_<>")
        step.__module__ = __name__
        step.does = self.function  # type: ignore[attr-defined]  # functions may have attributes
        return step

    def _call(self, tensors: Sequence[Tensor]) -> Any:
        flat = list(self.flat)
        for place, tensor in zip(self.places, tensors, strict=True):
            flat[place] = tensor
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
