"""Backward hooks of modules see gradients as DTensors.

torch attaches `register_full_backward_hook` and similar hooks to nodes of the graph, where gradients are plain and
local, and has no extension point for them. So importing this package replaces the method of torch that finds the nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from torch import Tensor
from torch.utils.hooks import BackwardHook

from shardwright.layout import Layout
from shardwright.tensor.gradients.engine import local_gradient, tag_gradient

__all__ = ["install"]


class _Node:
    """A node whose hooks get the gradients of tensors with these layouts as DTensors."""

    def __init__(self, node: Any, layouts: Sequence[Layout | None]) -> None:
        self._node, self._layouts = node, layouts

    def register_hook(self, hook: Callable[[Any, Any], Any]) -> Any:
        def tagged(given: Any, taken: Any) -> Any:
            seen = self._tagged(given), self._tagged(taken)
            answer = hook(*seen)
            return None if answer is None else tuple(map(self._plain, answer, seen[0], given, self._layouts))

        return self._node.register_hook(tagged)

    def _tagged(self, gradients: Sequence[Tensor | None]) -> tuple[Any, ...]:
        return tuple(
            gradient if gradient is None or layout is None else tag_gradient(gradient, layout)
            for gradient, layout in zip(gradients, self._layouts, strict=True)
        )

    def _plain(self, answer: Any, seen: Any, given: Tensor | None, layout: Layout | None) -> Any:
        if answer is seen:
            return given
        if answer is None or layout is None:
            return answer
        return local_gradient(answer, layout, "a backward hook of a module, for the gradient")


def install() -> tuple[Any, ...]:
    """Replace the method, and return the replacement."""
    original: Any = BackwardHook._apply_on_tensors

    @wraps(original)
    def apply_on_tensors(self: Any, attach: Callable[[Any], None], args: Any) -> Any:
        layouts = [getattr(value, "_layout", None) for value in args if isinstance(value, Tensor)]
        if not any(layouts):
            return original(self, attach, args)
        return original(self, lambda node: attach(_Node(node, layouts)), args)

    BackwardHook._apply_on_tensors = apply_on_tensors  # type: ignore[method-assign]  # torch offers no other place
    return (apply_on_tensors,)
