"""Tensors split into pieces: along a whole dimension and along a cut one alike, every piece is a view."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from shardwright.tensor.base.registry import composite, rule
from shardwright.tensor.base.strategy import Label, MeshStrategy, Operand, Strategies, index_strategies
from shardwright.tensor.base.tagging import DTensorBase
from shardwright.tensor.rules.shared.pick import pick_each, resolved

__all__: list[str] = []


def _pieces(input: Operand, dim: int, ranges: Sequence[tuple[int, int]]) -> MeshStrategy:
    front = [slice(None)] * input.dim(dim)
    return pick_each(input, [resolved((*front, slice(start, stop)), input.shape) for start, stop in ranges])


def _one_after_another(input: Operand, dim: int, split: Callable[[torch.Tensor], Any]) -> MeshStrategy:
    """The pieces that torch's own function makes of a tensor of this shape."""
    sizes = [piece.shape[dim] for piece in split(torch.empty(input.shape, device="meta"))]
    stops = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return _pieces(input, dim, [(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)])


@rule("split", "unsafe_split", "split_with_sizes", "unsafe_split_with_sizes")
def _split(tensor: Operand, split_size_or_sections: Any = None, dim: int = 0, **named: Any) -> MeshStrategy:
    sizes = next(iter(named.values())) if split_size_or_sections is None else split_size_or_sections
    return _one_after_another(tensor, dim, lambda whole: torch.functional.split(whole, sizes, dim))


@rule("chunk", "unsafe_chunk")
def _chunk(input: Operand, chunks: int, dim: int = 0) -> MeshStrategy:
    return _one_after_another(input, dim, lambda whole: whole.chunk(chunks, dim))


@rule("tensor_split")
def _tensor_split(input: Operand, indices_or_sections: Any = None, dim: int = 0, **named: Any) -> MeshStrategy | None:
    given = next(iter(named.values())) if indices_or_sections is None else indices_or_sections
    if isinstance(given, int):
        return _one_after_another(input, dim, lambda whole: whole.tensor_split(given, dim))
    if not isinstance(given, list | tuple):
        return None  # torch wants a tensor of them on the CPU, and reads it
    torch.empty(input.shape, device="meta").tensor_split(tuple(given), dim)  # torch's own checks, on every rank
    bounds = [0, *given, input.shape[input.dim(dim)]]
    return _pieces(input, dim, list(pairwise(bounds)))


@composite("tensor_split")
def _split_where(input: Any, indices_or_sections: Any = None, dim: int = 0, **named: Any) -> Any:
    """Where a tensor says; where there are no values, as many pieces as it says, if it is more than a number."""
    given = next(iter(named.values())) if indices_or_sections is None else indices_or_sections
    if not isinstance(given, DTensorBase):
        return NotImplemented
    return input.tensor_split([0] * given.numel() if given.is_meta else given.tolist(), dim)


def _split_along(dim: Callable[[int], int], least: int) -> Callable[..., Any]:
    def compose(input: Any, indices_or_sections: Any = None, **named: Any) -> Any:
        given = next(iter(named.values())) if indices_or_sections is None else indices_or_sections
        place = dim(input.ndim)
        if input.ndim < least or (isinstance(given, int) and (given <= 0 or input.shape[place] % given)):
            return NotImplemented  # torch says what is wrong with it
        return input.tensor_split(given, place)

    return compose


composite("hsplit")(_split_along(lambda ndim: int(ndim > 1), 1))
composite("vsplit")(_split_along(lambda _: 0, 2))
composite("dsplit")(_split_along(lambda _: 2, 3))


@rule("unbind")
def _unbind(input: Operand, dim: int = 0) -> Strategies:
    place = input.dim(dim)
    labels: list[Label] = [None if d == place else d for d in range(input.ndim)]
    outs = [[label for label in labels if label is not None]] * (input.shape[place] if input.ndim else 0)
    return Strategies(index_strategies([input], [labels], outs, terms=[[0]], reduction=None), fresh=False)
