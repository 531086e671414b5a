"""`visualize`: print the layout of a tensor, with a colour per rank."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from shardwright.errors import ArgumentTypeError
from shardwright.layout import Layout
from shardwright.tensor.api.dtensor import DTensor
from shardwright.tensor.debug.picture import picture

__all__ = ["visualize"]


def visualize(tensor: DTensor | Layout, title: str | None = None, *, console: Any = None) -> None:
    """Print which ranks hold which region of a DTensor or a Layout, without communicating.

    >>> import shardwright as sw
    >>> sw.visualize(sw.Layout(sw.Mesh((2,), ("tp",)), [sw.Shard(0)], (4, 6)))
    [4, 6] (tp: S(0))
    ┌─────┬────────┐
    │     │ 0:6    │
    ├─────┼────────┤
    │ 0:2 │ rank 0 │
    │ 2:4 │ rank 1 │
    └─────┴────────┘
    """
    layout = tensor.sharding if isinstance(tensor, DTensor) else tensor
    if not isinstance(layout, Layout):
        raise ArgumentTypeError(f"visualize: expected a DTensor or a Layout, got {type(tensor).__name__}")
    (console or Console(highlight=False)).print(picture(layout, title))
