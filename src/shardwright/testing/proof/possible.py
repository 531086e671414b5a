"""Strategies that no rule has, and that would be right: found by trying the call as it is on every rank's part.

A strategy is possible where the parts of the result make up the whole under some placement of it. Small samples can be
right by accident, so inputs are tried with two sets of values, dimensions that give no rank an empty part are cut, and
results that are all one number tell nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import torch
from torch import Tensor

from shardwright.errors import ShardwrightError
from shardwright.layout import Layout, Mesh, Partial, Placement, Replicate, Shard
from shardwright.testing.operators.sample import Sample
from shardwright.testing.proof.splitting import Mismatch, assemble, compare, split

__all__ = ["possible"]

Placements = tuple[Placement, ...]


def possible(sample: Sample, ranks: int, candidates: Sequence[Placements]) -> Iterator[tuple[Placements, Placements]]:
    """Those of the candidate placements of the inputs under which the plain local call is right, with the outputs'."""
    first = [tensor.detach() for tensor in sample.tensors]
    if all(tensor.numel() < 2 for tensor in first):
        return  # whatever is true of single numbers means little
    with torch.no_grad():
        expected = _results(sample, first)
        if expected is None or not all(map(_tells, expected)):
            return
        second = [_others(tensor) for tensor in first]
        expected_then = _results(sample, second)
        if expected_then is None or not all(
            map(_tells, expected_then)
        ):  # torch takes some values only: then there is one set of them
            second, expected_then = first, expected
        for placements in candidates:
            outs = _outs(sample, first, expected, placements, ranks)
            if outs is not None and _outs(sample, second, expected_then, placements, ranks) == outs:
                yield placements, outs


def _results(sample: Sample, tensors: Sequence[Tensor]) -> list[Tensor] | None:
    try:
        return sample.call([tensor.clone() for tensor in tensors])
    except Exception:  # noqa: BLE001  # torch says no, in one of many ways
        return None


def _tells(result: Tensor) -> bool:
    """Whether a wrong result would be seen: not where it is empty, sparse, or the same number everywhere."""
    if result.layout != torch.strided:
        return False
    values = result.flatten()
    return values.numel() > 0 and (result.ndim == 0 or bool((values != values[0]).any()))


def _others(tensor: Tensor) -> Tensor:
    """Other values out of the same domain: its own, in another order."""
    if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        return tensor
    return tensor.flatten().roll(1).reshape(tensor.shape)


def _outs(
    sample: Sample, whole: Sequence[Tensor], expected: Sequence[Tensor], placements: Placements, ranks: int
) -> Placements | None:
    mesh = Mesh((ranks,))
    generator = torch.Generator().manual_seed(3)
    try:
        layouts = [Layout(mesh, [p], tuple(t.shape)) for p, t in zip(placements, whole, strict=True)]
        parts = [split(tensor, layout, generator) for tensor, layout in zip(whole, layouts, strict=True)]
        outs = [sample.call([part[rank].clone() for part in parts]) for rank in range(ranks)]
    except Exception:  # noqa: BLE001  # torch says no, in one of many ways: then it is not possible
        return None
    if any(len(out) != len(expected) for out in outs) or not expected:
        return None
    found: list[Placement] = []
    for number, value in enumerate(expected):
        placement = _placement([out[number] for out in outs], value, mesh)
        if placement is None:
            return None
        found.append(placement)
    return tuple(found)


def _placement(parts: Sequence[Tensor], expected: Tensor, mesh: Mesh) -> Placement | None:
    """Under which placement the parts make up the whole, if any."""
    choices: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(expected.ndim)), Partial("sum")]
    for placement in choices:
        try:
            layout = Layout(mesh, [placement], tuple(expected.shape))
            compare(assemble(list(parts), layout, ""), expected, "")
        except (Mismatch, ShardwrightError, RuntimeError):
            continue
        return placement
    return None


def candidates_of(tensors: Sequence[Tensor], ranks: int, most: int = 64) -> list[Placements]:
    """Placements of the inputs that are tried for what is possible: whole, cut evenly, sums; not all whole."""
    choices: list[list[Placement]] = []
    for tensor in tensors:
        found: list[Placement] = [Replicate(), *(Shard(dim) for dim, size in enumerate(tensor.shape) if size >= ranks)]
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            found.append(Partial("sum"))
        choices.append(found)
    if len(choices) > 4:
        return []
    every = [each for each in product(*choices) if any(placement != Replicate() for placement in each)]
    return every[:most]
