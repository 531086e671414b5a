"""What every command returns: a dataclass that is drawn for people, or written as JSON. One source for both."""

from __future__ import annotations

import base64
import json
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import IO, TYPE_CHECKING, Any

from shardwright.cli.exit_codes import OK
from shardwright.cli.text import printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

__all__ = ["Report", "console", "dump_json", "new_table", "plain", "show_report"]

_INDENTED = 2  # levels of JSON that have a line for each entry
_WIDE = 10_000  # columns of output that is not a terminal: nothing is wrapped or cut


class Report(ABC):
    """The result of a command. Subclasses are dataclasses: their fields are the JSON."""

    @property
    def exit_code(self) -> int:
        """The exit code of the command; 0 unless something was found."""
        return OK

    @abstractmethod
    def render(self) -> Iterator[RenderableType]:
        """Yield what is drawn for people."""


def show_report(report: Report, *, as_json: bool) -> None:
    """Write a report to stdout."""
    if as_json:
        dump_json(report, sys.stdout)
        return
    screen = console(sys.stdout)
    for part in report.render():
        if screen.is_terminal:
            screen.print(part, soft_wrap=isinstance(part, str))
            continue
        with screen.capture() as captured:  # cells are padded: without a terminal, lines end where their text does
            screen.print(part, soft_wrap=isinstance(part, str))
        sys.stdout.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))
    sys.stdout.flush()


def console(stream: IO[str]) -> Console:
    """Return a console that draws in colours on a terminal, and writes plain lines of any length elsewhere."""
    from rich.console import Console

    width = None if stream.isatty() else _WIDE
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False)


def new_table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """Return an empty table without lines, whose columns are aligned; those of `right` to the right."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(Text(column), justify="right" if column in right else "left", overflow="fold")
    return table


def dump_json(value: Any, stream: IO[str]) -> None:
    """Write a report as JSON: ASCII, numbers that JSON does not have (NaN, infinities) as strings."""
    stream.write(f"{_indented(plain(value), 0)}\n")
    stream.flush()


def _indented(value: Any, depth: int) -> str:
    """Return JSON whose outer containers have a line for each entry."""
    if depth == _INDENTED or not value or not isinstance(value, dict | list):
        return json.dumps(value)
    margin = "  " * depth
    if isinstance(value, dict):
        lines = [f"{json.dumps(key)}: {_indented(each, depth + 1)}" for key, each in value.items()]
    else:
        lines = [_indented(each, depth + 1) for each in value]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    inside = f",\n{margin}  ".join(lines)
    return f"{opening}\n{margin}  {inside}\n{margin}{closing}"


def plain(value: Any) -> Any:
    """Return a value as JSON's types.

    >>> plain((1, float("nan"), b"ab"))
    [1, 'nan', 'YWI=']
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(each) for each in value]
    if isinstance(value, bytes | bytearray):
        return base64.b64encode(value).decode()
    return printable(str(value))
