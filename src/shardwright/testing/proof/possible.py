"""Search for correct strategies that no rule has, by running the plain call on every rank's local tensors.

A strategy is possible if the local results assemble to the expected result under some placement. Small samples can be
correct by coincidence, so two sets of values are tried, only dimensions that leave no rank empty are sharded, and
results in which all elements are equal are ignored.
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
    """Yield the candidate input placements for which the plain local call is correct, with the output placements."""
    first = [tensor.detach() for tensor in sample.tensors]
    if all(tensor.numel() < 2 for tensor in first):
        return  # single elements prove little
    with torch.no_grad():
        first_expected = _results(sample, first)
        if first_expected is None or not all(map(_is_significant, first_expected)):
            return
        second = [_permuted(tensor) for tensor in first]
        second_expected = _results(sample, second)
        if second_expected is None or not all(map(_is_significant, second_expected)):
            second, second_expected = first, first_expected  # torch refuses the other values: use one set only
        for placements in candidates:
            outs = _outs(sample, first, first_expected, placements, ranks)
            if outs is not None and _outs(sample, second, second_expected, placements, ranks) == outs:
                yield placements, outs


def _results(sample: Sample, tensors: Sequence[Tensor]) -> list[Tensor] | None:
    try:
        return sample.call([tensor.clone() for tensor in tensors])
    except Exception:  # noqa: BLE001  # torch refuses a call with many types of exceptions
        return None


def _is_significant(result: Tensor) -> bool:
    """Return True if a wrong result would be detected: it is not empty, not sparse, and not constant."""
    if result.layout != torch.strided:
        return False
    values = result.flatten()
    return values.numel() > 0 and (result.ndim == 0 or bool((values != values[0]).any()))


def _permuted(tensor: Tensor) -> Tensor:
    """Return other values of the same domain: those of the tensor, in another order."""
    if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        return tensor
    return tensor.flatten().roll(1).reshape(tensor.shape)


def _outs(
    sample: Sample, inputs: Sequence[Tensor], expected: Sequence[Tensor], placements: Placements, ranks: int
) -> Placements | None:
    mesh = Mesh((ranks,))
    generator = torch.Generator().manual_seed(3)
    try:
        layouts = [Layout(mesh, [p], tuple(t.shape)) for p, t in zip(placements, inputs, strict=True)]
        parts = [split(tensor, layout, generator) for tensor, layout in zip(inputs, layouts, strict=True)]
        outs = [sample.call([part[rank].clone() for part in parts]) for rank in range(ranks)]
    except Exception:  # noqa: BLE001  # torch refuses the local call: the strategy is not possible
        return None
    if any(len(out) != len(expected) for out in outs) or not expected:
        return None
    out_placements: list[Placement] = []
    for index, value in enumerate(expected):
        placement = _placement([out[index] for out in outs], value, mesh)
        if placement is None:
            return None
        out_placements.append(placement)
    return tuple(out_placements)


def _placement(parts: Sequence[Tensor], expected: Tensor, mesh: Mesh) -> Placement | None:
    """Return the placement under which the local tensors assemble to the expected one, or None."""
    choices: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(expected.ndim)), Partial("sum")]
    for placement in choices:
        try:
            layout = Layout(mesh, [placement], tuple(expected.shape))
            compare(assemble(list(parts), layout, ""), expected, "")
        except (Mismatch, ShardwrightError, RuntimeError):
            continue
        return placement
    return None


def candidates_of(tensors: Sequence[Tensor], ranks: int, limit: int = 64) -> list[Placements]:
    """Return at most `limit` input placements for the search: replicated, sharded, partial sums; not all replicated."""
    choices: list[list[Placement]] = []
    for tensor in tensors:
        shards = [Shard(dim) for dim, size in enumerate(tensor.shape) if size >= ranks]
        is_addable = tensor.dtype.is_floating_point or tensor.dtype.is_complex
        choices.append([Replicate(), *shards, *([Partial("sum")] if is_addable else [])])
    if len(choices) > 4:
        return []
    combinations = [chosen for chosen in product(*choices) if any(placement != Replicate() for placement in chosen)]
    return combinations[:limit]
