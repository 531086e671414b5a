"""The largest and smallest along a cut dimension: every rank finds its own, and only those go to the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwright import comm
from shardwright.layout import Layout
from shardwright.tensor.base.registry import composite
from shardwright.tensor.base.tagging import no_torch_function, tag, tag_replicated
from shardwright.tensor.redistribute.implicit import completed
from shardwright.tensor.rules.reduction.reduce import extreme_cut
from shardwright.tensor.rules.shared.flat_index import place_in_whole
from shardwright.tensor.rules.shared.pieces import Pieces, pieces_of, pieces_of_all, reduced

__all__ = ["kth_of_few"]


def _of_each(find: Callable[[Tensor], Any], piece: Tensor, cut: Pieces) -> tuple[Tensor, Tensor]:
    """What is found in this rank's piece, and where in the whole dimension; nothing in an empty one."""
    if piece.shape[cut.dim]:
        values, places = find(piece)
        return values, places + cut.start
    return piece.view_as(piece), torch.empty(piece.shape, dtype=torch.long, device=piece.device)


def _tagged(values: Tensor, places: Tensor, layout: Layout, dim: int, keepdim: bool) -> tuple[Any, Any]:
    """Both, whole along the dimension, as DTensors."""
    target = reduced(layout, dim, keepdim, values.shape[dim])
    both = (values, places) if keepdim else (values.squeeze(dim), places.squeeze(dim))
    return tag(both[0], target), tag(both[1], target)


def _along(name: str, input: Any, dim: Any, keepdim: bool) -> tuple[Any, Any] | None:
    """`max` or `min` along a cut dimension; None where it is not cut."""
    cut = pieces_of(input._layout, dim)
    if cut is None or not input.shape[cut.dim]:
        return None
    input = completed(name, input)
    find: Any = getattr(torch, name)
    with no_torch_function():
        mine, where = _of_each(lambda piece: find(piece, cut.dim, keepdim=True), input, cut)
        values, places = cut.gathered(name, mine), cut.gathered(name, where)
        best, at = find(values, cut.dim, keepdim=True)
        return _tagged(best, places.gather(cut.dim, at), input._layout, cut.dim, keepdim)


def _extreme(name: str) -> Callable[..., Any]:
    of_all = extreme_cut(f"a{name}", nan_is_chosen=True)

    def compose(input: Any, other: Any = None, keepdim: bool = False, *, dim: Any = None) -> Any:
        over = other if dim is None else dim
        if over is None:
            return of_all(input)
        found = _along(name, input, over, keepdim)
        return NotImplemented if found is None else getattr(torch.return_types, name)(found)

    return compose


def _place(name: str) -> Callable[..., Any]:
    def compose(input: Any, dim: Any = None, keepdim: bool = False) -> Any:
        if dim is None:
            return _place_in_all(name, input, keepdim)
        found = _along(name, input.detach(), dim, keepdim)
        return NotImplemented if found is None else found[1]

    return compose


for _name in ("max", "min"):
    composite(_name)(_extreme(_name))
    composite(f"arg{_name}")(_place(_name))


def _place_in_all(name: str, input: Any, keepdim: bool) -> Any:
    """Where the extreme of a whole tensor is, numbered through all of its dimensions: the first, if there are more."""
    input = completed(f"arg{name}", input.detach())
    layout = input._layout
    cut = pieces_of_all(layout)
    if cut is None or 0 in layout.shape:
        return NotImplemented
    find: Any = getattr(torch, name)
    with no_torch_function():
        local = input.reshape(-1)
        value, place = _of_each(lambda piece: find(piece, 0, keepdim=True), local, cut)
        place = place_in_whole(place, layout.region(comm.rank()), layout.shape) if local.numel() else place
        values, places = cut.gathered(f"arg{name}", value), cut.gathered(f"arg{name}", place)
        places, order = places.sort()
        found = places[find(values[order], 0, keepdim=True)[1]]
    shape = (1,) * layout.ndim if keepdim else ()
    return tag_replicated(found.reshape(shape), layout.mesh)


@composite("aminmax")
def _aminmax(input: Any, *, dim: Any = None, keepdim: bool = False) -> Any:
    over = tuple(range(input.ndim)) if dim is None else dim
    both = (torch.amin(input, over, keepdim), torch.amax(input, over, keepdim))
    return torch.return_types.aminmax(both)


def _is_worth_it(layout: Layout, cut: Pieces, rows: int) -> bool:
    """Whether so many rows of every piece are less than what moves when another dimension is cut instead."""
    others = any(d != cut.dim and size >= len(cut.sizes) for d, size in enumerate(layout.shape))
    whole = layout.shape[cut.dim]
    return sum(min(rows, size) for size in cut.sizes) < (whole // len(cut.sizes) if others else whole)


def _best_rows(name: str, input: Any, cut: Pieces, rows: int, largest: bool) -> tuple[Tensor, Tensor]:
    """The best so many rows of all pieces, in order, the first of equals first; and where they are."""

    def find(piece: Tensor) -> Any:
        return piece.topk(min(rows, piece.shape[cut.dim]), cut.dim, largest)

    mine, where = _of_each(find, input, cut)
    values, places = cut.gathered(name, mine, rows), cut.gathered(name, where, rows)
    values, order = values.sort(stable=True, dim=cut.dim, descending=largest)
    return values.narrow(cut.dim, 0, rows), places.gather(cut.dim, order).narrow(cut.dim, 0, rows)


@composite("topk")
def _topk(input: Any, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    del sorted  # it always is
    cut = pieces_of(input._layout, dim)
    if cut is None or not isinstance(k, int) or not 0 < k <= input.shape[cut.dim]:
        return NotImplemented
    if not _is_worth_it(input._layout, cut, k):
        return NotImplemented
    input = completed("topk", input)
    with no_torch_function():
        values, places = _best_rows("topk", input, cut, k, largest)
        return torch.return_types.topk(_tagged(values, places, input._layout, cut.dim, keepdim=True))


def kth_of_few(input: Any, k: int, cut: Pieces, keepdim: bool) -> tuple[Any, Any] | None:
    """The k-th smallest along a cut dimension, where it is near an end: None where it is not."""
    size = input.shape[cut.dim]
    largest = size - k + 1 < k
    rows = min(k, size - k + 1)
    if not _is_worth_it(input._layout, cut, rows):
        return None
    input = completed("kthvalue", input)
    with no_torch_function():
        values, places = (t.narrow(cut.dim, rows - 1, 1) for t in _best_rows("kthvalue", input, cut, rows, largest))
        return _tagged(values, places, input._layout, cut.dim, keepdim)
