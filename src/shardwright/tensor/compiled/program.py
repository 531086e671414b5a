"""A captured program: local tensors in, local tensors out, tagged as the program's results were."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from shardwright.layout import Layout
from shardwright.tensor.base.copied import is_copied, mark_copied, refuse_stale
from shardwright.tensor.base.tagging import DTensorBase, alias, no_torch_function, tag

__all__ = ["Program"]


class _Out(NamedTuple):
    layout: Layout | None  # None: a plain tensor
    copied: str | None = None  # it looks like a view, but is a copy: which operator made it
    of_input: int | None = None  # the input that it is a copy of
    of_output: int | None = None  # the output that it is a copy of


@final
class Program:
    """What was captured, ready to be run again. Holds no tensors but constants of the program's own."""

    def __init__(self, module: fx.GraphModule, result: Any, inputs: Sequence[Tensor]) -> None:
        self.module = module
        self.run: Callable[..., Sequence[Tensor]] = module.forward  # on local tensors
        leaves, self._spec = pytree.tree_flatten(result)
        values = [value for value in leaves if isinstance(value, Tensor)]
        self._outs = [_out(value, inputs, values) for value in values]
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
        tagged = [_tagged(value, out) for value, out in zip(found, self._outs, strict=True)]
        for value, out in zip(tagged, self._outs, strict=True):
            if out.copied is not None:
                _mark(value, out, tensors, tagged)
        each = iter(tagged)
        return pytree.tree_unflatten([next(each) if kept is None else kept[0] for kept in self._leaves], self._spec)


def _out(value: Tensor, inputs: Sequence[Tensor], values: Sequence[Tensor]) -> _Out:
    if not isinstance(value, DTensorBase):
        return _Out(None)
    refuse_stale("sw.compile: what the program returns", value)
    base = value
    while is_copied(base):
        base = base._base_version[0]
    of_input, of_output = (
        next((place for place, tensor in enumerate(given) if tensor is base), None) for given in (inputs, values)
    )
    if base is value or (of_input is None and of_output is None):
        return _Out(value._layout)  # nobody can write to what it is a copy of
    return _Out(value._layout, value._copied_by, of_input, of_output)


def _mark(value: DTensorBase, out: _Out, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    """Mark a result as a copy that looks like a view, as the program that was captured did."""
    assert out.copied is not None
    base = inputs[out.of_input] if out.of_input is not None else outputs[out.of_output]  # type: ignore[index]  # one is given
    assert isinstance(base, DTensorBase)
    mark_copied(value, out.copied, base)


def _tagged(value: Tensor, out: _Out) -> Any:
    if out.layout is None:
        return alias(value) if isinstance(value, DTensorBase) else value
    if isinstance(value, DTensorBase):
        if value._layout is out.layout:
            return value  # an input, or one tensor that is returned twice
        value = alias(value)
    return tag(value, out.layout)
