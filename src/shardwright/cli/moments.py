"""Minimum, maximum, mean, standard deviation and a histogram of numbers that come in blocks. Pure.

The mean and the sum of squared deviations of a block are merged with those so far (Chan, Golub and LeVeque), so that
nothing cancels, however large the mean is beside the deviation and however many blocks there are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
import numpy.typing as npt

__all__ = ["Histogram", "Moments"]

_HUGE = 1e150  # squares of larger numbers overflow float64


@final
@dataclass
class Moments:
    """What is known of the numbers so far. NaN and infinities are counted, and left out of everything else.

    >>> moments = Moments()
    >>> moments.add(np.array([1.0, 2.0, float("nan")]))
    >>> moments.add(np.array([6.0]))
    >>> moments.mean, moments.minimum, moments.maximum, moments.nans, round(moments.std, 4)
    (3.0, 1.0, 6.0, 1, 2.1602)
    """

    count: int = 0
    zeros: int = 0
    nans: int = 0
    infinities: int = 0
    minimum: Any = None
    maximum: Any = None
    _mean: Any = field(default_factory=lambda: np.longdouble(0))
    _squares: Any = field(default_factory=lambda: np.longdouble(0))

    @property
    def finite(self) -> int:
        """How many numbers are finite."""
        return self.count - self.nans - self.infinities

    @property
    def mean(self) -> float | None:
        """The mean; None if there are no numbers."""
        return float(self._mean) if self.finite else None

    @property
    def std(self) -> float | None:
        """The standard deviation of the numbers themselves (divided by their count); None if there are none."""
        return float(np.sqrt(self._squares / self.finite)) if self.finite else None

    def add(self, numbers: npt.NDArray[Any]) -> None:
        """Add a block of real numbers, of any dtype of numpy."""
        numbers = numbers.reshape(-1)
        self.count += numbers.size
        if numbers.dtype.kind == "f":
            is_finite = np.isfinite(numbers)
            if not is_finite.all():
                nans = int(np.isnan(numbers).sum())
                self.nans += nans
                self.infinities += int(numbers.size - is_finite.sum()) - nans
                numbers = numbers[is_finite]
        if not numbers.size:
            return
        self.zeros += int(numbers.size - np.count_nonzero(numbers))
        low, high = numbers.min().item(), numbers.max().item()
        self.minimum = low if self.minimum is None else min(self.minimum, low)
        self.maximum = high if self.maximum is None else max(self.maximum, high)
        wide: npt.NDArray[Any] = numbers.astype(
            np.longdouble if max(abs(low), abs(high)) > _HUGE else np.float64, copy=False
        )
        # Around the middle of the block, sums of equal numbers are exact.
        centre: Any = np.longdouble(low) / 2 + np.longdouble(high) / 2
        deviations = wide - wide.dtype.type(centre)
        shift = deviations.mean()
        deviations -= shift
        self._merge(
            numbers.size,
            np.longdouble(wide.dtype.type(centre)) + np.longdouble(shift),
            np.longdouble((deviations**2).sum()),
        )

    def _merge(self, count: int, mean: Any, squares: Any) -> None:
        total = self.finite
        before = total - count
        delta = mean - self._mean
        self._mean += delta * count / total
        self._squares += squares + delta * delta * before * count / total


@final
class Histogram:
    """Counts of numbers in equal intervals between two bounds.

    >>> histogram = Histogram(0.0, 4.0, 4)
    >>> histogram.add(np.array([0.0, 0.5, 3.0, 4.0]))
    >>> histogram.counts.tolist(), histogram.edges
    ([2, 0, 0, 2], [0.0, 1.0, 2.0, 3.0, 4.0])
    """

    def __init__(self, low: float, high: float, bins: int) -> None:
        self.low, self.high = low, high
        self.counts = np.zeros(bins, np.int64)

    @property
    def edges(self) -> list[float]:
        """The bounds of the intervals."""
        bins = len(self.counts)
        return [float(self.low * (1 - part / bins) + self.high * (part / bins)) for part in range(bins + 1)]

    def add(self, numbers: npt.NDArray[Any]) -> None:
        """Count a block of real numbers; those that are not finite are left out."""
        bins = len(self.counts)
        # Halves, so that the width of the widest interval does not overflow.
        wide = numbers.reshape(-1).astype(np.float64) / 2
        wide = wide[np.isfinite(wide)]
        width = self.high / 2 - self.low / 2
        if width <= 0:
            self.counts[0] += wide.size
            return
        position = ((wide - self.low / 2) / width * bins).astype(np.int64)
        self.counts += np.bincount(np.clip(position, 0, bins - 1), minlength=bins)
