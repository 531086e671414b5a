"""Splits: along replicated and sharded dimensions, every part is a view."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from shardwright.tensor.base.registry import composite, rule
from shardwright.tensor.base.strategy import Label, MeshStrategy, Operand, Strategies, index_strategies
from shardwright.tensor.base.tagging import DTensorBase
from shardwright.tensor.rules.shared.basic_index import normalize_index, slices_strategy

__all__: list[str] = []


def _ranges_strategy(input: Operand, dim: int, ranges: Sequence[tuple[int, int]]) -> MeshStrategy:
    front = [slice(None)] * input.dim(dim)
    return slices_strategy(
        input, [normalize_index((*front, slice(start, stop)), input.shape) for start, stop in ranges]
    )


def _split_strategy(input: Operand, dim: int, split: Callable[[torch.Tensor], Any]) -> MeshStrategy:
    """Return the strategy of the parts that torch's own function gives for this shape."""
    sizes = [part.shape[dim] for part in split(torch.empty(input.shape, device="meta"))]
    stops = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return _ranges_strategy(input, dim, [(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)])


@rule("split", "unsafe_split", "split_with_sizes", "unsafe_split_with_sizes")
def _split(tensor: Operand, split_size_or_sections: Any = None, dim: int = 0, **named: Any) -> MeshStrategy:
    sizes = next(iter(named.values())) if split_size_or_sections is None else split_size_or_sections
    return _split_strategy(tensor, dim, lambda tensor_meta: torch.functional.split(tensor_meta, sizes, dim))


@rule("chunk", "unsafe_chunk")
def _chunk(input: Operand, chunks: int, dim: int = 0) -> MeshStrategy:
    return _split_strategy(input, dim, lambda tensor_meta: tensor_meta.chunk(chunks, dim))


@rule("tensor_split")
def _tensor_split(input: Operand, indices_or_sections: Any = None, dim: int = 0, **named: Any) -> MeshStrategy | None:
    given = next(iter(named.values())) if indices_or_sections is None else indices_or_sections
    if isinstance(given, int):
        return _split_strategy(input, dim, lambda tensor_meta: tensor_meta.tensor_split(given, dim))
    if not isinstance(given, list | tuple):
        return None  # torch takes a CPU tensor, and reads it
    torch.empty(input.shape, device="meta").tensor_split(tuple(given), dim)  # torch's own checks, on every rank
    bounds = [0, *given, input.shape[input.dim(dim)]]
    return _ranges_strategy(input, dim, list(pairwise(bounds)))


@composite("tensor_split")
def _tensor_split_by_values(input: Any, indices_or_sections: Any = None, dim: int = 0, **named: Any) -> Any:
    """Split at the values of a tensor; on meta tensors, into as many parts."""
    given = next(iter(named.values())) if indices_or_sections is None else indices_or_sections
    if not isinstance(given, DTensorBase):
        return NotImplemented
    return input.tensor_split([0] * given.numel() if given.is_meta else given.tolist(), dim)


def _split_along(dim: Callable[[int], int], min_ndim: int) -> Callable[..., Any]:
    def compose(input: Any, indices_or_sections: Any = None, **named: Any) -> Any:
        given = next(iter(named.values())) if indices_or_sections is None else indices_or_sections
        axis = dim(input.ndim)
        if input.ndim < min_ndim or (isinstance(given, int) and (given <= 0 or input.shape[axis] % given)):
            return NotImplemented  # torch raises the error
        return input.tensor_split(given, axis)

    return compose


composite("hsplit")(_split_along(lambda ndim: int(ndim > 1), 1))
composite("vsplit")(_split_along(lambda _: 0, 2))
composite("dsplit")(_split_along(lambda _: 2, 3))


@rule("unbind")
def _unbind(input: Operand, dim: int = 0) -> Strategies:
    axis = input.dim(dim)
    labels: list[Label] = [None if d == axis else d for d in range(input.ndim)]
    outs = [[label for label in labels if label is not None]] * (input.shape[axis] if input.ndim else 0)
    return Strategies(index_strategies([input], [labels], outs, terms=[[0]], reduction=None), fresh=False)
