"""Split full tensors into the local tensors of all ranks, and assemble them again."""

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
    """A result is wrong; the message is the fault of a verdict."""


def split(full: Tensor, layout: Layout, generator: torch.Generator) -> list[Tensor]:
    """Return each rank's local tensor under a layout of one mesh dimension; partial values differ between ranks."""
    (placement,) = layout.placements
    ranks = layout.mesh.size
    if isinstance(placement, Partial):
        return _partial_values(full, placement.op, ranks, generator)
    return [full[layout.region(rank).slices()] if full.ndim else full for rank in range(ranks)]


def _partial_values(full: Tensor, op: str, ranks: int, generator: torch.Generator) -> list[Tensor]:
    owner = torch.randint(ranks, full.shape, generator=generator)
    masks = [owner == rank for rank in range(ranks)]
    if op in ("max", "min") and not full.dtype.is_floating_point:  # the identity element: subtracting might overflow
        return [torch.where(mask, full, torch.full_like(full, identity_element(full.dtype, op))) for mask in masks]
    if op in ("max", "min"):
        sign = 1 if op == "max" else -1
        offsets = [torch.randint(1, 9, full.shape, generator=generator).to(full.dtype) * sign for _ in masks]
        return [torch.where(mask, full, full - offset) for mask, offset in zip(masks, offsets, strict=True)]
    if op in ("band", "product"):
        return [torch.where(mask, full, torch.ones_like(full)) for mask in masks]
    if op in ("bor", "bxor") or full.dtype == torch.bool:
        return [torch.where(mask, full, torch.zeros_like(full)) for mask in masks]
    if full.dtype.is_floating_point or full.dtype.is_complex:
        scale = ranks if op == "avg" else 1
        others = [torch.randn(full.shape, dtype=full.dtype, generator=generator) for _ in masks[1:]]
    else:
        scale = 1
        others = [torch.randint(-7, 7, full.shape, generator=generator).to(full.dtype) for _ in masks[1:]]
    return [*others, full * scale - sum(others, torch.zeros_like(full))]


def check_shapes(parts: Sequence[Tensor], layout: Layout, what: str) -> None:
    """Raise `Mismatch` if a local tensor has another shape than its layout assigns, or another dtype than rank 0's."""
    for rank, part in enumerate(parts):
        expected = layout.local_shape(rank)
        if tuple(part.shape) != expected:
            raise Mismatch(f"{what} on rank {rank} has shape {tuple(part.shape)}, not {expected} of {layout}")
        if part.dtype != parts[0].dtype:
            raise Mismatch(f"{what} is {part.dtype} on rank {rank}, but {parts[0].dtype} on rank 0")


def assemble(parts: Sequence[Tensor], layout: Layout, what: str) -> Tensor:
    """Assemble the full tensor from the local tensors; raise `Mismatch` if they do not match the layout."""
    (placement,) = layout.placements
    check_shapes(parts, layout, what)
    if isinstance(placement, Partial):
        if parts[0].dtype == torch.bool and placement.op in ("sum", "avg"):
            raise Mismatch(f"{what} is {placement}, but bool tensors have no sum")
        try:
            return REDUCE[placement.op](torch.stack(list(parts))).to(parts[0].dtype)
        except RuntimeError as error:
            raise Mismatch(f"{what} is {placement}, but {parts[0].dtype} cannot be reduced: {error}") from error
    if not placement.is_shard():
        for rank, part in enumerate(parts):
            compare(part, parts[0], f"{what} is {placement}, but on rank {rank}")
        return parts[0]
    full = torch.empty(layout.shape, dtype=parts[0].dtype)
    for rank, part in enumerate(parts):
        full[layout.region(rank).slices()] = part
    return full


def compare(actual: Tensor, expected: Tensor, what: str) -> None:
    """Raise `Mismatch` with the values unless the two tensors are equal up to rounding."""
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        raise Mismatch(
            f"{what}: {actual.dtype} {tuple(actual.shape)} instead of {expected.dtype} {tuple(expected.shape)}"
        )
    tolerance = 0.0
    if expected.dtype.is_floating_point or expected.dtype.is_complex:
        # The order of summation differs; low-precision dtypes get a smaller factor, or every value would be close.
        eps = torch.finfo(expected.dtype).eps
        tolerance = max(eps * (2**12 if eps < 1e-5 else 8), 1e-12)
    if expected.dtype == torch.complex32:  # torch cannot compute with it
        actual, expected = actual.to(torch.complex64), expected.to(torch.complex64)
    close = torch.isclose(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    if bool(close.all()):
        return
    index = tuple((~close).nonzero()[0].tolist())
    differing = int((~close).sum())
    raise Mismatch(
        f"{what}: {actual[index].item()} instead of {expected[index].item()} at {list(index)}, "
        f"{differing} of {close.numel()} elements differ"
    )
