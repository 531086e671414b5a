"""How two blocks of numbers differ: how many elements, by how much, and where most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardwright.cli.numbers import as_numbers
from shardwright.layout import Region

__all__ = ["Tally", "Tolerance"]


@dataclass(frozen=True)
class Tolerance:
    """Values a and b are the same if |a - b| <= atol + rtol * |b|; without a tolerance, if their bits are."""

    rtol: float = 0.0
    atol: float = 0.0

    @property
    def is_exact(self) -> bool:
        """True if nothing is tolerated."""
        return self.rtol == 0 and self.atol == 0


@final
class Tally:
    """What differs between two tensors, collected block by block.

    `largest` and `largest_relative` are the largest of |a - b| and |a - b| / |b| among the elements that differ; a NaN
    or an infinity on one side only counts as infinite. `index` is where the difference is largest.

    >>> tally = Tally(Tolerance())
    >>> tally.add(Region((4,), (3,)), torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.5, 3.0]))
    >>> tally.differing, tally.largest, tally.index, tally.pair
    (1, 0.5, (5,), (2.0, 2.5))
    """

    def __init__(self, tolerance: Tolerance) -> None:
        self._tolerance = tolerance
        self.differing = 0
        self.largest = 0.0
        self.largest_relative = 0.0
        self.index: tuple[int, ...] | None = None
        self.pair: tuple[Any, Any] | None = None

    def add(self, box: Region, a: Tensor, b: Tensor) -> None:
        """Compare the elements of a box."""
        same_dtype = a.dtype == b.dtype
        if same_dtype and torch.equal(_bits(a), _bits(b)):
            return
        left, right = as_numbers(a).reshape(-1), as_numbers(b).reshape(-1)
        difference = _difference(left, right)
        if not self._tolerance.is_exact:
            with np.errstate(over="ignore", invalid="ignore"):
                allowed = self._tolerance.atol + self._tolerance.rtol * np.abs(right.astype(_wide(right)))
                differs = ~(difference <= allowed) & (difference > 0)
        elif same_dtype:
            differs = (_bits(a).reshape(left.size, -1) != _bits(b).reshape(left.size, -1)).any(1).numpy()
        else:
            differs = difference > 0
        places = np.flatnonzero(differs)
        if not places.size:
            return
        self.differing += int(places.size)
        amounts = difference[places]
        worst = int(np.argmax(amounts))
        if self.index is None or float(amounts[worst]) > self.largest:
            self.largest = float(amounts[worst])
            inside = np.unravel_index(int(places[worst]), box.size) if box.size else ()
            self.index = tuple(int(at) + offset for at, offset in zip(inside, box.offset, strict=True))
            self.pair = left[places[worst]].item(), right[places[worst]].item()
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            relative = amounts / np.abs(right[places].astype(_wide(right)))
        finite = relative[~np.isnan(relative)]
        self.largest_relative = max(self.largest_relative, float(finite.max(initial=0.0)))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _wide(numbers: npt.NDArray[Any]) -> type[np.generic]:
    return np.complex128 if numbers.dtype.kind == "c" else np.float64


def _difference(left: npt.NDArray[Any], right: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return |left - right|: 0 for NaN on both sides and equal infinities, infinite where only one side has them."""
    if left.dtype == right.dtype and left.dtype.kind in "iu":  # exact, also for 64 bits: the subtraction wraps around
        larger, smaller = np.maximum(left, right), np.minimum(left, right)
        exact: npt.NDArray[np.float64] = (larger.astype(np.uint64) - smaller.astype(np.uint64)).astype(np.float64)
        return exact
    wide = np.complex128 if "c" in (left.dtype.kind, right.dtype.kind) else np.float64
    a, b = left.astype(wide), right.astype(wide)
    with np.errstate(over="ignore", invalid="ignore"):
        difference: npt.NDArray[np.float64] = np.abs(a - b)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    difference[np.isnan(difference)] = np.inf
    difference[same] = 0
    return difference
