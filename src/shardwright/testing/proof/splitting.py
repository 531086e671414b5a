"""Whole tensors taken apart as layouts say, for every rank at once, and put together again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

import torch
from torch import Tensor

from shardwright.layout import Layout, Partial
from shardwright.tensor.redistribute.identity import identity_element

__all__ = ["Mismatch", "assemble", "check_shapes", "compare", "split"]

REDUCE: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda stacked: stacked.sum(0),
    "avg": lambda stacked: stacked.mean(0),
    "max": lambda stacked: stacked.amax(0),
    "min": lambda stacked: stacked.amin(0),
    "product": lambda stacked: stacked.prod(0),
    "bor": lambda stacked: stacked.bool().any(0),
    "band": lambda stacked: stacked.bool().all(0),
    "bxor": lambda stacked: reduce(torch.bitwise_xor, stacked),
}


class Mismatch(Exception):  # noqa: N818  # the text of a verdict on its way up, never shown as an error
    """What is wrong with a result."""


def split(whole: Tensor, layout: Layout, generator: torch.Generator) -> list[Tensor]:
    """What each rank holds of a tensor under a layout of one mesh dimension; addends are unlike each other."""
    (placement,) = layout.placements
    ranks = layout.mesh.size
    if isinstance(placement, Partial):
        return _addends(whole, placement.op, ranks, generator)
    return [whole[layout.region(rank).slices()] if whole.ndim else whole for rank in range(ranks)]


def _addends(whole: Tensor, op: str, ranks: int, generator: torch.Generator) -> list[Tensor]:
    owner = torch.randint(ranks, whole.shape, generator=generator)
    mine = [owner == rank for rank in range(ranks)]
    if op in ("max", "min") and not whole.dtype.is_floating_point:  # nothing less than the least: no wrapping around
        return [torch.where(here, whole, torch.full_like(whole, identity_element(whole.dtype, op))) for here in mine]
    if op in ("max", "min"):
        sign = 1 if op == "max" else -1
        less = [torch.randint(1, 9, whole.shape, generator=generator).to(whole.dtype) * sign for _ in mine]
        return [torch.where(here, whole, whole - off) for here, off in zip(mine, less, strict=True)]
    if op in ("band", "product"):
        return [torch.where(here, whole, torch.ones_like(whole)) for here in mine]
    if op in ("bor", "bxor") or whole.dtype == torch.bool:
        return [torch.where(here, whole, torch.zeros_like(whole)) for here in mine]
    if whole.dtype.is_floating_point or whole.dtype.is_complex:
        scale = ranks if op == "avg" else 1
        others = [torch.randn(whole.shape, dtype=whole.dtype, generator=generator) for _ in mine[1:]]
    else:
        scale = 1
        others = [torch.randint(-7, 7, whole.shape, generator=generator).to(whole.dtype) for _ in mine[1:]]
    return [*others, whole * scale - sum(others, torch.zeros_like(whole))]


def check_shapes(parts: Sequence[Tensor], layout: Layout, what: str) -> None:
    """`Mismatch` where a rank's part has not the shape that the layout gives it, or another dtype than rank 0's."""
    for rank, part in enumerate(parts):
        expected = layout.local_shape(rank)
        if tuple(part.shape) != expected:
            raise Mismatch(f"{what} on rank {rank} has shape {tuple(part.shape)}, not {expected} of {layout}")
        if part.dtype != parts[0].dtype:
            raise Mismatch(f"{what} on rank {rank} is {part.dtype}, and {parts[0].dtype} on rank 0")


def assemble(parts: Sequence[Tensor], layout: Layout, what: str) -> Tensor:
    """The whole tensor that ranks hold together; `Mismatch` where what they hold is no such thing."""
    (placement,) = layout.placements
    check_shapes(parts, layout, what)
    if isinstance(placement, Partial):
        if parts[0].dtype == torch.bool and placement.op in ("sum", "avg"):
            raise Mismatch(f"{what} is {placement}, and truths have no sum")
        try:
            return REDUCE[placement.op](torch.stack(list(parts))).to(parts[0].dtype)
        except RuntimeError as error:
            raise Mismatch(f"{what} is {placement}, and {parts[0].dtype} has no such reduction: {error}") from error
    if not placement.is_shard():
        for rank, part in enumerate(parts):
            compare(part, parts[0], f"{what} is {placement}, but on rank {rank}")
        return parts[0]
    whole = torch.empty(layout.shape, dtype=parts[0].dtype)
    for rank, part in enumerate(parts):
        whole[layout.region(rank).slices()] = part
    return whole


def compare(found: Tensor, expected: Tensor, what: str) -> None:
    """`Mismatch` with the numbers, unless the two are equal to the last digits."""
    if found.dtype != expected.dtype or found.shape != expected.shape:
        raise Mismatch(
            f"{what}: {found.dtype} {tuple(found.shape)} instead of {expected.dtype} {tuple(expected.shape)}"
        )
    tolerance = 0.0
    if expected.dtype.is_floating_point or expected.dtype.is_complex:
        # Sums are taken in another order; of few digits a few are enough, or nothing would be far from anything.
        eps = torch.finfo(expected.dtype).eps
        tolerance = max(eps * (2**12 if eps < 1e-5 else 8), 1e-12)
    if expected.dtype == torch.complex32:  # torch cannot compute with it
        found, expected = found.to(torch.complex64), expected.to(torch.complex64)
    close = torch.isclose(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    if bool(close.all()):
        return
    where = tuple((~close).nonzero()[0].tolist())
    wrong = int((~close).sum())
    raise Mismatch(
        f"{what}: {found[where].item()} instead of {expected[where].item()} at {list(where)}, "
        f"{wrong} of {close.numel()} elements differ"
    )
