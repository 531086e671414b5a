"""`ExpertParallel`: how the experts of a model are computed over `ep`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

__all__ = ["ExpertParallel"]


@final
@dataclass(frozen=True)
class ExpertParallel:
    """Put experts on different ranks of the mesh dimension `ep`, and send tokens to them; for `parallelize`.

    Every rank along `ep` has some of the experts of each layer, whole, and its own samples. It sends each token to the
    ranks of the experts that the router has chosen for it, computes the tokens that it receives with its own experts,
    and sends the results back. Numbers of tokens may be uneven, or 0; experts need not divide by ranks.

    For all other layers `ep` is a data dimension: batches are sharded over it, and parameters as over `dp`.

    >>> import shardwright as sw
    >>> sw.ExpertParallel()
    ExpertParallel()
    """
