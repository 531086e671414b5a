"""What all ranks of a group do alike: each prepares it, tells the others, and goes on only if all can."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import TypeVar

from shardwright import comm
from shardwright.errors import DisagreementError, RankFailedError, ShardwrightError
from shardwright.layout import RegionTable

__all__ = ["digest", "together", "together_telling"]

T = TypeVar("T")


def together(step: Callable[[], tuple[T, str]], what: str, group: comm.Group) -> T:
    """What `step` prepared here, once it has on all ranks, and all of them say the same about it.

    `step` gives its result and the text that must not differ. A mistake that every rank makes is raised as it is; one
    that only some make, as the `RankFailedError` that names them; different texts, as a `DisagreementError`.

    >>> together(lambda: (3, "three"), "counting", comm.world())
    3
    """

    def silently() -> tuple[T, str, str]:
        return *step(), ""

    return together_telling(silently, what, group)[0]


def together_telling(step: Callable[[], tuple[T, str, str]], what: str, group: comm.Group) -> tuple[T, list[str]]:
    """`together`, where each rank also tells the others a word, which may differ: the result, and all ranks' words.

    >>> together_telling(lambda: (3, "three", "of mine"), "counting", comm.world())
    (3, ['of mine'])
    """
    try:
        result, said, word = comm.agree(step, what=what, group=group)
    except RankFailedError as error:
        own, alike = error.__cause__, {(failure.kind, failure.message) for failure in error.failures}
        if len(error.failures) == group.size and len(alike) == 1 and isinstance(own, ShardwrightError):
            raise own from None
        raise
    heard = [json.loads(one) for one in comm.gather_bytes(json.dumps([said, word]).encode(), group, what=what)]
    told = [text for text, _ in heard]
    if len(set(told)) > 1:
        listed = [f"rank {rank} says {text}" for rank, text in zip(group.ranks, told, strict=True)]
        more = [f"and {len(listed) - 16} more"] if len(listed) > 16 else []
        raise DisagreementError(f"{what}: ranks disagree: {'; '.join(listed[:16] + more)}")
    return result, [other for _, other in heard]


def digest(table: RegionTable) -> str:
    """A short text that tells shards and their owners from others.

    >>> import numpy as np
    >>> digest(RegionTable(np.array([0]), np.array([[0]]), np.array([[4]])))
    '1 shards (af8bdd86ad1ecd71)'
    """
    made = hashlib.blake2b(b"".join(column.tobytes() for column in table), digest_size=8)
    return f"{len(table.ranks)} shards ({made.hexdigest()})"
