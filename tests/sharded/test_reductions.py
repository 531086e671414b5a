"""Reductions of empty tensors, and NumPy's names of dimensions."""

from __future__ import annotations

import pytest
import torch

from shardwright import sharded
from shardwright.errors import (
    UnsupportedError,
)
from shardwright.testing import run_ranks
from tests.sharded.specs_and_errors import chunks, error_text


def test_a_reduction_of_an_empty_tensor_tiles_its_result_or_raises_on_all_ranks() -> None:
    def on_rank() -> list[str]:
        messages = []
        for shape, spec, dim in (
            ((0, 3), chunks(0, 1), 0),
            ((4, 0), chunks(0, 1, dim=1), 1),
            ((0, 2), chunks(1, 1), 0),
        ):
            for keepdim in (False, True):
                x = sharded.zeros(spec, *shape)
                messages.append(
                    error_text(UnsupportedError, lambda x=x, d=dim, k=keepdim: x.sum(d, keepdim=k)).split(";")[0]
                )
        for spec, dim in ((chunks(0, 1), 1), (chunks(2), 1), (chunks(2, dim=1), 1)):
            made = sharded.zeros(spec, 4, 0).sum(dim)
            made.metadata().validate()
            whole = made.gather(2)
            assert whole is None or torch.equal(whole, torch.zeros(4))
        x = sharded.zeros(chunks(0, 1), 4, 0)
        messages += [error_text(IndexError, lambda: x.max(1)), error_text(IndexError, lambda: x.argmin(1))]
        return messages

    first, second, third = run_ranks(3, on_rank)
    assert first[-2:] == second[-2:] == third[-2:]
    assert [message.split(":")[0] for message in first[:-2]] == ["sum"] * 6


def test_reductions_accept_axis_and_keepdims() -> None:
    whole = torch.rand(2, 1, 3)
    x = chunks(0, 0).shard(whole)
    for call in (
        lambda t: t.sum(axis=1),
        lambda t: t.mean(axis=(1, 2), keepdims=True),
        lambda t: torch.amax(t, axis=-1, keepdims=True),
        lambda t: torch.softmax(t, axis=2),
        lambda t: t.squeeze(axis=1),
        lambda t: t.max(axis=2).values,
    ):
        assert torch.equal(call(x).gather(), call(whole))
    with pytest.raises(UnsupportedError, match="runs over dimension 0"):
        x.sum(axis=0)
