"""Redistribution as torch's tracers see it: one operator, `shardwright::redistribute`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor
from torch.library import Library

from shardwright.layout import Layout

__all__ = ["call_operator", "define_operator", "is_recorded", "is_traced"]

Kernel: TypeAlias = Callable[[Tensor, Layout, Layout], Tensor]

_numbers: dict[tuple[Layout, Layout], int] = {}  # an operator cannot take layouts, only their index
_redistributions: list[tuple[Layout, Layout]] = []
_PRE_DISPATCH = torch._C.DispatchKey.PreDispatch


def is_traced() -> bool:
    """Return whether torch's operators are being traced, by make_fx or another dispatch mode."""
    return torch._C._len_torch_dispatch_stack() > 0 or torch._C._dispatch_tls_is_dispatch_key_included(_PRE_DISPATCH)


def is_recorded() -> bool:
    """Return whether torch's operators are being recorded as a graph, by make_fx."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    return mode is not None or torch._C._dispatch_tls_is_dispatch_key_included(_PRE_DISPATCH)


def define_operator(redistribute: Kernel) -> Library:
    """Define the operator with this function as its kernel; it exists as long as the returned library."""

    def kernel(local: Tensor, number: int) -> Tensor:
        source, target = _redistributions[number]
        moved = redistribute(local, source, target)
        same = moved.untyped_storage()._cdata == local.untyped_storage()._cdata
        return moved.clone() if same else moved  # an operator must not return its input's memory

    library = Library("shardwright", "DEF")  # type: ignore[no-untyped-call]  # torch's own is untyped
    library.define("redistribute(Tensor local, int number) -> Tensor")  # type: ignore[no-untyped-call]  # likewise
    library.impl("redistribute", kernel, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]  # likewise
    return library


def call_operator(local: Tensor, source: Layout, target: Layout) -> Tensor:
    """Redistribute by calling the operator."""
    number = _numbers.setdefault((source, target), len(_redistributions))
    if number == len(_redistributions):
        _redistributions.append((source, target))
    return torch.ops.shardwright.redistribute(local, number)  # type: ignore[no-any-return]  # operators are untyped
