"""`ContextParallel`: how attention is computed on sequences that are sharded over `cp`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from shardwright.errors import ArgumentTypeError
from shardwright.parallel.context.attention import Mode

__all__ = ["ContextParallel"]


@final
@dataclass(frozen=True)
class ContextParallel:
    """How attention is computed on sequences that are sharded over the mesh dimension `cp`; for `parallelize`.

    - `"heads"`: an all-to-all exchange gives every rank whole sequences of some heads, another one gives the result
      back. Attention itself runs on torch's kernels. There must be at least as many heads as ranks along `cp` (on each
      rank of `tp`); they need not divide.
    - `"gather"`: every rank keeps its queries, and receives the keys and values of the other ranks block by block. For
      any number of heads and ranks; a rank never holds all keys and values. Positions are in plain order, so with a
      causal mask the last ranks compute more than the first.

    Both know causal masks, sliding windows, padding masks, packed sequences and grouped query heads. Other masks, and
    dropout of attention weights, are refused.

    >>> import shardwright as sw
    >>> sw.ContextParallel("heads")
    ContextParallel(mode='heads')
    """

    mode: Mode = "gather"

    def __post_init__(self) -> None:
        if self.mode not in ("heads", "gather"):
            raise ArgumentTypeError(f"ContextParallel: mode must be 'heads' or 'gather', got {self.mode!r}")
