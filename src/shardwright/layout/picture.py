"""A layout, drawn for a terminal: which ranks hold which region."""

from __future__ import annotations

from rich import box
from rich.table import Table
from rich.text import Text

from shardwright.layout.layout import Layout
from shardwright.layout.region import Region

__all__ = ["picture"]

# Distinct on dark and on light backgrounds; ranks beyond take them again.
COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red", "bright_cyan", "bright_magenta")
MAX_CELLS = 256


def picture(layout: Layout, title: str | None = None) -> Table:
    """A rich table of who holds what: a grid for one or two dimensions, a list of regions otherwise.

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
    table = Table(title=title or str(layout), title_justify="left", title_style="", box=box.SQUARE, header_style="dim")
    holdings = layout.regions()
    rows = sorted({(r.offset[0], r.end[0]) for r, _ in holdings}) if layout.ndim else []
    columns = sorted({(r.offset[1], r.end[1]) for r, _ in holdings}) if layout.ndim == 2 else [(0, 1)]
    if layout.ndim not in (1, 2) or len(rows) * len(columns) > MAX_CELLS:
        table.add_column("region")
        table.add_column("held by")
        for region, ranks in holdings[:MAX_CELLS]:
            table.add_row(str(region), _owners(ranks, layout))
        if len(holdings) > MAX_CELLS:
            table.add_row("…", f"{len(holdings) - MAX_CELLS} regions more")
        return table
    held = dict(holdings)
    table.add_column("", style="dim")
    for start, stop in columns:
        table.add_column(f"{start}:{stop}" if layout.ndim == 2 else "held by")
    for top, bottom in rows:
        cells = []
        for left, right in columns:
            two = layout.ndim == 2
            cell = Region((top, left) if two else (top,), (bottom - top, right - left) if two else (bottom - top,))
            cells.append(_owners(held[cell], layout))
        table.add_row(f"{top}:{bottom}", *cells)
    return table


def _owners(ranks: tuple[int, ...], layout: Layout) -> Text:
    text = Text("addends of " if layout.is_partial else "rank ")
    for place, rank in enumerate(ranks[:16]):
        text.append(f"{' ' * bool(place)}{rank}", style=f"bold {COLOURS[layout.mesh.position(rank) % len(COLOURS)]}")
    if len(ranks) > 16:
        text.append(f" … {len(ranks)} in all")
    return text
