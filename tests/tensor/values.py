"""Tensors of known values on a mesh of all ranks, for tests that compare with plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import shardwright as sw
from shardwright import comm


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def line() -> Any:
    """Return a one-dimensional mesh of all ranks."""
    return sw.init_device_mesh("cpu", (comm.world().size,))


def spread(value: Tensor, *placements: sw.Placement) -> sw.DTensor:
    return sw.distribute_tensor(value, line(), list(placements))


def partial_sums(whole: Tensor, op: str = "sum") -> sw.DTensor:
    """Return a partial tensor of this value, with a different partial value on each rank."""
    rank, ranks = comm.world().rank, comm.world().size
    share = (rank + 1) * 2 / (ranks * (ranks + 1)) * (ranks if op == "avg" else 1)
    return sw.DTensor.from_local((whole * share).requires_grad_(), line(), [sw.Partial(op)])


def close(ours: Any, theirs: Any) -> None:
    assert isinstance(ours, sw.DTensor)
    torch.testing.assert_close(ours.full_tensor(), theirs, rtol=1e-12, atol=1e-12)
