"""Choose the placements of a sample's inputs to test on ranks; seeded, so that all ranks and runs choose the same."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwright.layout import Partial, Placement, Replicate, Shard
from shardwright.testing.operators.database import OpSample, samples_of

__all__ = ["Case", "cases_of"]


class Case(NamedTuple):
    """A sample of an operator, and the placements of each of its tensors on the mesh.

    >>> print(Case("mul", 0, (4,), ((Shard(0),), (Replicate(),))))
    mul[0] on 4: S(0); R
    """

    operator: str
    sample: int
    mesh: tuple[int, ...]
    placements: tuple[tuple[Placement, ...], ...]

    def __str__(self) -> str:
        laid_out = "; ".join(",".join(map(str, placements)) for placements in self.placements)
        return f"{self.operator}[{self.sample}] on {'x'.join(map(str, self.mesh))}: {laid_out}"


def cases_of(operator: str, mesh: tuple[int, ...], least: int = 8, most: int = 24, seed: int = 0) -> list[Case]:
    """Return cases of an operator: every sample if there are at most `most`, and at least `least` in total.

    Fewer, if its inputs have fewer possible placements.

    >>> len(cases_of("mul", (2, 2))) >= 8
    True
    """
    generator = random.Random(f"{operator}/{mesh}/{seed}")
    samples = samples_of(operator)
    numbers = [number for number, sample in enumerate(samples) if _is_dense(sample)]
    if len(numbers) > most:
        numbers = sorted(generator.sample(numbers, most))
    exact = operator in _EXACT
    cases: dict[Case, None] = {}
    for attempt in range(4):
        for number in numbers:
            tensors = samples[number].tensors
            placements = (
                _same_dimension(tensors, mesh, generator) if attempt == 0 else _random(tensors, mesh, generator, exact)
            )
            cases[Case(operator, number, mesh, placements)] = None
        if len(cases) >= least:
            break
    while len(cases) < least and numbers:
        before = len(cases)
        for _ in range(8):
            number = generator.choice(numbers)
            cases[Case(operator, number, mesh, _random(samples[number].tensors, mesh, generator, exact))] = None
        if len(cases) == before:
            break
    return list(cases)[: max(least, len(numbers))]


def _is_dense(sample: OpSample) -> bool:
    return all(tensor.layout == torch.strided for tensor in sample.tensors)


# These are sensitive to rounding errors in the last bit: their inputs are never partial sums.
_EXACT = frozenset(("argwhere", "hash_tensor", "nonzero", "nonzero_static"))


def _choices(tensor: Tensor, exact: bool) -> list[Placement]:
    placements: list[Placement] = [Shard(dim) for dim in range(tensor.ndim)]
    placements += [Replicate(), *placements]  # shard more often than not
    if (tensor.dtype.is_floating_point or tensor.dtype.is_complex) and tensor.dtype.itemsize > 1 and not exact:
        placements.append(Partial("sum"))  # torch does not add 8-bit floats
    return placements


def _random(
    tensors: Sequence[Tensor], mesh: tuple[int, ...], generator: Any, exact: bool
) -> tuple[tuple[Placement, ...], ...]:
    return tuple(tuple(generator.choice(_choices(tensor, exact)) for _ in mesh) for tensor in tensors)


def _same_dimension(
    tensors: Sequence[Tensor], mesh: tuple[int, ...], generator: Any
) -> tuple[tuple[Placement, ...], ...]:
    """Shard all inputs that have it along one dimension, as most programs do."""
    max_ndim = max((tensor.ndim for tensor in tensors), default=0)
    dims = [generator.randrange(max_ndim) if max_ndim else 0 for _ in mesh]
    return tuple(tuple(Shard(dim) if dim < tensor.ndim else Replicate() for dim in dims) for tensor in tensors)
