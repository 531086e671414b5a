"""Compare the values a rank observes with those of one rank, shard by shard."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardwright import comm
from shardwright.listing import join_first
from shardwright.tensor import DTensor
from shardwright.tensor.base.tagging import local_region
from shardwright.testing.training.program import Observed, tied_names

__all__ = ["Comparison", "Difference", "Record", "compare", "record"]

_MAX_LISTED = 24
# Differences count relative to the largest value of their tensor, but at least to this part of the largest value of
# all tensors of its kind: a gradient that is zero but for rounding has no scale of its own.
_SMALL = 1e-2


@dataclass(frozen=True, slots=True)
class Difference:
    """A value that differs from that on one rank: which, on which rank, and by how much.

    >>> print(Difference("gradient of step 0", "head.weight", 1, "values", 0.5, 1e-9))
    gradient of step 0: head.weight: rank 1: largest difference 0.5, allowed 1e-09
    """

    what: str
    name: str
    rank: int
    problem: str  # 'values', or what else is wrong
    largest: float = 0.0
    allowed: float = 0.0

    def __str__(self) -> str:
        where = f"{self.what}: {self.name}" if self.name else self.what
        if self.problem != "values":
            return f"{where}: rank {self.rank}: {self.problem}"
        return f"{where}: rank {self.rank}: largest difference {self.largest:.3g}, allowed {self.allowed:.3g}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """What `same_as_one_rank` has compared: the differences it found, and the largest relative difference by kind.

    >>> comparison = Comparison("dp=2", (), {"gradient": 3e-16})
    >>> bool(comparison)
    True
    >>> print(comparison)
    dp=2: the same as on one rank; largest relative differences: gradient 3.0e-16
    """

    mesh: str
    differences: tuple[Difference, ...]
    largest: Mapping[str, float]  # 'loss', 'gradient', 'gradient norm', 'parameter'

    def __bool__(self) -> bool:
        return not self.differences

    def __str__(self) -> str:
        if self:
            listed = ", ".join(f"{kind} {value:.1e}" for kind, value in self.largest.items())
            return f"{self.mesh}: the same as on one rank; largest relative differences: {listed}"
        count = len({(difference.what, difference.name) for difference in self.differences})
        lines = join_first(list(map(str, self.differences)), _MAX_LISTED, "\n  ")
        return f"{self.mesh}: {count} value{'s' * (count > 1)} differ from one rank\n  {lines}"


@dataclass(slots=True)
class Record:
    """The values observed on one rank, by what they are and the name of their parameter."""

    values: dict[tuple[str, str], Tensor | None] = field(default_factory=dict)
    ties: set[tuple[str, ...]] = field(default_factory=set)
    scales: dict[str, float] = field(default_factory=dict)  # the largest absolute value, by what


def record(observed: Iterable[Observed]) -> Record:
    """Store global values, and which parameters are tied."""
    kept = Record()
    first: list[tuple[str, Any]] = []
    for what, name, value in observed:
        whole = None if value is None else _whole(value.detach()).clone()
        kept.values[what, name] = whole
        if whole is not None:
            kept.scales[what] = max(kept.scales.get(what, 0.0), _largest(whole))
        if what == "parameter before training":
            first.append((name, value))
    kept.ties = tied_names(first)
    return kept


def compare(
    observed: Iterable[Observed], expected: Record, tolerance: float
) -> tuple[list[Difference], dict[str, float]]:
    """Return this rank's differences from the record, and the largest relative difference by kind."""
    rank = comm.rank()
    found: list[Difference] = []
    largest: dict[str, float] = {}
    missing = dict(expected.values)
    first: list[tuple[str, Any]] = []
    for what, name, value in observed:
        kind = what.partition(" of ")[0].partition(" before ")[0].partition(" after ")[0]
        if what == "parameter before training":
            first.append((name, value))
        if (what, name) not in missing:
            found.append(Difference(what, name, rank, "does not exist on one rank"))
            continue
        reference = missing.pop((what, name))
        if (value is None) != (reference is None):
            here, there = ("no gradient", "has one") if value is None else ("a gradient", "has none")
            found.append(Difference(what, name, rank, f"{here} here, but one rank {there}"))
        elif value is not None and reference is not None:
            allowed = tolerance * max(_largest(reference), _SMALL * expected.scales[what])
            difference = _difference(value.detach(), reference)
            if isinstance(difference, str):
                found.append(Difference(what, name, rank, difference))
                continue
            relative = difference * tolerance / allowed if allowed else difference
            largest[kind] = max(largest.get(kind, 0.0), relative)
            if not difference <= allowed:  # NaN differs as well
                found.append(Difference(what, name, rank, "values", difference, allowed))
    found += [Difference(what, name, rank, "does not exist here") for what, name in missing]
    ties = tied_names(first)
    found += [_tie(names, rank, "tied on one rank, but not here") for names in sorted(expected.ties - ties)]
    found += [_tie(names, rank, "tied here, but not on one rank") for names in sorted(ties - expected.ties)]
    return found, largest


def _tie(names: tuple[str, ...], rank: int, problem: str) -> Difference:
    return Difference("parameters", ", ".join(names), rank, problem)


def _difference(value: Tensor, reference: Tensor) -> float | str:
    """Return the largest absolute difference of this rank's part of a tensor, or what else is wrong with it."""
    if tuple(value.shape) != tuple(reference.shape):
        return f"shape {tuple(value.shape)} here, but {tuple(reference.shape)} on one rank"
    if value.dtype != reference.dtype:
        return f"dtype {value.dtype} here, but {reference.dtype} on one rank"
    if isinstance(value, DTensor) and not value.sharding.is_partial:
        local, part = value.to_local(), reference[local_region(value.sharding).slices()]
    else:
        local, part = _whole(value), reference
    if local.shape != part.shape:
        return f"local shape {tuple(local.shape)}, but the layout gives this rank {tuple(part.shape)}"
    return _largest(local.to(torch.float64) - part.to(torch.float64)) if local.numel() else 0.0


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _largest(tensor: Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0
