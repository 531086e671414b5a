"""Operators that a ShardedTensor cannot support raise an error with the specific reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from shardwright import sharded
from shardwright.errors import (
    UnsupportedError,
)
from shardwright.sharded import (
    ShardedTensor,
)
from tests.sharded.specs_and_errors import chunks, error_text


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda x: float(x), "gather()"),
        (lambda x: int(x), "gather()"),
        (lambda x: complex(x), "gather()"),
        (lambda x: [0, 1][x], "gather()"),
        (lambda x: x.item(), "gather()"),
        (lambda x: x.tolist(), "gather()"),
        (lambda x: torch.from_dlpack(x), "each shard has its own memory"),
        (lambda x: np.from_dlpack(x), "each shard has its own memory"),
        (lambda x: x.data_ptr(), "each shard has its own memory"),
        (lambda x: x.share_memory_(), "each shard has its own memory"),
        (lambda x: x.numpy(), "each shard has its own memory"),
        (lambda x: x.register_hook(print), "only the shards are in the autograd graph"),
        (
            lambda x: torch.autograd.grad(torch.ones(1, requires_grad=True).sum(), [x]),
            "only the shards are in the autograd graph",
        ),
        (lambda x: x.new_zeros(3), "sharded.zeros(spec, size)"),
        (lambda x: torch.linalg.vector_norm(x), "sharded.clip_grad_norm_"),
        (lambda x: torch._foreach_norm([x]), "sharded.clip_grad_norm_"),
    ],
)
def test_an_unsupported_operator_gives_the_reason(call: Callable[[ShardedTensor], Any], reason: str) -> None:
    x = sharded.ones(chunks(0, 0), 4, requires_grad=True)
    message = error_text(UnsupportedError, lambda: call(x))
    assert reason in message
    assert "does not support this operator, as it cannot be computed shard by shard. Convert" not in message


def test_to_dlpack_raises_instead_of_reading_a_null_pointer() -> None:
    x = sharded.ones(chunks(0, 0), 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="data pointer"):
        torch.utils.dlpack.to_dlpack(x.detach())
