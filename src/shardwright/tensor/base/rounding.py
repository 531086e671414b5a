"""Casts of partial sums: only those that change no partial value may run before the reduction.

The sum of rounded values is not the rounded sum: partial values that cancel out may lose all their digits. Small
integers wrap around when summed, and would not in a wider type. So only a cast between floating dtypes that is exact
for every value runs on partial values; for any other the sum is reduced first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

import torch

from shardwright.tensor.base.strategy import Operand, Strategies, Strategy

__all__ = ["keeps_every_value", "rounded_operands", "without_rounding"]


@lru_cache(maxsize=1024)
def keeps_every_value(source: torch.dtype, target: torch.dtype) -> bool:
    """Return whether partial values of dtype `source` may be cast to `target` before they are summed.

    >>> keeps_every_value(torch.bfloat16, torch.float32), keeps_every_value(torch.float32, torch.bfloat16)
    (True, False)
    >>> keeps_every_value(torch.int8, torch.int32)  # 100 + 100 is -56 in int8, and would become 200
    False
    """
    if source == target:
        return True
    if not all(dtype.is_floating_point or dtype.is_complex for dtype in (source, target)):
        return False
    have, wanted = (torch.finfo(dtype) for dtype in (source, target))  # of complex dtypes: that of their real part
    return wanted.eps <= have.eps and wanted.max >= have.max and wanted.smallest_normal <= have.smallest_normal


def without_rounding(strategies: Strategies, operands: Sequence[Operand], dtypes: Sequence[torch.dtype]) -> Strategies:
    """Return the strategies that round no partial values, given the dtypes of the results.

    A replicated value may still be made partial: one rank casts it, the others cast zeros.
    """
    rounded = [index for index in rounded_operands(operands, dtypes) if operands[index].layout.is_partial]
    return replace(strategies, at=_without_partial(strategies.at, rounded)) if rounded else strategies


def rounded_operands(operands: Sequence[Operand], dtypes: Sequence[torch.dtype]) -> list[int]:
    """Return the indices of the operands whose partial values would be rounded in results of these dtypes."""
    return [
        index
        for index, operand in enumerate(operands)
        if not all(keeps_every_value(operand.dtype, dtype) for dtype in dtypes)
    ]


def _without_partial(at: Callable[[int], list[Strategy]], rounded: Sequence[int]) -> Callable[[int], list[Strategy]]:
    return lambda mesh_dim: [
        strategy for strategy in at(mesh_dim) if not any(strategy.ins[index].is_partial() for index in rounded)
    ]
