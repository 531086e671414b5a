"""What a manager notes in the manifest of a step, beside the state: the step, the time, the metrics, the line.

A run that goes back to an earlier step begins a line. Every step of it says which steps, by number and save, it has
left behind: whichever of its steps survives, the others are known to be superseded, in every process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Final, NamedTuple, final

import msgspec
from torch import Tensor

from shardwright.checkpoint.format.manifest import Manifest
from shardwright.errors import CheckpointError, FormatError

__all__ = ["FIELD", "Line", "Record", "Seen", "line_from", "newest_line", "numbers"]

FIELD: Final = "manager"
"""The field of the manifest."""


class Line(NamedTuple):
    """How often a run was sent back, and the steps that were left behind, each with the id of its save."""

    number: int = 0
    superseded: Mapping[int, str] = MappingProxyType({})


class Seen(NamedTuple):
    """A step that is there: the id of its save, and its line."""

    save_id: str
    line: Line


def newest_line(seen: Mapping[int, Seen]) -> Line:
    """The line that a run is on: of all steps, that which was begun last. Only steps that are there are superseded.

    >>> newest_line({10: Seen("a", Line()), 60: Seen("c", Line(1, {100: "b", 90: "x"})), 100: Seen("b", Line())})
    Line(number=1, superseded={100: 'b'})
    """
    line = max((one.line for _, one in sorted(seen.items())), key=lambda line: line.number, default=Line())
    there = {step: one.save_id for step, one in seen.items()}
    # The steps of a line are written one after the other: a later one knows no less that is still there.
    known = [one.line.superseded for one in seen.values() if one.line.number == line.number]
    left = {step: save_id for one in known for step, save_id in one.items() if there.get(step) == save_id}
    return Line(line.number, dict(sorted(left.items())))


def line_from(step: int, seen: Mapping[int, Seen]) -> Line:
    """The line of a run that is sent back to a step: it leaves behind all that is later, or not of that step's past.

    >>> line_from(10, {10: Seen("a", Line()), 60: Seen("c", Line(1, {100: "b"})), 100: Seen("b", Line())})
    Line(number=2, superseded={60: 'c', 100: 'b'})
    """
    here = seen[step].line if step in seen else Line()
    left = {
        at: one.save_id
        for at, one in sorted(seen.items())
        if at > step or one.line.number > here.number or (at != step and here.superseded.get(at) == one.save_id)
    }
    return Line(1 + max((one.line.number for one in seen.values()), default=0), left)


@final
class Record(msgspec.Struct, frozen=True):
    """A step, when it was saved (UTC, ISO 8601), and its metrics. A metric that JSON has no number for is text.

    `parent` is the step that the run was restored from, `line` counts how often a run was sent back, and `superseded`
    are the steps that this line has left behind, each with the id of its save.

    >>> Record(100, "2026-01-01T00:00:00+00:00", {"loss": "nan"}).values()
    {'loss': nan}
    """

    step: int
    time: str
    metrics: dict[str, float | str] = {}
    parent: int | None = None
    line: int = 0
    superseded: dict[int, str] = {}

    @classmethod
    def now(
        cls, step: int, metrics: Mapping[str, float], parent: int | None = None, line: Line | None = None
    ) -> Record:
        """The record of a step that is saved now."""
        number, superseded = line or Line()
        stored = {name: value if math.isfinite(value) else repr(value) for name, value in metrics.items()}
        return cls(step, datetime.now(UTC).isoformat(timespec="seconds"), stored, parent, number, dict(superseded))

    @classmethod
    def of(cls, manifest: Manifest) -> Record | None:
        """The record in a manifest; None where no manager saved it."""
        raw = manifest.extra.get(FIELD)
        if raw is None:
            return None
        try:
            found = msgspec.json.decode(raw, type=cls)
            found.values()
            datetime.fromisoformat(found.time)
        except (msgspec.MsgspecError, ValueError) as error:
            raise FormatError(f"the field {FIELD!r} of the manifest cannot be read: {error}") from None
        return found

    def seen(self, save_id: str) -> Seen:
        """What it says of its line."""
        return Seen(save_id, Line(self.line, self.superseded))

    def values(self) -> dict[str, float]:
        """The metrics as numbers."""
        return {name: float(value) for name, value in self.metrics.items()}


def numbers(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Metrics as a caller gives them, as numbers.

    >>> import torch
    >>> numbers({"loss": torch.tensor(0.5), "tokens": 3})
    {'loss': 0.5, 'tokens': 3.0}
    """
    found = {}
    for name, value in (metrics or {}).items():
        try:
            found[str(name)] = float(value.detach() if isinstance(value, Tensor) else value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"metric {name!r} is a {type(value).__name__}: a number is needed ({error})"
            ) from None
    return found
