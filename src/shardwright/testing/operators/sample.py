"""A call to prove: a function, its arguments, and the tensors in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwright.tensor.base.strategy import Local

__all__ = ["Reference", "Sample", "refer"]


@dataclass(frozen=True, slots=True)
class Sample:
    """A call on unsharded tensors, which can be repeated with other tensors."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inplace: bool

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments, in order."""
        return list(tensors_in((*self.args, *self.kwargs.values())))

    def needs_gradient(self) -> tuple[bool, ...]:
        """Return which gradients to compare: of the tensors that require grad, or of all that can if none does."""
        tensors = self.tensors
        if any(tensor.requires_grad for tensor in tensors):
            return tuple(tensor.requires_grad for tensor in tensors)
        return tuple(tensor.dtype.is_floating_point or tensor.dtype.is_complex for tensor in tensors)

    def with_each(self, values: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments with the tensors replaced by these."""
        remaining = iter(values)

        def visit(value: Any) -> Any:
            if isinstance(value, Tensor):
                return next(remaining)
            return type(value)(visit(item) for item in value) if type(value) in (list, tuple) else value

        return [visit(value) for value in self.args], {name: visit(value) for name, value in self.kwargs.items()}

    def call(self, tensors: Sequence[Tensor], local: Local | None = None) -> list[Tensor]:
        """Call with these tensors and return the result tensors; for an in-place call, the first argument."""
        args, kwargs = self.with_each(tensors)
        result = self.func(*args, **kwargs) if local is None else local(self.func, args, kwargs)
        return [tensors[0]] if self.inplace else list(tensors_in((result,)))


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Return the tensors in nested arguments or results, in order; named tuples count as tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


@dataclass(frozen=True, slots=True)
class Reference:
    """The operator's results on unsharded tensors, seeds for backward (None: no gradient), and its gradients."""

    needs_gradient: tuple[bool, ...]
    outs: list[Tensor]
    seeds: list[Tensor | None]
    gradients: list[Tensor | None]


def refer(sample: Sample, needs_gradient: tuple[bool, ...], randn: Callable[[Tensor], Tensor]) -> Reference | None:
    """Run the call on unsharded tensors; None if gradients are requested and torch has none."""
    leaves = [
        tensor.detach().clone().requires_grad_(requires)
        for tensor, requires in zip(sample.tensors, needs_gradient, strict=True)
    ]
    outs = sample.call([leaf.clone() for leaf in leaves])  # leaves that require grad cannot be modified in place
    seeds = [randn(out) if out.requires_grad else None for out in outs]
    try:
        reference_gradients = gradients(outs, seeds, leaves)
    except (NotImplementedError, RuntimeError) as error:
        if any(text in str(error) for text in ("not implemented", "does not support", "ill-defined", "no autograd")):
            return None
        raise
    if any(needs_gradient) and not any(seed is not None for seed in seeds):
        return None
    return Reference(needs_gradient, [out.detach() for out in outs], seeds, reference_gradients)


def gradients(outs: Sequence[Tensor], seeds: Sequence[Tensor | None], leaves: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the gradients of the leaves that require grad; zeros for those that are not reached."""
    reaching = reaching_gradients(outs, seeds, leaves)
    return [
        torch.zeros_like(leaf) if gradient is None and leaf.requires_grad else gradient
        for gradient, leaf in zip(reaching, leaves, strict=True)
    ]


def reaching_gradients(
    outs: Sequence[Tensor], seeds: Sequence[Tensor | None], leaves: Sequence[Tensor]
) -> list[Tensor | None]:
    """Return the gradients of the leaves that require grad; None for those that are not reached."""
    roots = [(out, seed) for out, seed in zip(outs, seeds, strict=True) if out.requires_grad and seed is not None]
    inputs = [leaf for leaf in leaves if leaf.requires_grad]
    result: list[Tensor | None] = [None] * len(inputs)
    if roots and inputs:
        result = list(torch.autograd.grad([r[0] for r in roots], inputs, [r[1] for r in roots], allow_unused=True))
    remaining = iter(result)
    return [next(remaining) if leaf.requires_grad else None for leaf in leaves]
