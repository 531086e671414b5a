"""Autograd functions of your own, on DTensors: gradients and saved tensors come tagged with their layouts.

Autograd hands a `torch.autograd.Function` what it has: plain local gradients, and most saved tensors as plain local
tensors. `tagged_function` puts the layouts back on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import MixedTensorsError
from shardwright.layout import Layout
from shardwright.tensor.gradients.engine import gradient_layout
from shardwright.tensor.local import DTensorBase, alias, no_torch_function, tag
from shardwright.tensor.moving.movement import move
from shardwright.tensor.types import dual

__all__ = ["tagged_function"]


def tagged_function(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply`, with a backward that sees DTensors where its forward did.

    In `backward`, gradients and `ctx.saved_tensors` are DTensors; what it returns may have any layout, and is
    brought to that of the input's gradient. Both forms of a Function work, with `setup_context` and without.

    >>> import torch, shardwright as sw
    >>> class Cube(torch.autograd.Function):
    ...     @staticmethod
    ...     def forward(ctx, x):
    ...         ctx.save_for_backward(x)
    ...         return x * x * x
    ...     @staticmethod
    ...     def backward(ctx, gradient):
    ...         return 3 * ctx.saved_tensors[0] ** 2 * gradient
    >>> x = sw.full((2,), 2.0, mesh=sw.init_device_mesh("cpu", (1,)), placements=[sw.Shard(0)], requires_grad=True)
    >>> sw.tensor.tagged_function(Cube)(x).sum().backward()
    >>> x.grad.full_tensor()
    tensor([12., 12.])
    """
    tagged = type(f"Tagged{function.__name__}", (torch.autograd.Function,), _methods(function))

    def apply(*args: Any) -> Any:
        layouts: list[Layout | None] = []
        result = tagged.apply(layouts, *args)  # type: ignore[attr-defined]  # it is a Function
        results = result if isinstance(result, tuple) else (result,)
        for value, layout in zip(results, layouts, strict=True):
            if layout is not None and type(value) is Tensor:
                tag(value, layout)  # autograd made a new object of an input that was returned
        return result

    return apply


def _methods(function: type[torch.autograd.Function]) -> dict[str, Any]:
    separate = function.setup_context is not torch.autograd.function._SingleLevelFunction.setup_context

    def forward(ctx: Any, layouts: list[Layout | None], *args: Any) -> Any:
        ctx.shardwright_ins = _layouts(args)
        if separate:
            result = function.forward(*args)
            function.setup_context(_Context(ctx), args, result)
        else:
            result = function.forward(_Context(ctx), *args)
        ctx.shardwright_outs = _layouts(result if isinstance(result, tuple) else (result,))
        layouts.extend(ctx.shardwright_outs)
        return result

    def backward(ctx: Any, *gradients: Any) -> Any:
        tagged = [_tagged(value, layout) for value, layout in zip(gradients, ctx.shardwright_outs, strict=True)]
        given = function.backward(_Context(ctx), *tagged)
        answers = given if isinstance(given, tuple) else (given,)
        named = zip(answers, ctx.shardwright_ins, strict=True)
        return None, *(_local(value, layout, function.__name__) for value, layout in named)

    return {"forward": staticmethod(forward), "backward": staticmethod(backward)}


def _layouts(values: Sequence[Any]) -> list[Layout | None]:
    return [value._layout if isinstance(value, DTensorBase) else None for value in values]


def _tagged(gradient: Any, layout: Layout | None) -> Any:
    if gradient is None or layout is None or isinstance(gradient, DTensorBase):
        return gradient
    return tag(alias(gradient), gradient_layout(layout))


def _local(gradient: Any, layout: Layout | None, name: str) -> Any:
    """A gradient as autograd wants it: local, of the dual layout of the input."""
    if gradient is None or layout is None:
        return gradient
    if not isinstance(gradient, DTensorBase):
        raise MixedTensorsError(f"{name}.backward returned a plain tensor for an input {layout}: return a DTensor")
    with no_torch_function():
        moved = move(gradient, gradient._layout, dual(layout))
        return moved if type(moved) is Tensor else moved.view_as(moved)


class _Context:
    """A Function's context, in which saved tensors keep their layouts. Everything else is the context's own."""

    def __init__(self, context: Any) -> None:
        object.__setattr__(self, "_context", context)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._context, name, value)

    @property
    def needs_input_grad(self) -> tuple[bool, ...]:
        """One for each argument of the user's own function."""
        return self._context.needs_input_grad[1:]  # type: ignore[no-any-return]  # torch's tuple

    def save_for_backward(self, *tensors: Any) -> None:
        """Saves tensors, and how they are laid out."""
        self._context.shardwright_saved = _layouts(tensors)
        self._context.save_for_backward(*tensors)

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        """What was saved, laid out as it was."""
        saved = zip(self._context.saved_tensors, self._context.shardwright_saved, strict=True)
        return tuple(
            value if layout is None or value is None or isinstance(value, DTensorBase) else tag(alias(value), layout)
            for value, layout in saved
        )
