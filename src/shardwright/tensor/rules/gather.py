"""Elements chosen by tensors of numbers: read (`gather`), written (`scatter`) and added up (`index_add`).

The dimension that the numbers run over stays whole; all others are independent of each other, and may be cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwright.tensor.registry import composite, rule
from shardwright.tensor.rules.notation import Label, Labels, Operand, Ways, index_ways

__all__ = ["advanced_ways", "written_ways"]


def _advanced_labels(input: Operand, indices: Sequence[Operand | None]) -> tuple[list[Labels], Labels]:
    """Labels of the input and the tensors of numbers, and of the result, as torch arranges its dimensions."""
    numbers = [index for index in indices if index is not None]
    shape = torch.broadcast_shapes(*(i.shape for i in numbers))  # type: ignore[no-untyped-call]  # torch leaves it out
    new: list[Label] = [("chosen", d) for d in range(len(shape))]
    chosen = [dim for dim, index in enumerate(indices) if index is not None]
    ins: list[Labels] = [[None if d in chosen else d for d in range(input.ndim)]]
    for index in numbers:
        first = len(shape) - index.ndim
        ins.append([new[first + d] if size == shape[first + d] else None for d, size in enumerate(index.shape)])
    rest: list[Label] = [d for d in range(input.ndim) if d not in chosen]
    # Where the tensors stand side by side their dimensions take their place, otherwise they come first.
    together = chosen == list(range(chosen[0], chosen[-1] + 1))
    place = chosen[0] if together else 0
    return ins, [*rest[:place], *new, *rest[place:]]


def advanced_ways(input: Operand, indices: Sequence[Operand | None]) -> Ways | None:
    """`x[:, i, j]` with tensors of whole numbers; None stands for a dimension that is taken whole."""
    if len(indices) > input.ndim or all(index is None for index in indices):
        return None
    ins, out = _advanced_labels(input, indices)
    operands = [input, *(index for index in indices if index is not None)]
    return Ways(index_ways(operands, ins, [out], terms=[[0]], reduction=None))


def written_ways(input: Operand, indices: Sequence[Operand | None], values: Operand | None) -> Ways | None:
    """`x[:, i, j] = values`, or one number where that is None, into `input` where it is."""
    numbers = [index for index in indices if index is not None]
    ins, out = _advanced_labels(input, indices)
    operands, terms = [input, *numbers], None
    if values is not None:
        shape = _chosen_shape(input, indices)
        first = len(shape) - values.ndim
        if first < 0:
            return None
        torch.empty(values.shape, device="meta").expand(shape)  # torch's own check, with global sizes, on every rank
        ins.append([out[first + d] if size == shape[first + d] else None for d, size in enumerate(values.shape)])
        operands.append(values)
        terms = [[0], [len(operands) - 1]]
    at = index_ways(operands, ins, [ins[0]], terms=terms, reduction=None)
    return Ways(at, written_back=True)


def _chosen_shape(input: Operand, indices: Sequence[Operand | None]) -> tuple[int, ...]:
    whole = torch.empty(input.shape, device="meta")
    places = (slice(None) if i is None else torch.empty(i.shape, dtype=torch.long, device="meta") for i in indices)
    return tuple(whole[tuple(places)].shape)


@rule("index_put")
def _index_put(input: Operand, indices: Any, values: Operand, accumulate: bool = False) -> Ways | None:
    del accumulate
    masks = any(index.dtype in (torch.bool, torch.uint8) for index in indices)
    return None if masks or len(indices) > input.ndim else written_ways(input, indices, values)


@rule("index_select")
def _index_select(input: Operand, dim: int, index: Operand) -> Ways | None:
    if not input.ndim:
        return None
    place = input.dim(dim)
    labels: list[Label] = [None if d == place else d for d in range(input.ndim)]
    out = ["i" if d == place and index.ndim else label for d, label in enumerate(labels)]
    return Ways(index_ways([input, index], [labels, ["i"] * index.ndim], [out], terms=[[0]], reduction=None))


@rule("gather")
def _gather(input: Operand, dim: int, index: Operand, *, sparse_grad: bool = False) -> Ways | None:
    del sparse_grad
    if input.ndim != index.ndim or not input.ndim:
        return None
    place = input.dim(dim)
    shared = [d if d != place and input.shape[d] == index.shape[d] else None for d in range(input.ndim)]
    chosen: list[Label] = ["i" if d == place else label for d, label in enumerate(shared)]
    return Ways(index_ways([input, index], [shared, chosen], [chosen], terms=[[0]], reduction=None))


@composite("take_along_dim")
def _take_along_dim(input: Any, indices: Any, dim: int | None = None) -> Any:
    if dim is None or input.ndim != indices.ndim or not input.ndim:
        return NotImplemented
    place = dim % input.ndim
    rest = [(*t.shape[:place], *t.shape[place + 1 :]) for t in (input, indices)]
    shape = torch.broadcast_shapes(*rest)  # type: ignore[no-untyped-call]  # torch leaves it out
    source, chosen = (t.expand(*shape[:place], t.shape[place], *shape[place:]) for t in (input, indices))
    return source.gather(place, chosen)


@rule("take")
def _take(input: Operand, index: Operand) -> Ways:
    labels = list(range(index.ndim))
    return Ways(index_ways([input, index], [[None] * input.ndim, labels], [labels], terms=[[0]], reduction=None))


def _scattered(adds: bool, linear: bool) -> Callable[..., Ways | None]:
    """A rule for writes of `src` where `index` says, along one dimension."""

    def answer(input: Operand, dim: int, index: Operand, src: Any = None, *args: Any, **kwargs: Any) -> Ways | None:
        source = src if src is not None else kwargs.pop("value", None)
        if input.ndim != index.ndim or not input.ndim:
            return None
        place = input.dim(dim)
        operands = [input, index, *([source] if isinstance(source, Operand) else [])]
        if any(operand.ndim not in (0, input.ndim) for operand in operands):
            return None
        full = [operand for operand in operands if operand.ndim]
        # Along the dimension written to, only index and source go together.
        sizes = [{operand.shape[d] for operand in full[d == place :]} for d in range(input.ndim)]
        alike = [len(found) == 1 for found in sizes]
        target: list[Label] = [d if alike[d] and d != place else None for d in range(input.ndim)]
        chosen: list[Label] = ["i" if d == place and alike[d] else label for d, label in enumerate(target)]
        ins = [target, chosen, chosen if operands[-1].ndim else []][: len(operands)]
        terms = [[0], [2]] if linear and len(full) == 3 and "reduce" not in kwargs and not args else None
        sums = adds and terms is not None
        whole: set[Label] = set() if sums else {"i"}
        at = index_ways(operands, ins, [target], terms=terms, reduction="sum" if sums else None, whole=whole)
        return Ways(at, written_back=True)

    return answer


rule("scatter")(_scattered(adds=False, linear=True))
rule("scatter_add")(_scattered(adds=True, linear=True))
rule("scatter_reduce")(_scattered(adds=False, linear=False))


def _along_index(adds: bool, linear: bool) -> Callable[..., Ways | None]:
    """A rule for writes of slices of `source` to the places of one dimension that `index` lists."""

    def answer(input: Operand, dim: int, index: Operand, source: Any = None, *_: Any, **named: Any) -> Ways | None:
        source = named.get("value") if source is None else source
        if not input.ndim:
            return None
        place = input.dim(dim)
        target: list[Label] = [None if d == place else d for d in range(input.ndim)]
        operands: list[Operand] = [input, index]
        ins: list[Labels] = [target, ["i"] * index.ndim]
        if isinstance(source, Operand):
            if source.ndim not in (0, input.ndim):
                return None
            operands.append(source)
            ins.append(["i" if d == place and index.ndim else label for d, label in enumerate(target)][: source.ndim])
        terms = [[0], [2]] if linear and len(operands) == 3 and operands[2].ndim else None
        sums = adds and terms is not None
        whole: set[Label] = set() if sums else {"i"}
        at = index_ways(operands, ins, [target], terms=terms, reduction="sum" if sums else None, whole=whole)
        return Ways(at, written_back=True)

    return answer


rule("index_add")(_along_index(adds=True, linear=True))
rule("index_copy")(_along_index(adds=False, linear=True))
rule("index_fill")(_along_index(adds=False, linear=False))
rule("index_reduce")(_along_index(adds=False, linear=False))
