"""Retention: which checkpoints to keep (the last few, every k-th, the best by a metric). Pure: it removes nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, final

from shardwright.errors import CheckpointError

__all__ = ["KeepBest", "Policy", "Saved", "best_of", "to_remove"]


class KeepBest(NamedTuple):
    """Keep the `n` best checkpoints by a metric; mode is "min" (lower is better) or "max".

    >>> KeepBest(3, "accuracy", "max").metric
    'accuracy'
    """

    n: int
    metric: str
    mode: str = "min"


@final
@dataclass(frozen=True, slots=True)
class Policy:
    """What to keep: the last `last` steps, the multiples of `every`, and the best ones, together.

    If none of them is given, every step is kept.
    """

    last: int | None = None
    every: int | None = None
    best: KeepBest | None = None

    def __post_init__(self) -> None:
        counts = {"keep_last": self.last, "keep_every": self.every, "keep_best": self.best and self.best.n}
        for name, count in counts.items():
            if count is not None and count < 1:
                raise CheckpointError(f"{name} must be at least 1 or None, got {count}")
        if self.best is not None and self.best.mode not in ("min", "max"):
            raise CheckpointError(f'keep_best: mode must be "min" or "max", got {self.best.mode!r}')

    @property
    def keeps_all(self) -> bool:
        """True if no step is ever removed."""
        return self.last is None and self.every is None and self.best is None


class Saved(NamedTuple):
    """A checkpoint as retention sees it. One that is invalid (corrupted, files missing) does not count as kept."""

    step: int
    metrics: Mapping[str, float] = MappingProxyType({})
    valid: bool = True


def to_remove(saved: Sequence[Saved], policy: Policy, newest: int) -> list[int]:
    """Return the steps that a policy does not keep, in order, once step `newest` has been saved.

    Steps after `newest` belong to another run of the same job, or to another process: they are neither removed nor
    counted. The newest valid step is always kept, so there is always one to continue from. An invalid checkpoint is
    kept as long as a valid one of its step would be, so that it can be inspected; it does not count as one of those
    kept.

    >>> steps = [Saved(step, {"loss": 1 / (step + 1)}) for step in (0, 100, 200, 300, 400)]
    >>> to_remove(steps, Policy(last=2), newest=400)
    [0, 100, 200]
    >>> to_remove(steps, Policy(last=1, every=200, best=KeepBest(1, "loss", "max")), newest=400)
    [100, 300]
    """
    if policy.keeps_all:
        return []
    candidates = sorted(
        (checkpoint for checkpoint in saved if checkpoint.step <= newest), key=lambda checkpoint: checkpoint.step
    )
    valid = [checkpoint.step for checkpoint in candidates if checkpoint.valid]
    kept = set(valid[-1:])
    if policy.last is not None:
        threshold = valid[-policy.last] if len(valid) >= policy.last else 0
        kept.update(checkpoint.step for checkpoint in candidates if checkpoint.step >= threshold)
    if policy.every is not None:
        kept.update(checkpoint.step for checkpoint in candidates if checkpoint.step % policy.every == 0)
    if policy.best is not None:
        kept.update(best_of(candidates, policy.best))
    return [checkpoint.step for checkpoint in candidates if checkpoint.step not in kept]


def best_of(saved: Sequence[Saved], best: KeepBest) -> list[int]:
    """Return the best steps by a metric, the best first, the newer first among equals. NaN does not count.

    >>> best_of([Saved(1, {"loss": 2.0}), Saved(2, {"loss": 0.5}), Saved(3, {"loss": math.nan})], KeepBest(5, "loss"))
    [2, 1]
    """
    sign = 1 if best.mode == "min" else -1
    ranked = sorted(
        (sign * value, -checkpoint.step)
        for checkpoint in saved
        if checkpoint.valid and (value := checkpoint.metrics.get(best.metric)) is not None and not math.isnan(value)
    )
    return [-step for _, step in ranked[: best.n]]
