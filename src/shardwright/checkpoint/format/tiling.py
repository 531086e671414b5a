"""Whether boxes tile a tensor, in time and memory that the list of the boxes bounds, however many dimensions are cut.

In each dimension, give every point at which a box begins or ends a random number. Let a box weigh the product, over the
dimensions, of the number at its end less the number at its beginning. The weights of boxes that tile the tensor add up
to the weight of the tensor. If an element is held twice or not at all, the difference of the two is a polynomial that
is not zero, of the degree of the number of dimensions, at a random point: it vanishes by chance at most once in 2^25
times (Schwartz and Zippel), and four times in a row once in 2^100. The numbers are new each time, so nobody can write a
list of boxes for which they fail. `Region.covers` sorts corners instead: a box that is cut in k dimensions has 2^k.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["tiles"]

_PRIME = (1 << 31) - 1
_TIMES = 4


def tiles(shape: tuple[int, ...], offsets: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> bool:
    """Return whether boxes, a row of offsets and of sizes for each, hold every element of a tensor exactly once.

    >>> tiles((4, 6), np.array([[0, 0], [3, 0]]), np.array([[3, 6], [1, 6]]))
    True
    >>> tiles((4, 6), np.array([[0, 0], [2, 0]]), np.array([[3, 6], [1, 6]]))
    False
    """
    ends = offsets + sizes
    if (offsets < 0).any() or (sizes < 0).any() or (ends > np.array(shape, np.int64)).any():
        return False
    random = np.random.default_rng()
    boxes = np.ones((_TIMES, len(offsets)), np.int64)
    whole = np.ones(_TIMES, np.int64)
    for dim, extent in enumerate(shape):
        points, where = np.unique(
            np.concatenate([offsets[:, dim], ends[:, dim], np.array([0, extent], np.int64)]), return_inverse=True
        )
        numbers = random.integers(0, _PRIME, (_TIMES, len(points)), np.int64)[:, where.reshape(-1)]
        begins, finishes = numbers[:, : len(offsets)], numbers[:, len(offsets) : -2]
        boxes = boxes * ((finishes - begins) % _PRIME) % _PRIME
        whole = whole * ((numbers[:, -1] - numbers[:, -2]) % _PRIME) % _PRIME
    return bool((boxes.sum(axis=1) % _PRIME == whole).all())
