"""Helpers for tests of ShardedTensors: a chunk spec on CPU ranks, and the text of an expected error."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shardwright.errors import ShardwrightError
from shardwright.sharded import ChunkShardingSpec


def chunks(*ranks: int, dim: int = 0) -> ChunkShardingSpec:
    """Return a spec that splits `dim` into one chunk per rank, on CPU."""
    return ChunkShardingSpec(dim, [f"rank:{rank}/cpu" for rank in ranks])


def error_text(kind: type[Exception], call: Callable[[], object]) -> str:
    """Return the text of the error of this kind that the call must raise."""
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def error_or_result(call: Callable[[], object]) -> str:
    """Return the type and text of the ShardwrightError that the call raises, or "no error" and its result."""
    try:
        result = call()
    except ShardwrightError as error:
        return f"{type(error).__name__}: {error}"
    return f"no error: {result}"
