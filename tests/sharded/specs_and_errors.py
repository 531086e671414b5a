"""What many tests of ShardedTensors need: a spec of chunks on CPU ranks, and the text of an expected error."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shardwright.sharded import ChunkShardingSpec


def chunks(dim: int, *ranks: int) -> ChunkShardingSpec:
    return ChunkShardingSpec(dim, [f"rank:{rank}/cpu" for rank in ranks])


def error_text(kind: type[Exception], call: Callable[[], object]) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)
