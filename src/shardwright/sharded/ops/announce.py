"""What every rank says before an operator's ranks exchange values: how much it asks, and that nothing is wrong.

It costs one small message to each rank. Only where a rank's arguments are wrong, or ranks called with different ones,
do they say more, and all of them raise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from shardwright import comm
from shardwright.sharded.agreement import together

__all__ = ["announce"]

T = TypeVar("T")


def announce(
    prepare: Callable[[], tuple[T, Sequence[int], bool]],
    alike: str,
    group: comm.Group,
    device: torch.device,
    what: str,
) -> tuple[T, list[int], bool]:
    """What `prepare` made here, how many rows each peer asks of this rank, and whether any rank needs a gradient.

    `prepare` returns what it made, how many rows this rank asks of each peer, and whether it needs a gradient itself.
    `alike` describes what all ranks must have been given alike. If `prepare` raises on any rank, or these texts differ,
    all ranks raise: see `together`.

    >>> announce(lambda: ("made", [3], False), "a table of [4, 2]", comm.world(), torch.device("cpu"), "embedding")
    ('made', [3], False)
    """
    fault: Exception | None = None
    counts: Sequence[int] = [-1] * group.size
    gradient = False
    try:
        made, counts, gradient = prepare()
    except Exception as error:  # noqa: BLE001  # whatever it is, all ranks are told, and all raise
        fault = error

    def say() -> tuple[None, str]:
        if fault is not None:
            raise fault
        return None, alike

    digest = int.from_bytes(hashlib.blake2b(alike.encode(), digest_size=8).digest(), "big", signed=True)
    said = torch.tensor([[count, digest, int(gradient)] for count in counts], dtype=torch.int64, device=device)
    heard = torch.stack(comm.all_to_all(said.unbind(), [(3,)] * group.size, group)).tolist()
    if any(count < 0 or other != digest for count, other, _ in heard):
        together(say, what, group)
    return made, [count for count, _, _ in heard], any(needed for _, _, needed in heard)
