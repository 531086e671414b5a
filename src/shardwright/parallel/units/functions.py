"""The autograd functions of a unit: gathering, whose gradient is a reduce-scatter, and the reverse.

One function gathers all parameters of a unit, so that autograd itself waits for the gradients of all of them before it
calls the backward, which reduces them in one collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["GatherParameters", "Gathering", "share"]


class Gathering(Protocol):
    """A unit, as its autograd functions see it."""

    def values(self) -> Sequence[Tensor]:
        """Return the gathered values, without gradients."""
        ...

    def reduce(
        self, gradients: Sequence[Tensor | None], needed: Sequence[bool], accumulates: bool
    ) -> list[Tensor | None]:
        """Reduce the gradients of all parameters; None for those that no rank has, or that are accumulated later."""
        ...

    def reduce_pieces(self, indices: tuple[int, ...], gradients: Sequence[Tensor]) -> list[Tensor]:
        """Reduce the gradients of some parameters and return this rank's pieces, at once."""
        ...

    def gather_pieces(self, indices: tuple[int, ...], pieces: Sequence[Tensor]) -> list[Tensor]:
        """Gather tensors that are split like some parameters, at once."""
        ...


def share(tensor: Tensor) -> Tensor:
    """Return a tensor on the same memory that is not a view: it has a version counter and a history of its own.

    >>> share(torch.ones(2))._is_view()
    False
    """
    fresh = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return fresh.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


class GatherParameters(torch.autograd.Function):
    """Return the gathered parameters of a unit; backward reduces their gradients in one collective."""

    @staticmethod
    def forward(ctx: Any, unit: Gathering, *_: Tensor) -> tuple[Tensor, ...]:
        ctx.unit = unit
        ctx.set_materialize_grads(False)
        outputs = tuple(share(value) for value in unit.values())
        frozen = [each for each, needs in zip(outputs, ctx.needs_input_grad[1:], strict=True) if not needs]
        ctx.mark_non_differentiable(*frozen)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        unit: Gathering = ctx.unit
        if not torch.is_grad_enabled():
            return (None, *unit.reduce(gradients, ctx.needs_input_grad[1:], _accumulates(ctx)))
        indices = tuple(
            index
            for index, (gradient, needs) in enumerate(zip(gradients, ctx.needs_input_grad[1:], strict=True))
            if gradient is not None and needs
        )
        given = [gradients[index] for index in indices]
        reduced = ReducePieces.apply(unit, indices, *given) if indices else ()  # type: ignore[no-untyped-call]  # torch's is untyped
        found = dict(zip(indices, reduced, strict=True))
        return (None, *(found.get(index) for index in range(len(gradients))))


def _accumulates(node: Any) -> bool:
    """Return whether this backward pass adds gradients to `.grad` of all inputs, and returns none of them."""
    try:
        return all(
            torch._C._will_engine_execute_node(following)
            for following, _ in node.next_functions
            if following is not None
        )
    except RuntimeError:  # torch.autograd.grad, which captures gradients of leaves
        return False


class ReducePieces(torch.autograd.Function):
    """Reduce gradients differentiably, for gradients of gradients."""

    @staticmethod
    def forward(ctx: Any, unit: Gathering, indices: tuple[int, ...], *gradients: Tensor) -> tuple[Tensor, ...]:
        ctx.unit, ctx.indices = unit, indices
        return tuple(unit.reduce_pieces(indices, gradients))

    @staticmethod
    def backward(ctx: Any, *pieces: Tensor) -> tuple[Tensor | None, ...]:
        gathered = GatherPieces.apply(ctx.unit, ctx.indices, *pieces)  # type: ignore[no-untyped-call]  # as above
        return (None, None, *gathered)


class GatherPieces(torch.autograd.Function):
    """Gather tensors that are split like parameters, differentiably."""

    @staticmethod
    def forward(ctx: Any, unit: Gathering, indices: tuple[int, ...], *pieces: Tensor) -> tuple[Tensor, ...]:
        ctx.unit, ctx.indices = unit, indices
        return tuple(unit.gather_pieces(indices, pieces))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        reduced = ReducePieces.apply(ctx.unit, ctx.indices, *gradients)  # type: ignore[no-untyped-call]  # as above
        return (None, None, *reduced)
