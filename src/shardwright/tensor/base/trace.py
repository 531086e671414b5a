"""Traces: every operator, redistribution and collective, with its bytes and source line."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn

from shardwright import comm
from shardwright.layout import Layout, Mesh

__all__ = [
    "Operation",
    "Redistribution",
    "Trace",
    "current",
    "is_user_frame",
    "on_trace",
    "operation",
    "operation_name",
    "record_decision",
    "record_redistribution",
    "requested",
    "source_line",
    "source_location",
    "trace",
]


@dataclass(slots=True)
class Operation:
    """One torch function called with DTensors.

    >>> Operation("mul", "train.py:12").fell_back
    False
    """

    name: str
    where: str
    fell_back: bool = False  # no rule: it ran on replicated tensors
    decided_by: dict[str, str] = field(default_factory=dict)  # what decided its layouts, by mesh dimension


@dataclass(slots=True)
class Redistribution:
    """One tensor redistributed from one layout to another.

    >>> from shardwright import Layout, Mesh, Replicate, Shard
    >>> rows, whole = (Layout(Mesh((2,)), [p], (4,)) for p in (Shard(0), Replicate()))
    >>> Redistribution("mul", "train.py:12", rows, whole, received=8, requested=False).received
    8
    """

    operation: str
    where: str
    source: Layout
    target: Layout
    received: int  # bytes this rank receives from others, as planned
    requested: bool  # by the program, as opposed to needed by an operator
    backward: bool = False


@dataclass(slots=True)
class Trace:
    """The recorded events in order: `operations`, `redistributions`, and the `collectives` that they ran.

    >>> import shardwright as sw
    >>> x = sw.ones(4, mesh=sw.init_device_mesh("cpu", (1,)), placements=[sw.Shard(0)])
    >>> with sw.trace() as seen:
    ...     y = (x * 2).sum()
    >>> [operation.name for operation in seen.operations]
    ['mul', 'sum']
    """

    events: list[Operation | Redistribution | comm.Transfer] = field(default_factory=list)

    @property
    def operations(self) -> list[Operation]:
        """The torch functions called, in order."""
        return [event for event in self.events if isinstance(event, Operation)]

    @property
    def redistributions(self) -> list[Redistribution]:
        """The tensors moved, in order."""
        return [event for event in self.events if isinstance(event, Redistribution)]

    @property
    def collectives(self) -> list[comm.Transfer]:
        """The collectives this rank took part in, in order."""
        return [event for event in self.events if isinstance(event, comm.Transfer)]

    @property
    def received(self) -> int:
        """The bytes this rank received from others, or would have received, if nothing was communicated."""
        collectives = self.collectives
        return sum(c.received for c in collectives) if collectives else sum(m.received for m in self.redistributions)

    def table(self) -> Table:
        """Return a rich table with a row for each operator, and below it the redistributions that it needed."""
        table = Table(box=box.SIMPLE_HEAD)
        for name, justify in (("operator", "left"), ("moves", "left"), ("bytes in", "right"), ("where", "left")):
            table.add_column(name, justify=justify)  # type: ignore[arg-type]  # rich's own literals
        for event in self.events:
            if isinstance(event, Operation):
                decided = "; ".join(f"{mesh_dim}: {rule}" for mesh_dim, rule in event.decided_by.items())
                table.add_row(
                    event.name, "everything replicated: no rule" if event.fell_back else decided, "", event.where
                )
            elif isinstance(event, Redistribution):
                why = "requested" if event.requested else "backward" if event.backward else f"for {event.operation}"
                table.add_row("", f"{event.source} → {event.target} ({why})", f"{event.received:,}", event.where)
        table.add_section()
        table.add_row("", "bytes received by this rank", f"{self.received:,}", "")
        return table

    def __str__(self) -> str:
        console = Console(width=160, force_terminal=False, highlight=False)
        with console.capture() as capture:
            console.print(self.table())
        return capture.get()


_open: list[Trace] = []  # per process, innermost last: autograd runs backward on its own threads
_operation: ContextVar[Operation | None] = ContextVar("shardwright_operation", default=None)
_requested: ContextVar[bool] = ContextVar("shardwright_requested", default=False)


@contextmanager
def trace() -> Iterator[Trace]:
    """Record every operator, redistribution and collective inside the context, in a `Trace` that can be printed.

    >>> import shardwright as sw
    >>> with sw.trace() as seen:
    ...     pass
    >>> seen.received
    0
    """
    mine = Trace()
    _open.append(mine)
    _notify(True)
    try:
        with comm.listen(mine.events.append):
            yield mine
    finally:
        # By identity: another thread may have opened a trace meanwhile, and close it later.
        _open[:] = [other for other in _open if other is not mine]
        _notify(bool(_open))


_callbacks: list[Callable[[bool], None]] = []


def on_trace(callback: Callable[[bool], None]) -> None:
    """Register a callback for the begin (True) and the end (False) of tracing."""
    _callbacks.append(callback)


def _notify(on: bool) -> None:
    for callback in _callbacks:
        callback(on)


def current() -> Trace | None:
    """Return the innermost open trace, if any."""
    return _open[-1] if _open else None


@contextmanager
def operation(name: str) -> Iterator[Operation]:
    """Record one operator; redistributions inside the context are attributed to it."""
    seen = current()
    record = Operation(name, source_line() if seen is not None else "")
    if seen is not None:
        seen.events.append(record)
    token = _operation.set(record)
    try:
        yield record
    finally:
        _operation.reset(token)


def record_decision(mesh: Mesh, rules: Sequence[str]) -> None:
    """Record for the operator being run what decided its layouts, one rule for each dimension of its mesh."""
    record = _operation.get()
    if record is not None:
        record.decided_by = {mesh.label(mesh_dim): rule for mesh_dim, rule in enumerate(rules)}


@contextmanager
def requested() -> Iterator[None]:
    """Mark the redistributions inside the context as requested by the program."""
    token = _requested.set(True)
    try:
        yield
    finally:
        _requested.reset(token)


def record_redistribution(source: Layout, target: Layout, received: int, backward: bool) -> None:
    """Record one redistribution, if a trace is open."""
    seen = current()
    if seen is None:
        return
    record = _operation.get()
    name, where = (record.name, record.where) if record is not None else ("", source_line())
    seen.events.append(Redistribution(name, where, source, target, received, _requested.get(), backward))


def operation_name() -> str:
    """Return the name of the operator being run, or an empty string."""
    record = _operation.get()
    return record.name if record is not None else ""


def is_user_frame(frame: Any) -> bool:
    """Return whether a frame is user code: neither shardwright's nor torch's."""
    module = frame.f_globals.get("__name__", "")
    return not module.startswith(("shardwright.", "torch.", "contextlib")) and module not in ("torch", "shardwright")


def source_line() -> str:
    """Return the line of user code being run: that of the nearest frame outside shardwright and torch."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if is_user_frame(frame):
            return f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


def source_location() -> str:
    """Return the line of user code being run, and the nn.Module it belongs to with its path in the outermost module.

    This walks the stack and reads the file: use it in error messages only.
    """
    frame: Any = sys._getframe(1)
    line, modules = "", list[nn.Module]()
    while frame is not None:
        if not line and is_user_frame(frame):
            file, number = frame.f_code.co_filename, frame.f_lineno
            code = linecache.getline(file, number, frame.f_globals).strip()
            line = f"{file.rsplit('/', 1)[-1]}:{number}" + (f", `{code}`" if code else "")
        if isinstance(module := frame.f_locals.get("self"), nn.Module):
            modules.append(module)
        frame = frame.f_back
    if not modules:
        return f"at {line or '?'}"
    inner, outer = modules[0], modules[-1]
    path = next((name for name, module in outer.named_modules() if module is inner), "")
    return f"at {line}, in {type(inner).__qualname__}" + (f" {path!r} of {type(outer).__qualname__}" if path else "")
