"""The record that a manager stores in the manifest of a step, beside the state: step, time, metrics, lineage.

A run that goes back to an earlier step starts a new lineage. Each of its steps lists the steps that it left behind, by
number and save id, so whichever of these steps survives, every process knows that the others are superseded.
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

__all__ = ["FIELD", "Lineage", "Record", "StepLineage", "current_lineage", "lineage_from", "metric_values"]

FIELD: Final = "manager"
"""The manifest field that holds the record."""


class Lineage(NamedTuple):
    """How often a run went back to an earlier step, and the steps it left behind, each with its save id."""

    number: int = 0
    superseded: Mapping[int, str] = MappingProxyType({})


class StepLineage(NamedTuple):
    """The save id of an existing step, and its lineage."""

    save_id: str
    lineage: Lineage


def current_lineage(steps: Mapping[int, StepLineage]) -> Lineage:
    """Return the lineage that started last among these steps; only existing steps are listed as superseded.

    >>> first, second = StepLineage("a", Lineage()), StepLineage("c", Lineage(1, {100: "b", 90: "x"}))
    >>> current_lineage({10: first, 60: second, 100: StepLineage("b", Lineage())})
    Lineage(number=1, superseded={100: 'b'})
    """
    newest = max(
        (record.lineage for _, record in sorted(steps.items())), key=lambda lineage: lineage.number, default=Lineage()
    )
    save_ids = {step: record.save_id for step, record in steps.items()}
    # Steps of a lineage are written one after the other; merge their lists, as any of the steps may be gone.
    lists = [record.lineage.superseded for record in steps.values() if record.lineage.number == newest.number]
    superseded = {
        step: save_id for listed in lists for step, save_id in listed.items() if save_ids.get(step) == save_id
    }
    return Lineage(newest.number, dict(sorted(superseded.items())))


def lineage_from(step: int, steps: Mapping[int, StepLineage]) -> Lineage:
    """Return the lineage of a run that goes back to `step`: it leaves behind all steps that are not in its past.

    >>> first, second = StepLineage("a", Lineage()), StepLineage("c", Lineage(1, {100: "b"}))
    >>> lineage_from(10, {10: first, 60: second, 100: StepLineage("b", Lineage())})
    Lineage(number=2, superseded={60: 'c', 100: 'b'})
    """
    restored = steps[step].lineage if step in steps else Lineage()
    superseded = {
        number: record.save_id
        for number, record in sorted(steps.items())
        if number > step
        or record.lineage.number > restored.number
        or (number != step and restored.superseded.get(number) == record.save_id)
    }
    return Lineage(1 + max((record.lineage.number for record in steps.values()), default=0), superseded)


@final
class Record(msgspec.Struct, frozen=True):
    """A step, the time it was saved (UTC, ISO 8601) and its metrics. A metric that JSON cannot represent is a string.

    `parent` is the step that the run was restored from, `line` the number of its lineage, and `superseded` the steps
    that this lineage left behind, each with its save id.

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
        cls, step: int, metrics: Mapping[str, float], parent: int | None = None, lineage: Lineage | None = None
    ) -> Record:
        """Return the record of a step that is saved now."""
        number, superseded = lineage or Lineage()
        stored = {name: value if math.isfinite(value) else repr(value) for name, value in metrics.items()}
        return cls(step, datetime.now(UTC).isoformat(timespec="seconds"), stored, parent, number, dict(superseded))

    @classmethod
    def of(cls, manifest: Manifest) -> Record | None:
        """Return the record in a manifest; None if the checkpoint was saved without a manager."""
        raw = manifest.extra.get(FIELD)
        if raw is None:
            return None
        try:
            record = msgspec.json.decode(raw, type=cls)
            record.values()
            datetime.fromisoformat(record.time)
        except (msgspec.MsgspecError, ValueError) as error:
            raise FormatError(f"the field {FIELD!r} of the manifest cannot be read: {error}") from None
        return record

    def lineage(self) -> Lineage:
        """Return the lineage that the record describes."""
        return Lineage(self.line, self.superseded)

    def values(self) -> dict[str, float]:
        """Return the metrics as floats."""
        return {name: float(value) for name, value in self.metrics.items()}


def metric_values(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Convert metrics given by the caller to floats.

    >>> import torch
    >>> metric_values({"loss": torch.tensor(0.5), "tokens": 3})
    {'loss': 0.5, 'tokens': 3.0}
    """
    values = {}
    for name, value in (metrics or {}).items():
        try:
            values[str(name)] = float(value.detach() if isinstance(value, Tensor) else value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"metric {name!r} must be a number, got {type(value).__name__} ({error})") from None
    return values
