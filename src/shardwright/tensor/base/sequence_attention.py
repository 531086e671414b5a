"""The function that computes attention on sequences that are sharded, if a higher layer has set one."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

__all__ = ["SequenceAttention", "attend_sequences_by", "sequence_attention"]

# It takes the arguments of `F.scaled_dot_product_attention`, and returns NotImplemented to decline.
SequenceAttention: TypeAlias = Callable[..., Any]

_function: contextvars.ContextVar[SequenceAttention | None] = contextvars.ContextVar(
    "shardwright_sequence_attention", default=None
)


@contextmanager
def attend_sequences_by(function: SequenceAttention | None) -> Iterator[None]:
    """Offer every `F.scaled_dot_product_attention` of DTensors inside the context to a function first.

    >>> with attend_sequences_by(lambda *args, **kwargs: NotImplemented):
    ...     pass
    """
    token = _function.set(function)
    try:
        yield
    finally:
        _function.reset(token)


def sequence_attention() -> SequenceAttention | None:
    """Return the function that is set; None if there is none."""
    return _function.get()
