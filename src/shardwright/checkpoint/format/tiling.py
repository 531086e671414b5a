"""Check whether boxes tile a tensor, in time and memory linear in the number of boxes, for any number of dimensions.

In each dimension, assign a random number to every coordinate at which a box begins or ends. Let the weight of a box be
the product, over the dimensions, of the number at its end minus the number at its beginning. The weights of boxes that
tile the tensor add up to the weight of the tensor. If an element is covered twice or not at all, the difference is a
non-zero polynomial, whose degree is the number of dimensions, evaluated at a random point: it vanishes by chance with a
probability of at most 2^-25 (Schwartz-Zippel), and four times in a row with 2^-100. The numbers are drawn anew each
time, so no list of boxes can be crafted to pass. `Region.covers` sorts corners instead, of which a box split in k
dimensions has 2^k.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["tiles"]

_PRIME = (1 << 31) - 1
_TIMES = 4


def tiles(shape: tuple[int, ...], offsets: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> bool:
    """Return True if boxes, given by a row of offsets and a row of sizes each, cover every element exactly once.

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
    tensor = np.ones(_TIMES, np.int64)
    for dim, extent in enumerate(shape):
        points, inverse = np.unique(
            np.concatenate([offsets[:, dim], ends[:, dim], np.array([0, extent], np.int64)]), return_inverse=True
        )
        weights = random.integers(0, _PRIME, (_TIMES, len(points)), np.int64)[:, inverse.reshape(-1)]
        begins, ends_at = weights[:, : len(offsets)], weights[:, len(offsets) : -2]
        boxes = boxes * ((ends_at - begins) % _PRIME) % _PRIME
        tensor = tensor * ((weights[:, -1] - weights[:, -2]) % _PRIME) % _PRIME
    return bool((boxes.sum(axis=1) % _PRIME == tensor).all())
