"""Render a layout for a terminal: which ranks hold which region."""

from __future__ import annotations

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from shardwright.layout import Layout, Region

__all__ = ["picture"]

# Readable on dark and light backgrounds; reused cyclically.
COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red", "bright_cyan", "bright_magenta")
MAX_CELLS = 256


def picture(layout: Layout, title: str | None = None) -> Group:
    """Return a rich renderable of the layout: a grid for one or two dimensions, a list of regions otherwise.

    >>> from rich.console import Console
    >>> from shardwright import Mesh, Replicate, Shard
    >>> layout = Layout(Mesh((2, 2), ("dp", "tp")), [Shard(0), Replicate()], (4, 6))
    >>> Console(width=60, force_terminal=False).print(picture(layout))
    [4, 6] (dp: S(0), tp: R)
    ┌─────┬──────────┐
    │     │ 0:6      │
    ├─────┼──────────┤
    │ 0:2 │ rank 0 1 │
    │ 2:4 │ rank 2 3 │
    └─────┴──────────┘
    """
    # The title is printed above the table: inside, it would be wrapped to the table's width.
    return Group(Text(title or str(layout)), _grid(layout) or _list(layout))


def _grid(layout: Layout) -> Table | None:
    """One cell per region; None unless the tensor has one or two dimensions and at most MAX_CELLS regions."""
    if layout.ndim not in (1, 2):
        return None
    held = dict(layout.regions())
    rows = sorted({(region.offset[0], region.end[0]) for region in held})
    columns = sorted({(region.offset[1:], region.end[1:]) for region in held})
    if not held or len(rows) * len(columns) > MAX_CELLS:
        return None
    table = Table(box=box.SQUARE, header_style="dim")
    table.add_column("", style="dim")
    for left, right in columns:
        table.add_column(f"{left[0]}:{right[0]}" if left else "held by")
    for top, bottom in rows:
        cells = []
        for left, right in columns:
            width = [stop - start for start, stop in zip(left, right, strict=True)]
            cells.append(_owners(held[Region((top, *left), (bottom - top, *width))], layout))
        table.add_row(f"{top}:{bottom}", *cells)
    return table


def _list(layout: Layout) -> Table:
    """One row per region."""
    table = Table(box=box.SQUARE, header_style="dim")
    table.add_column("region")
    table.add_column("held by")
    holdings = layout.regions()
    for region, ranks in holdings[:MAX_CELLS]:
        table.add_row(str(region), _owners(ranks, layout))
    if len(holdings) > MAX_CELLS:
        table.add_row("…", f"and {len(holdings) - MAX_CELLS} more regions")
    return table


def _owners(ranks: tuple[int, ...], layout: Layout) -> Text:
    text = Text("partial values of rank " if layout.is_partial else "rank ")
    for index, rank in enumerate(ranks[:16]):
        text.append(f"{' ' * bool(index)}{rank}", style=f"bold {COLOURS[layout.mesh.position(rank) % len(COLOURS)]}")
    if len(ranks) > 16:
        text.append(f" … {len(ranks)} in all")
    return text
