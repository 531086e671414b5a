"""A rank that does not call a collective operator, or calls another one, is named after the timeout."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from shardwright import comm, sharded
from shardwright.errors import (
    CommError,
    RankLostError,
)
from shardwright.sharded import (
    ShardedTensor,
)
from shardwright.testing import run_ranks
from tests.sharded.specs_and_errors import chunks, error_text


def test_a_rank_that_is_missing_or_in_another_operator_is_named_after_the_timeout() -> None:
    def on_rank() -> tuple[list[str], float]:
        messages = []

        def case(
            kind: type[Exception], call: Callable[[ShardedTensor], Any], other: Callable[[ShardedTensor], Any]
        ) -> None:
            group = dist.new_group([0, 1])
            table = sharded.ones(chunks(0, 1), 4, 2, requires_grad=True, process_group=group)
            comm.gather_bytes(b"")
            if comm.rank() == 0:
                messages.append(error_text(kind, lambda: call(table)))
            else:
                other(table)
            comm.gather_bytes(b"")

        def look_up(table: ShardedTensor) -> Tensor:
            return functional.embedding(torch.tensor([0, 3]), table)

        def multiply(table: ShardedTensor) -> Tensor:
            return functional.linear(torch.ones(1, 2, requires_grad=True), table)

        started = time.monotonic()
        with mock.patch.dict(os.environ, SHARDWRIGHT_TIMEOUT="0.5"):
            for op in (look_up, multiply):
                case(RankLostError, op, lambda _: time.sleep(0))
                case(RankLostError, lambda table, op=op: op(table).sum().backward(), lambda table, op=op: op(table))
            case(RankLostError, lambda table: torch.equal(table, table), lambda _: time.sleep(0))

            def gathers(table: ShardedTensor) -> None:
                error_text(CommError, lambda: table.detach().gather())

            case(CommError, look_up, gathers)
            case(
                CommError, lambda table: look_up(table).sum().backward(), lambda table: (look_up(table), gathers(table))
            )
        return messages, time.monotonic() - started

    messages, seconds = run_ranks(2, on_rank, timeout=60)[0]
    assert seconds < 30
    for words, what in zip(
        messages[:5],
        ["embedding", "backward of embedding", "linear", "backward of linear", "equal"],
        strict=True,
    ):
        assert words.startswith(what), words
        assert "rank 1 did not arrive within 0.5 s" in words
    assert (
        messages[5] == "ranks run different programs: rank 0 is in 'embedding with a ShardedTensor', rank 1 in 'gather'"
    )
    assert "rank 0 is in 'backward of embedding with a ShardedTensor', rank 1 in 'gather'" in messages[6]
