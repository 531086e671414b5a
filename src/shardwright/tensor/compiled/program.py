"""A captured program: it takes local tensors and returns local tensors, tagged like the results of the function."""

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
    copied: str | None = None  # the operator that made it, if it is a copy that stands in for a view
    of_input: int | None = None  # the input it is a copy of
    of_output: int | None = None  # the output it is a copy of


@final
class Program:
    """A captured program, ready to replay. It holds no tensors except the program's own constants."""

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
        """Run the program on these tensors."""
        with no_torch_function():
            if self._sets_modes:
                with torch.set_grad_enabled(torch.is_grad_enabled()):  # restored even if a step raises
                    outputs = self.run(*tensors)
            else:
                outputs = self.run(*tensors)
            if self._single is not None and type(result := outputs[0]) is Tensor:  # the common case
                return tag(result, self._single)
        tagged = [_tagged(value, out) for value, out in zip(outputs, self._outs, strict=True)]
        for value, out in zip(tagged, self._outs, strict=True):
            if out.copied is not None:
                _mark(value, out, tensors, tagged)
        remaining = iter(tagged)
        return pytree.tree_unflatten(
            [next(remaining) if kept is None else kept[0] for kept in self._leaves], self._spec
        )


def _out(value: Tensor, inputs: Sequence[Tensor], values: Sequence[Tensor]) -> _Out:
    if not isinstance(value, DTensorBase):
        return _Out(None)
    refuse_stale("sw.compile: the result", value)
    base = value
    while is_copied(base):
        base = base._base_version[0]
    of_input, of_output = (
        next((index for index, tensor in enumerate(tensors) if tensor is base), None) for tensors in (inputs, values)
    )
    if base is value or (of_input is None and of_output is None):
        return _Out(value._layout)  # its base is not accessible, so it cannot become stale
    return _Out(value._layout, value._copied_by, of_input, of_output)


def _mark(value: DTensorBase, out: _Out, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    """Mark a result as a copy that stands in for a view, as it was during capture."""
    assert out.copied is not None
    base = inputs[out.of_input] if out.of_input is not None else outputs[out.of_output]  # type: ignore[index]  # one is given
    assert isinstance(base, DTensorBase)
    mark_copied(value, out.copied, base)


def _tagged(value: Tensor, out: _Out) -> Any:
    if out.layout is None:
        return alias(value) if isinstance(value, DTensorBase) else value
    if isinstance(value, DTensorBase):
        if value._layout is out.layout:
            return value  # an input, or a tensor returned twice
        value = alias(value)
    return tag(value, out.layout)
