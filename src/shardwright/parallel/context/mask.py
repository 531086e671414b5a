"""`Mask`: which keys a query attends to, described without a tensor of all pairs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Mask", "key_range", "tile_mask"]


@dataclass(frozen=True, eq=False, slots=True)
class Mask:
    """Which keys a query attends to, by their positions and by values for each position.

    - `causal`: those at its own position and before.
    - `window`: of those, the last so many.
    - `padding`, of shape (batch, keys): those that are True.
    - `segments`, of shape (batch, positions): those of the same number, as in packed sequences.

    >>> Mask(causal=True).is_simple, Mask(causal=True, window=4).is_simple
    (True, False)
    """

    causal: bool = False
    window: int | None = None
    padding: Tensor | None = None
    segments: Tensor | None = None

    @property
    def is_simple(self) -> bool:
        """Whether it is causal or nothing is masked, as torch's kernels have it."""
        return self.window is None and self.padding is None and self.segments is None

    def as_tensor(self, queries: int, keys: int, device: torch.device) -> Tensor | None:
        """Return it as a tensor that broadcasts to (batch, heads, queries, keys), True where a key is attended to.

        >>> Mask(padding=torch.tensor([[True, False]])).as_tensor(1, 2, torch.device("cpu"))
        tensor([[[[ True, False]]]])
        """
        found = tile_mask(self, range(queries), range(keys), device)
        return found.squeeze(1) if found is not None and found.ndim == 5 else found


def key_range(mask: Mask, queries: range, keys: range) -> range:
    """Return the positions among `keys` that any of the queries may attend to, judged by positions alone.

    >>> key_range(Mask(causal=True, window=3), range(4, 6), range(0, 8))
    range(2, 6)
    """
    first, last = keys.start, keys.stop
    if mask.causal:
        last = min(last, queries.stop)
    if mask.window is not None:
        first = max(first, queries.start - mask.window + 1)
    return range(first, max(first, last)) if queries else range(first, first)


def tile_mask(mask: Mask, queries: range, keys: range, device: torch.device) -> Tensor | None:
    """Return which of these queries attend to which of these keys: (queries, keys), or (batch, 1, 1, queries, keys).

    None if all do.

    >>> tile_mask(Mask(causal=True), range(0, 2), range(0, 2), torch.device("cpu"))
    tensor([[ True, False],
            [ True,  True]])
    """
    found: Tensor | None = None
    if mask.causal and keys.stop > queries.start + 1:
        found = _positions(queries, device)[:, None] >= _positions(keys, device)
    if mask.window is not None and keys.start <= queries.stop - 1 - mask.window:
        inside = _positions(keys, device) > _positions(queries, device)[:, None] - mask.window
        found = inside if found is None else found & inside
    if mask.padding is not None:
        present = mask.padding[:, None, None, None, keys.start : keys.stop]
        found = present if found is None else found & present
    if mask.segments is not None:
        own = mask.segments[:, None, None, queries.start : queries.stop, None]
        same = own == mask.segments[:, None, None, None, keys.start : keys.stop]
        found = same if found is None else found & same
    return found


def _positions(span: range, device: torch.device) -> Tensor:
    return torch.arange(span.start, span.stop, device=device)
