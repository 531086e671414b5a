"""A captured program: local tensors in, local tensors out, tagged as the program's results were."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from shardwright.layout import Layout
from shardwright.tensor.local import DTensorBase, alias, no_torch_function, tag

__all__ = ["Program"]


class _Out(NamedTuple):
    layout: Layout | None  # None: a plain tensor
    copied: str | None  # it looks like a view, but is none


@final
class Program:
    """What was captured, ready to be run again. Holds no tensors but constants of the program's own."""

    def __init__(self, module: fx.GraphModule, result: Any) -> None:
        self.module = module
        self.run: Callable[..., Sequence[Tensor]] = module.forward  # on local tensors
        leaves, self._spec = pytree.tree_flatten(result)
        self._outs = [_out(value) for value in leaves if isinstance(value, Tensor)]
        self._leaves = [None if isinstance(value, Tensor) else (value,) for value in leaves]
        self._single = self._outs[0].layout if isinstance(result, DTensorBase) and not self._outs[0].copied else None
        self._sets_modes = any(node.target is torch._C._set_grad_enabled for node in module.graph.nodes)

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        """The program's result for these tensors."""
        with no_torch_function():
            if self._sets_modes:
                with torch.set_grad_enabled(torch.is_grad_enabled()):  # put back even where a step raises
                    found = self.run(*tensors)
            else:
                found = self.run(*tensors)
            if self._single is not None and type(result := found[0]) is Tensor:  # by far the most frequent
                return tag(result, self._single)
        each = iter([_tagged(value, out) for value, out in zip(found, self._outs, strict=True)])
        return pytree.tree_unflatten([next(each) if kept is None else kept[0] for kept in self._leaves], self._spec)


def _out(value: Tensor) -> _Out:
    if not isinstance(value, DTensorBase):
        return _Out(None, None)
    return _Out(value._layout, value.__dict__.get("_copied"))


def _tagged(value: Tensor, out: _Out) -> Any:
    if out.layout is None:
        return alias(value) if isinstance(value, DTensorBase) else value
    if isinstance(value, DTensorBase):
        if value._layout is out.layout:
            return value  # an input, or one tensor that is returned twice
        value = alias(value)
    tagged = tag(value, out.layout)
    if out.copied is not None:
        tagged._copied = out.copied
    return tagged
