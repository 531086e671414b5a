"""Movements as torch's tracers see them: one operator, `shardwright::move`, whatever collectives it is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor
from torch.library import Library

from shardwright.layout import Layout

__all__ = ["define_move", "is_traced", "move_as_operator"]

Movement: TypeAlias = Callable[[Tensor, Layout, Layout], Tensor]

_numbers: dict[tuple[Layout, Layout], int] = {}  # operators take no layouts: a movement is told by its number
_movements: list[tuple[Layout, Layout]] = []
_PRE_DISPATCH = torch._C.DispatchKey.PreDispatch


def is_traced() -> bool:
    """Whether somebody listens to torch's operators: a tracer such as make_fx, or another dispatch mode."""
    return torch._C._len_torch_dispatch_stack() > 0 or torch._C._dispatch_tls_is_dispatch_key_included(_PRE_DISPATCH)


def define_move(movement: Movement) -> Library:
    """The operator, which makes this movement; it exists as long as what is returned."""

    def kernel(local: Tensor, number: int) -> Tensor:
        source, target = _movements[number]
        moved = movement(local, source, target)
        same = moved.untyped_storage()._cdata == local.untyped_storage()._cdata
        return moved.clone() if same else moved  # an operator's result is memory of its own

    library = Library("shardwright", "DEF")  # type: ignore[no-untyped-call]  # torch's own is untyped
    library.define("move(Tensor local, int number) -> Tensor")  # type: ignore[no-untyped-call]  # likewise
    library.impl("move", kernel, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]  # likewise
    return library


def move_as_operator(local: Tensor, source: Layout, target: Layout) -> Tensor:
    """The movement, as one operator."""
    number = _numbers.setdefault((source, target), len(_movements))
    if number == len(_movements):
        _movements.append((source, target))
    return torch.ops.shardwright.move(local, number)  # type: ignore[no-any-return]  # operators are untyped
