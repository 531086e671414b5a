"""What a manager notes in the manifest of a step, beside the state: the step, the time, the metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final, final

import msgspec
from torch import Tensor

from shardwright.checkpoint.manifest import Manifest
from shardwright.errors import CheckpointError, FormatError

__all__ = ["FIELD", "Record", "numbers"]

FIELD: Final = "manager"
"""The field of the manifest."""


@final
class Record(msgspec.Struct, frozen=True):
    """A step, when it was saved (UTC, ISO 8601), and its metrics. A metric that JSON has no number for is text.

    >>> Record(100, "2026-01-01T00:00:00+00:00", {"loss": "nan"}).values()
    {'loss': nan}
    """

    step: int
    time: str
    metrics: dict[str, float | str] = {}

    @classmethod
    def now(cls, step: int, metrics: Mapping[str, float]) -> Record:
        """The record of a step that is saved now."""
        stored = {name: value if math.isfinite(value) else repr(value) for name, value in metrics.items()}
        return cls(step, datetime.now(UTC).isoformat(timespec="seconds"), stored)

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
